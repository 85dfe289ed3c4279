"""A report on the terminal, in 80 columns."""

from __future__ import annotations

from curvlens.report.data import Report


def text(report: Report) -> str:
    return report.meta.title
