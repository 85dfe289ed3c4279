"""What the sharpness says about the learning rate in use."""

from __future__ import annotations

import math

from curvlens.report.data import Finding, Report, Sharpness
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import Amount, amount, certainty


def beyond_the_threshold(report: Report) -> Finding | None:
    for row, ratio in _ratios(report):
        if ratio.above(t.BEYOND):
            return Finding(
                "learning-rate-beyond-threshold",
                "problem",
                "The learning rate is beyond the threshold of stability",
                f"Sharpness {row.label} is {ratio} of the largest that the learning rate {number(row.rate)} can "
                "bear. On a "
                "quadratic loss the next steps grow along the sharpest direction.",
                _evidence(row, ratio),
                certainty(ratio) + " The threshold is that of full batches; small batches lower it.",
                f"Lower the learning rate below {number(row.largest_rate)}, warm up longer, or clip. If the "
                "loss holds "
                "still, it trains at the edge of stability: then this is where it stays.",
                "Cohen et al. 2021 and 2022, on the edge of stability of gradient descent and of Adam",
            )
    return None


def near_the_threshold(report: Report) -> Finding | None:
    for row, ratio in _ratios(report):
        if ratio.above(t.NEAR) and not ratio.above(t.BEYOND):
            return Finding(
                "learning-rate-near-threshold",
                "notice",
                "The learning rate is at the edge of stability",
                f"Sharpness {row.label} is {ratio} of what the learning rate {number(row.rate)} can bear.",
                _evidence(row, ratio),
                certainty(ratio) + " The threshold is that of full batches; small batches lower it.",
                f"There is no room for a larger rate ({number(row.largest_rate)} at most); warm-up and decay "
                "are worth more.",
                "Cohen et al. 2021 and 2022, on the edge of stability of gradient descent and of Adam",
            )
    return None


def _ratios(report: Report) -> list[tuple[Sharpness, Amount]]:
    """Sharpness over its threshold, where an optimizer with a known one was given."""
    return [
        (row, amount(row.value) / Amount(row.threshold))
        for row in report.sharpness
        if math.isfinite(row.threshold) and math.isfinite(row.rate) and row.threshold > 0
    ]


def _evidence(row: Sharpness, ratio: Amount) -> list[str]:
    return [
        f"sharpness {amount(row.value)}",
        f"threshold {row.rule} = {number(row.threshold)}",
        f"ratio {ratio}",
        f"largest stable learning rate {number(row.largest_rate)}",
    ]


RULES = (beyond_the_threshold, near_the_threshold)
