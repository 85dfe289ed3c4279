"""The sentence that stands where a figure would, had it been measured."""

from __future__ import annotations

from curvlens.report.data import Report


def sentence(report: Report, what: str, stage: str) -> str:
    """What is missing, and why: `what` begins the sentence, `stage` is the part of the analysis that measures it."""
    found = report.stage(stage)
    if found is None:
        return f"{what} are not part of this analysis."
    if found.status == "partial" and found.why.startswith("not begun"):
        return f"{what} were {found.why.rstrip('.')}."
    why = f": {found.why}" if found.why else ""
    state = {
        "skipped": "were left out",
        "failed": "could not be measured",
        "partial": "were begun and not finished",
    }.get(found.status, "are not in this report")
    return f"{what} {state}{why.rstrip('.')}."
