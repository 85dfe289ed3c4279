"""How far the numbers themselves go: other data, bounds, what was not finished."""

from __future__ import annotations

import math
from collections.abc import Sequence

from curvlens.report.data import Finding, Report, Stage
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import certainty, of


def noisy_data(report: Report) -> Finding | None:
    """The error of the mean over parts of the data, relative."""
    found = [
        (row, row.stderr / abs(row.mean))
        for row in report.noise
        if row.mean and math.isfinite(row.stderr) and row.stderr > t.NOISY * abs(row.mean)
    ]
    if not found:
        return None
    row, share = max(found, key=lambda pair: pair[1])
    parts = len(row.values)
    return Finding(
        "noisy-data",
        "warning",
        "With other data the numbers would move",
        f"Over {parts} parts of the data the {row.label} varies so much that another draw of as much data would "
        "change it "
        f"by {100 * share:.0f} % or so.",
        [
            f"{r.label}: {number(r.mean)} ± {number(r.stderr, 2)} (spread between parts {number(r.spread, 2)})"
            for r, _ in found
        ],
        f"The error is itself estimated from {parts} parts.",
        f"Give about {math.ceil((share / t.NOISY) ** 2)} times as much data before acting on single numbers "
        "here; other "
        "findings hold for the data given.",
        "standard error over disjoint parts of the data",
    )


def loose_bounds(report: Report) -> Finding | None:
    known = [row for row in report.bounds if row.true > 0 and math.isfinite(row.total)]
    found = [row for row in known if row.total > t.LOOSE * row.true]
    if not found:
        return None
    worst = max(found, key=lambda row: row.total / row.true)
    return Finding(
        "loose-bounds",
        "info",
        "The certified bounds lie far above the true norms",
        f"For {len(found)} of {len(known)} pairs of blocks the bound is more than {t.LOOSE:g} times the "
        "spectral norm: it "
        "certifies an order in the weights, not a size.",
        [f"{worst.row}, {worst.column}: bound {number(worst.total)}, true {number(worst.true)}"],
        certainty(of(1.0, 0.0, True)),
        "Choose steps from the measured norms; use the bounds for what no measurement gives, all inputs of a kind.",
        "Closing the Curvature Gap 2025, Theorems 1 and 6",
    )


def unfinished(report: Report) -> Finding | None:
    """Parts that failed or were cut, and numbers that have not converged."""
    parts = [stage for stage in report.stages if stage.status in ("partial", "failed")]
    numbers = [n for n in report.numbers.values() if not n.converged]
    if not parts and not numbers:
        return None
    failed = any(stage.status == "failed" for stage in parts)
    return Finding(
        "unfinished",
        "warning" if failed else "notice",
        "Not everything was measured to the end",
        "What is missing is missing in the findings, too: that none speaks of it says nothing.",
        [*reasons(parts), *([f"not converged: {', '.join(n.label for n in numbers)}"] if numbers else [])],
        "The numbers that are here are right within the errors beside them.",
        "Run again with more products or minutes (with --resume it goes on), or with the preset 'thorough'.",
        "stages and convergence under “Methods and trust”",
    )


def reasons(stages: Sequence[Stage]) -> list[str]:
    """Why stages are not complete, each reason once, with the stages it holds for."""
    titles: dict[str, list[str]] = {}
    for stage in stages:
        titles.setdefault(stage.why, []).append(stage.title)
    return [f"{', '.join(names)}: {why}" for why, names in titles.items()]


RULES = (noisy_data, loose_bounds, unfinished)
