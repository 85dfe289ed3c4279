"""Numbers beside what they are held against: bounds beside truth, sharpness beside its threshold, data noise."""

from __future__ import annotations

import math

from curvlens.report.data import Report
from curvlens.report.figures.dots import Series, dots, log_range
from curvlens.report.figures.figure import Figure, Panel, Table
from curvlens.report.figures.missing import sentence
from curvlens.report.figures.scale import Linear, Log
from curvlens.report.figures.words import number

MOST = 48  # rows of a drawing; the table has all


def bounds(report: Report) -> Figure | str:
    rows = report.bounds
    if not rows:
        return sentence(report, "Certified bounds of norms", "bounds")
    names = [r.row if r.row == r.column else f"{r.row} × {r.column}" for r in rows]
    gaps = [r.total / r.true for r in rows if math.isfinite(r.true) and r.true > 0 and math.isfinite(r.total)]
    lead = "The true norms were not computed."
    if gaps:
        middle = sorted(gaps)[len(gaps) // 2]
        lead = (
            f"The bound is {number(min(gaps))} to {number(max(gaps))} times the true norm, "
            f"{number(middle)} times at the median of {len(gaps)} blocks."
        )
    shown = sorted(
        range(len(rows)), key=lambda i: -rows[i].total if math.isfinite(rows[i].total) else math.inf
    )[:MOST]
    shown.sort()
    series = [
        Series("true norm", "total", [rows[i].true for i in shown]),
        Series("bound of H", "alarm", [rows[i].total for i in shown]),
        Series("of H_o", "outer", [rows[i].outer for i in shown]),
        Series("of H_f", "functional", [rows[i].functional for i in shown]),
    ]
    series = [s for s in series if any(math.isfinite(v) for v in s.values)]
    return Figure(
        "bounds",
        "Certified bounds beside the truth",
        lead,
        "Spectral norms of blocks of H, and upper bounds that hold for certain; a bound is useful where it is near. "
        + (f"The {MOST} largest are drawn." if len(rows) > MOST else ""),
        (
            Panel(
                lambda width: dots(
                    "bounds",
                    "Upper bounds of spectral norms beside the true norms",
                    "One row a block.",
                    [names[i] for i in shown],
                    series,
                    log_range(series),
                    unit="spectral norm",
                    width=width,
                )
            ),
        ),
        Table(
            ("row", "column", "true", "bound of H", "bound of H_o", "bound of H_f"),
            tuple((r.row, r.column, r.true, r.total, r.outer, r.functional) for r in rows),
        ),
    )


def sharpness(report: Report) -> Figure | str:
    found = [s for s in report.sharpness if math.isfinite(s.value.value)]
    if not found:
        return sentence(report, "Sharpness and its threshold", "sharpness")
    parts = []
    for s in found:
        ratio = s.value.value / s.threshold
        if math.isfinite(ratio):
            state = "beyond" if ratio > 1 else "within"
            parts.append(f"{s.label}: {number(ratio)} of the threshold {s.rule}, {state} the stable range")
        else:
            parts.append(f"{s.label}: {s.value}, no threshold is known without a learning rate")
    series = [
        Series(
            "sharpness",
            "total",
            [s.value.value for s in found],
            [0.0 if s.value.exact else s.value.stderr for s in found],
        ),
        Series("threshold", "alarm", [s.threshold for s in found]),
    ]
    series = [s for s in series if any(math.isfinite(v) for v in s.values)]
    return Figure(
        "sharpness",
        "Sharpness and the edge of stability",
        "; ".join(parts) + ".",
        "Largest eigenvalue as the optimizer sees it, beside the largest that its learning rate lets it follow. Above "
        "the threshold steps along that direction grow.",
        (
            Panel(
                lambda width: dots(
                    "sharpness",
                    "Sharpness beside the stability threshold",
                    "One row a view of the Hessian.",
                    [s.label for s in found],
                    series,
                    log_range(series),
                    unit="eigenvalue",
                    width=width,
                )
            ),
        ),
        Table(
            ("seen as", "sharpness", "±", "threshold", "rule", "rate in use", "largest stable rate"),
            tuple(
                (
                    s.label,
                    s.value.value,
                    0.0 if s.value.exact else s.value.stderr,
                    s.threshold,
                    s.rule or "none",
                    s.rate,
                    s.largest_rate,
                )
                for s in found
            ),
        ),
    )


def noise(report: Report) -> Figure | str:
    found = [n for n in report.noise if math.isfinite(n.mean) and n.mean]
    if not found:
        return sentence(report, "The numbers on parts of the data", "noise")
    worst = max(found, key=lambda n: abs(n.stderr / n.mean) if math.isfinite(n.stderr) else -1)
    count = max(len(n.values) for n in found)
    scaled = [[v / n.mean for v in n.values] + [math.nan] * (count - len(n.values)) for n in found]
    flat = [v for row in scaled for v in row if math.isfinite(v)]
    room = 0.05 * ((max(flat) - min(flat)) or 1.0)
    scale: Linear | Log = Linear(min(*flat, 1.0) - room, max(*flat, 1.0) + room)
    series = [Series(f"part {k}", "muted", [row[k] for row in scaled]) for k in range(count)]
    series.append(
        Series("mean ± error", "total", [1.0] * len(found), [abs(n.stderr / n.mean) for n in found])
    )
    return Figure(
        "noise",
        "How much the data decide",
        f"Another draw of as much data would move {worst.label} by about {abs(worst.stderr / worst.mean):.0%}, "
        f"the most of these.",
        "Each number measured on parts of the data, relative to its mean; the bar is the standard error of the mean.",
        (
            Panel(
                lambda width: dots(
                    "noise",
                    "Numbers on parts of the data, relative to their mean",
                    "One row a number.",
                    [n.label for n in found],
                    series,
                    scale,
                    unit="relative to the mean over parts",
                    width=width,
                    key=(
                        ("muted", "circle", "a part of the data"),
                        ("total", "square", "mean ± standard error"),
                    ),
                )
            ),
        ),
        Table(
            ("number", "mean", "± mean", "spread", *(f"part {k + 1}" for k in range(count))),
            tuple(
                (n.label, n.mean, n.stderr, n.spread, *n.values, *[None] * (count - len(n.values)))
                for n in found
            ),
        ),
    )
