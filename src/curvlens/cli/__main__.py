from curvlens.cli import main

main()
