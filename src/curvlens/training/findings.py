def findings(track):
    return []
