"""Two reports side by side: what changed, in units of the error of the change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from curvlens.report.data import NUMBERS, Depth, Number, Report
from curvlens.report.figures.blocks import coarser
from curvlens.report.figures.dots import Series, dots, log_range
from curvlens.report.figures.figure import Cell, Figure, Panel, Table
from curvlens.report.figures.heatmap import SQUARE, Colouring, heatmap
from curvlens.report.figures.lines import Line, lines
from curvlens.report.figures.scale import Linear, Log, SymLog
from curvlens.report.figures.words import measured, number, runs

CLEAR = 2.0  # errors from which a difference is called clear


def change(a: Number, b: Number) -> tuple[float, float, float]:
    """b − a, its standard error, and their ratio; the error of two exact numbers is zero, and their ratio NaN."""
    errors = [0.0 if n.exact else n.stderr for n in (a, b)]
    error = math.hypot(*errors)
    difference = b.value - a.value
    return difference, error, difference / error if error > 0 else math.nan


def shared(a: Report, b: Report) -> list[str]:
    """Keys of the numbers that both reports have."""
    both = [key for key in NUMBERS if key in a.numbers and key in b.numbers]
    return both + [key for key in a.numbers if key in b.numbers and key not in NUMBERS]


def figures(a: Report, b: Report, names: tuple[str, str]) -> Iterator[Figure | str]:
    yield numbers(a, b, names)
    yield _maps(a, b, names) or "The two reports have no map of the same blocks."
    yield _depth(a, b, names) or "The two reports have no sublayer in common whose curvature was measured."
    yield _heads(a, b, names) or "The two reports have no attention heads to compare."
    yield _spectra(a, b, names) or "One of the reports has no spectral density."


def numbers(a: Report, b: Report, names: tuple[str, str]) -> Figure | str:
    keys = shared(a, b)
    if not keys:
        return "The two reports have no number in common."
    found = [(key, *change(a.numbers[key], b.numbers[key])) for key in keys]
    estimated = [f for f in found if math.isfinite(f[3])]
    clear = [f for f in estimated if abs(f[3]) >= CLEAR]
    lead = (
        f"{len(clear)} of {len(estimated)} estimated numbers differ by {CLEAR:g} errors or more"
        + (f", most {_label(a, max(clear, key=lambda f: abs(f[3]))[0])}." if clear else ".")
        if estimated
        else "All numbers are exact: their differences are what they are."
    )
    rows = tuple(
        (
            _label(a, key),
            a.numbers[key].value,
            _error(a.numbers[key]),
            b.numbers[key].value,
            _error(b.numbers[key]),
            difference,
            error,
            ratio,
        )
        for key, difference, error, ratio in found
    )
    shown = list(estimated) or [(key, d, 0.0, d) for key, d, *_ in found]
    values = [f[3] for f in shown]
    top = max(CLEAR + 1, *(abs(v) for v in values))
    scale = SymLog(-top, top, CLEAR) if top > 20 else Linear(-top, top)
    unit = "difference over its standard error" if estimated else "difference"
    series = [Series(f"{names[1]} − {names[0]}", "total", values)]
    return Figure(
        "numbers-compared",
        "Numbers, and how sure their differences are",
        lead,
        f"{names[1]} minus {names[0]}; the error of a difference is √(σ_a² + σ_b²). "
        f"Within {CLEAR:g} errors it may be chance.",
        (
            Panel(
                lambda width: dots(
                    "numbers-compared",
                    "Differences in units of their error",
                    "One row a number.",
                    [_label(a, f[0]) for f in shown],
                    series,
                    scale,
                    unit=unit,
                    width=width,
                    lines=[(-CLEAR, f"−{CLEAR:g}"), (CLEAR, f"{CLEAR:g}")] if estimated else [],
                )
            ),
        ),
        Table(
            (
                "number",
                names[0],
                f"± {names[0]}",
                names[1],
                f"± {names[1]}",
                "difference",
                "± difference",
                "in errors",
            ),
            rows,
        ),
    )


def _label(report: Report, key: str) -> str:
    return report.numbers[key].label or NUMBERS.get(key, key)


def _error(n: Number) -> float:
    return 0.0 if n.exact else n.stderr


def _maps(a: Report, b: Report, names: tuple[str, str]) -> Figure | None:
    parts = [p for p in a.maps if p in b.maps and a.maps[p].names == b.maps[p].names]
    if not parts:
        return None
    whole = runs(a.maps[parts[0]].names)
    if len(whole) == 1:
        whole = [(name, i, i + 1) for i, name in enumerate(a.maps[parts[0]].names)]
    sets = [range(first, last) for _, first, last in whole]
    rows = [name for name, _, _ in whole]
    table: list[tuple[Cell, ...]] = []
    panels: list[Panel] = []
    leads: list[str] = []
    for k, part in enumerate(parts):
        (before, e), (after, f) = coarser(a.maps[part], sets), coarser(b.maps[part], sets)
        ratio = [
            [_log2(y, x) for x, y in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        ]
        error = [
            [_spread(before[i][j], e[i][j], after[i][j], f[i][j]) for j in range(len(rows))]
            for i in range(len(rows))
        ]
        flat = [
            (abs(v), i, j)
            for i, row in enumerate(ratio)
            for j, v in enumerate(row)
            if j >= i and math.isfinite(v)
        ]
        if flat and not leads:
            _, i, j = max(flat)
            pair = rows[i] if i == j else f"{rows[i]} × {rows[j]}"
            leads.append(f"‖{part}‖_F changes most in {pair}, by a factor of {number(2 ** ratio[i][j])}.")
        table += [
            (part, rows[i], rows[j], before[i][j], after[i][j], 2 ** ratio[i][j], ratio[i][j], error[i][j])
            for _, i, j in sorted(flat, reverse=True)[:60]
        ]
        panels.append(_ratio_panel(k, part, rows, rows, ratio, error, "maps"))
    return Figure(
        "maps-compared",
        f"Where it curves more in {names[1]}",
        "".join(leads) or "No norm is known in both.",
        f"log₂ of the norm in {names[1]} over the norm in {names[0]}: blue has grown, orange has shrunk; 1 is a "
        "factor of two. Errors of layers are bounds.",
        tuple(panels),
        Table(
            ("matrix", "row", "column", names[0], names[1], "factor", "log₂", "±"),
            tuple(table),
            "The sixty largest changes of each.",
        ),
        (("Matrix", tuple(parts)),) if len(parts) > 1 else (),
    )


def _log2(after: float, before: float) -> float:
    return math.log2(after / before) if after > 0 and before > 0 else math.nan


def _spread(x: float, e: float, y: float, f: float) -> float:
    """The error of log₂(y / x), to first order."""
    return math.hypot(e / x, f / y) / math.log(2) if x > 0 and y > 0 else math.nan


def _ratio_panel(
    k: int,
    label: str,
    rows: Sequence[str],
    columns: Sequence[str],
    ratio: list[list[float]],
    error: list[list[float]] | None,
    name: str,
    cell: float = 40,
    height: float | None = None,
) -> Panel:
    top = max((abs(v) for row in ratio for v in row if math.isfinite(v)), default=1.0) or 1.0
    colouring = Colouring(Linear(-top, top), signed=True)
    return Panel(
        lambda width: heatmap(
            f"{name}-{k}",
            f"log₂ of the ratio of {label}",
            "Signed: growth and decline.",
            ratio,
            rows,
            columns,
            colouring,
            errors=error,
            unit=f"log₂ of the ratio, {label}",
            what="log₂ ratio",
            width=width,
            cell=cell,
            cell_height=height,
            thin=name == "heads",
        ),
        (k,),
        f"{k}",
    )


def _depth(a: Report, b: Report, names: tuple[str, str]) -> Figure | None:
    steps = [(x, y) for x in a.depth for y in b.depth if x.name == y.name]
    if not steps:
        return None
    kinds: tuple[tuple[str, Callable[[Depth], dict[str, Number]]], ...] = (
        ("created", lambda s: s.created),
        ("passed down", lambda s: s.passed),
        ("total", lambda s: s.total),
    )

    def panel(k: int) -> Panel:
        label, pick = kinds[k]
        series = [
            Series(
                names[n],
                ("outer", "functional")[n],
                [_norm(pick(pair[n])) for pair in steps],
                [_norm_error(pick(pair[n])) for pair in steps],
            )
            for n in range(2)
        ]
        return Panel(
            lambda width: dots(
                f"depth-{k}",
                f"Curvature {label} by depth, two runs",
                "One row a sublayer.",
                [x.name for x, _ in steps],
                series,
                log_range(series),
                unit=f"Frobenius norm, {label}",
                connect=True,
                width=width,
            ),
            (k,),
            label.replace(" ", "-"),
        )

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (x.name, *(_norm(pick(s)) for _, pick in kinds for s in (x, y))) for x, y in steps
    )
    factors = [(abs(_log2(_norm(y.total), _norm(x.total))), x, y) for x, y in steps]
    factors = [f for f in factors if math.isfinite(f[0])]
    lead = "The totals are not known in both."
    if factors:
        _, x, y = max(factors, key=lambda f: f[0])
        lead = f"The total at {x.name} goes from {number(_norm(x.total))} to {number(_norm(y.total))}."
    return Figure(
        "depth-compared",
        "Through the depth",
        lead,
        "Frobenius norms of the loss's curvature by the stream at each sublayer's start, with one standard error.",
        tuple(panel(k) for k in range(len(kinds))),
        Table(("sublayer", *(f"{label}, {name}" for label, _ in kinds for name in names)), rows),
        (("Shown", tuple(label for label, _ in kinds)),),
    )


def _norm(part: dict[str, Number]) -> float:
    return part["frobenius"].value if "frobenius" in part else math.nan


def _norm_error(part: dict[str, Number]) -> float:
    return _error(part["frobenius"]) if "frobenius" in part else math.nan


def _heads(a: Report, b: Report, names: tuple[str, str]) -> Figure | None:
    if a.heads is None or b.heads is None or a.heads.layers != b.heads.layers:
        return None
    layers = a.heads.layers
    keys = [
        k
        for k in a.heads.norms
        if k in b.heads.norms and _shape(a.heads.norms[k]) == _shape(b.heads.norms[k])
    ]
    if not keys:
        return None
    panels: list[Panel] = []
    rows: list[tuple[str, str, int, float, float, float]] = []
    for k, key in enumerate(keys):
        x, y = a.heads.norms[key], b.heads.norms[key]
        ratio = [[_log2(y[i][h], x[i][h]) for h in range(len(x[i]))] for i in range(len(x))]
        columns = [str(h) for h in range(max(map(len, x)))]
        panels.append(_ratio_panel(k, f"‖{key}‖", layers, columns, ratio, None, "heads", SQUARE, 22))
        rows += [
            (key, layers[i], h, x[i][h], y[i][h], ratio[i][h])
            for i in range(len(x))
            for h in range(len(x[i]))
        ]
    known = [row for row in rows if math.isfinite(row[5])]
    lead = "No head's norm is known in both."
    if known:
        key, layer, head, before, after, _ = max(known, key=lambda row: abs(row[5]))
        lead = f"‖{key}‖ changes most in {layer} head {head}, from {number(before)} to {number(after)}."
    return Figure(
        "heads-compared",
        "Head by head",
        lead,
        f"log₂ of the norm of each head's functional block in {names[1]} over {names[0]}.",
        tuple(panels),
        Table(("block", "layer", "head", *names, "log₂"), tuple(rows)),
        (("Block", tuple(keys)),) if len(keys) > 1 else (),
    )


def _shape(rows: Sequence[Sequence[float]]) -> list[int]:
    return [len(row) for row in rows]


def _spectra(a: Report, b: Report, names: tuple[str, str]) -> Figure | None:
    if a.spectrum is None or b.spectrum is None:
        return None
    both = (a.spectrum, b.spectrum)
    low, high = min(c.eigenvalues[0] for c in both), max(c.eigenvalues[-1] for c in both)
    threshold = max(c.threshold for c in both)
    x: SymLog | Linear = SymLog(low, high, threshold) if threshold > 0 else Linear(low, high)
    top = max(v for c in both for v in c.density if math.isfinite(v))
    y = Log(top * 1e-6, top * 1.5)
    curves = [
        Line(names[n], ("outer", "functional")[n], c.eigenvalues, c.density, None if c.exact else c.stderr)
        for n, c in enumerate(both)
    ]
    ends = [
        f"λ_max {measured(r.numbers['lambda_max'].value, _error(r.numbers['lambda_max']))} in {name}"
        for r, name in zip((a, b), names, strict=True)
        if "lambda_max" in r.numbers
    ]
    rows = [
        (name, v, d)
        for name, c in zip(names, both, strict=True)
        for v, d in list(zip(c.eigenvalues, c.density, strict=True))[::2]
    ]
    return Figure(
        "spectra-compared",
        "The spectra",
        "; ".join(ends) + "." if ends else "The ends of the spectra were not measured in both.",
        "Spectral densities of H in both runs on one axis, each on a grid of its own.",
        (
            Panel(
                lambda width: lines(
                    "spectra-compared",
                    "Spectral densities of two runs",
                    "Two curves.",
                    curves,
                    x,
                    y,
                    x_label="eigenvalue",
                    y_label="density",
                    floor=True,
                    width=width,
                )
            ),
        ),
        Table(("run", "eigenvalue", "density"), tuple(rows), "Every second point."),
    )
