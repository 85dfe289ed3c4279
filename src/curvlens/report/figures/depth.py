"""Curvature by depth: what each sublayer passes down of the curvature above it, and what it creates."""

from __future__ import annotations

import math

from curvlens.report.data import Depth, Number, Report
from curvlens.report.figures.dots import Series, dots, log_range
from curvlens.report.figures.figure import NARROW, Figure, Panel, Table
from curvlens.report.figures.missing import sentence
from curvlens.report.figures.words import number

KEYS = {
    "frobenius": "Frobenius norm",
    "trace": "trace",
    "largest": "largest eigenvalue",
    "smallest": "smallest eigenvalue",
}


def depth_profile(report: Report) -> Figure | str:
    steps = report.depth
    if not steps:
        return sentence(report, "The shares of passed and created curvature", "depth")
    keys = [key for key in KEYS if any(key in step.passed or key in step.created for step in steps)]
    header = ["sublayer"]
    for key in keys:
        header += [f"{kind}: {KEYS[key]}{e}" for kind in ("passed", "created", "total") for e in ("", " ±")]
    rows = []
    for step in steps:
        line: list[str | float] = [step.name]
        for key in keys:
            for part in (step.passed, step.created, step.total):
                line += [_value(part, key), _error(part, key)]
        rows.append(tuple(line))
    return Figure(
        "depth",
        "Curvature by depth: passed down or created",
        _lead(steps),
        "Curvature of the loss by the stream at each sublayer's start, first layer on top: what comes down through "
        "the sublayer, Jᵀ Γ J, and what its own nonlinearity adds, Σ g ∂²f. Logarithmic in size; hollow marks are "
        "negative. Whiskers are one standard error.",
        tuple(_panel(k, key, steps) for k, key in enumerate(keys)),
        Table(tuple(header), tuple(rows)),
        (("Shown", tuple(KEYS[key] for key in keys)),) if len(keys) > 1 else (),
    )


def norm_gains(report: Report) -> Figure | str:
    norms = report.norms
    if norms is None:
        return sentence(report, "The gains of the norms", "gains")
    series = [Series("gain γ / σ", "total", norms.gain)]
    worst = max(range(len(norms.names)), key=norms.gain.__getitem__)
    return Figure(
        "gains",
        "What the norms do to curvature",
        f"{norms.names[worst]} scales changes most, by {number(norms.gain[worst])}, and so curvature by "
        f"{number(norms.gain[worst] ** 2)}; what enters it has a deviation of {number(norms.deviation[worst])}.",
        "Root mean square over tokens and features of γ / √(var + ε), the size of a norm's Jacobian: curvature above "
        "the norm reaches its input times the square of it. Exact.",
        (
            Panel(
                lambda width: dots(
                    "gains",
                    "Gain of each norm",
                    "One row a norm in the order of the forward pass.",
                    norms.names,
                    series,
                    log_range(series),
                    unit="γ / σ",
                    connect=True,
                    width=min(width, 1.25 * NARROW),
                    lines=[(1.0, "1")],
                )
            ),
        ),
        Table(
            ("norm", "deviation of its input", "gain", "share of ε"),
            tuple(zip(norms.names, norms.deviation, norms.gain, norms.epsilon, strict=True)),
        ),
    )


def _panel(k: int, key: str, steps: list[Depth]) -> Panel:
    series = [
        Series(
            "passed down",
            "outer",
            [_value(s.passed, key) for s in steps],
            [_error(s.passed, key) for s in steps],
        ),
        Series(
            "created",
            "functional",
            [_value(s.created, key) for s in steps],
            [_error(s.created, key) for s in steps],
        ),
    ]
    scale = log_range(series)
    return Panel(
        lambda width: dots(
            f"depth-{key}",
            f"{KEYS[key]} of passed and created curvature by depth",
            "One row a sublayer in the order of the forward pass.",
            [s.name for s in steps],
            series,
            scale,
            unit=KEYS[key],
            connect=True,
            width=width,
        ),
        (k,),
        key,
    )


def _lead(steps: list[Depth]) -> str:
    shares = []
    for s in steps:
        a, b = _value(s.passed, "frobenius"), _value(s.created, "frobenius")
        if math.isfinite(a) and math.isfinite(b) and a + b > 0:
            shares.append((b / (a + b), s, a, b))
    if not shares:
        return "The norms of the passed and the created part are not known."
    more = sum(share > 0.5 for share, *_ in shares)
    _, s, a, b = max(shares, key=lambda item: item[0])
    return (
        f"{more} of {len(shares)} sublayers create more curvature than they pass down; most of all {s.name}, "
        f"which creates {number(b)} and passes {number(a)}."
    )


def _value(part: dict[str, Number], key: str) -> float:
    return part[key].value if key in part else math.nan


def _error(part: dict[str, Number], key: str) -> float:
    if key not in part:
        return math.nan
    return 0.0 if part[key].exact else part[key].stderr
