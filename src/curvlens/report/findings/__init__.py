"""Findings: sentences that the numbers of a report carry, each with evidence, uncertainty, action and source.

A rule takes a report and gives a `Finding`, or None where the numbers do not carry it: because they say otherwise, are
missing, or because their error leaves it open. Thresholds are in `thresholds.py`; rules are grouped by what they look
at. Findings about a training run are rules of the same kind over its record, and are ranked by `ranked` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from curvlens.report.data import SEVERITIES, Finding, Report
from curvlens.report.findings import attention, depth, layers, spectrum, steps, trust

Rule = Callable[[Report], Finding | None]

RULES: tuple[Rule, ...] = (
    *steps.RULES,
    *spectrum.RULES,
    *layers.RULES,
    *attention.RULES,
    *depth.RULES,
    *trust.RULES,
)

NAMES = (
    "amplified-curvature",
    "concave-along-gradient",
    "created-curvature",
    "epsilon-bound-norm",
    "even-heads",
    "gauss-newton-misleads",
    "gauss-newton-serves",
    "gradient-in-sharp-directions",
    "grows-with-depth",
    "idle-heads",
    "ill-conditioned",
    "ill-conditioned-early",
    "learning-rate-beyond-threshold",
    "learning-rate-near-threshold",
    "loose-bounds",
    "negative-curvature",
    "noisy-data",
    "query-key-against-value",
    "saturated-heads",
    "sharpening-norm",
    "sharpest-block",
    "unfinished",
    "unlike-spectra",
    "varies-over-layers",
)


def findings(report: Report) -> list[Finding]:
    """All that the numbers carry, the gravest first."""
    return ranked(found for rule in RULES if (found := rule(report)) is not None)


def ranked(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


__all__ = ["NAMES", "RULES", "Rule", "findings", "ranked"]
