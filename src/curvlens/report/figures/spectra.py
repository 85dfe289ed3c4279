"""Spectra: of H with its outer eigenvalues, of each block, and how unlike the blocks' are."""

from __future__ import annotations

import math
from collections.abc import Callable

from curvlens.report.data import Curve, Report
from curvlens.report.figures.figure import NARROW, Figure, Panel, Table
from curvlens.report.figures.heatmap import MOST_WORDS, Colouring, Source, heatmap
from curvlens.report.figures.lines import Line, lines, multiples
from curvlens.report.figures.missing import sentence
from curvlens.report.figures.scale import Linear, Log, SymLog
from curvlens.report.figures.words import measured, number, runs

LEAST_SHARE = 0.05  # of an eigenvector in a block, to be in the table
MOST_ROWS = 24  # of blocks drawn one by one
DECADES = 6  # of density in sight


def _axis(curves: list[Curve], others: list[float]) -> SymLog | Linear:
    ends = [v for c in curves for v in (c.eigenvalues[0], c.eigenvalues[-1]) if c.eigenvalues] + others
    low, high = min(ends), max(ends)
    threshold = max(c.threshold for c in curves)
    return SymLog(low, high, threshold) if threshold > 0 else Linear(low, high)


def _heights(curves: list[Curve]) -> Log:
    top = max((v for c in curves for v in c.density if math.isfinite(v)), default=1.0) or 1.0
    return Log(top * 10.0**-DECADES, top * 1.5)


def spectrum(report: Report) -> Figure | str:
    curve = report.spectrum
    if curve is None or not curve.eigenvalues:
        return sentence(report, "The spectral density and its error", "spectrum")
    pairs = [
        (p.value, p.residual, f"eigenvalue {measured(p.value, 0.0 if p.exact else p.residual)}")
        for p in report.eigenpairs
        if math.isfinite(p.value)
    ]
    x = _axis([curve], [p[0] for p in pairs])
    y = _heights([curve])
    linear = isinstance(x, Linear)
    rows = [
        (value, density, 0.0 if curve.exact else error)
        for value, density, error in zip(curve.eigenvalues, curve.density, curve.stderr, strict=True)
    ]
    step = max(1, len(rows) // 50)
    note = f"Every {step}th point of {len(rows)}; the data have all." if step > 1 else ""
    return Figure(
        "spectrum",
        "The spectrum of H",
        _lead(report, curve),
        f"Spectral density of {curve.size:,} eigenvalues"
        + (
            ", from all of them"
            if curve.exact
            else f", from {curve.samples} probes, with a band of one standard error"
        )
        + (
            ""
            if linear
            else f"; the axis is symmetric-logarithmic, linear within ±{number(curve.threshold, 2)}"
        )
        + ". Both densities and eigenvalues span decades. Ticks at the foot are eigenvalues found one by one, with "
        "their residuals.",
        (
            Panel(
                lambda width: lines(
                    "spectrum",
                    "Spectral density of the Hessian",
                    "Density over the eigenvalue.",
                    [_line(curve, 160 if width > NARROW else 80)],
                    x,
                    y,
                    x_label="eigenvalue",
                    y_label="density" + ("" if linear else ", per unit of asinh"),
                    floor=True,
                    rug=pairs,
                    width=width,
                )
            ),
        ),
        Table(("eigenvalue", "density", "±"), tuple(rows[::step]), note),
    )


def _lead(report: Report, curve: Curve) -> str:
    parts = []
    for key, name in (("lambda_min", "λ_min"), ("lambda_max", "λ_max")):
        if key in report.numbers:
            n = report.numbers[key]
            parts.append(f"{name} = {measured(n.value, 0.0 if n.exact else n.stderr)}")
    near = sum(d for x, d in zip(curve.eigenvalues, curve.density, strict=True) if abs(x) <= curve.threshold)
    if curve.threshold and curve.step:
        parts.append(f"{near * curve.step:.0%} of all eigenvalues lie within ±{number(curve.threshold, 2)}")
    return "; ".join(parts) + "." if parts else "The ends of the spectrum were not measured."


def block_spectra(report: Report) -> Figure | str:
    spectra = report.spectra
    if spectra is None or not spectra.curves:
        return sentence(report, "Spectra of single blocks", "spectra")
    x, y = _axis(spectra.curves, []), _heights(spectra.curves)
    exact = all(c.exact for c in spectra.curves)
    rows = []
    for c in spectra.curves:
        mean = _mean(c, lambda v: v)
        rows.append(
            (c.name, c.size, mean, math.sqrt(max(0.0, _mean(c, lambda v: v * v))), _mean(c, lambda v: v < 0))
        )
    return Figure(
        "spectra",
        "The spectrum of each block",
        f"{len(spectra.curves)} diagonal blocks on one axis; heights are logarithmic over {DECADES} decades.",
        "Each curve is the density of the eigenvalues of one diagonal block of H"
        + (", from all of them." if exact else ", an estimate.")
        + " A wide curve has curvature on many scales; what lies left of the dotted zero is negative.",
        (
            Panel(
                lambda width: multiples(
                    "spectra",
                    "Spectral densities of the diagonal blocks",
                    "One panel a block, on one axis.",
                    [(c.name, _line(c, 40 if width > NARROW else 32)) for c in spectra.curves],
                    x,
                    y,
                    x_label="eigenvalue",
                    width=width,
                )
            ),
        ),
        Table(
            ("block", "eigenvalues", "mean of the curve", "root mean square", "share below zero"),
            tuple(rows),
            "From the smoothed curves as drawn.",
        ),
    )


def _line(curve: Curve, points: int) -> Line:
    """With as many points as can be seen."""
    step = max(1, round(len(curve.eigenvalues) / points))
    errors = None if curve.exact else curve.stderr[::step]
    return Line(curve.name, "total", curve.eigenvalues[::step], curve.density[::step], errors)


def _mean(curve: Curve, f: Callable[[float], float]) -> float:
    mass = sum(curve.density) or 1.0
    return sum(d * f(v) for v, d in zip(curve.eigenvalues, curve.density, strict=True)) / mass


def divergence(report: Report) -> Figure | str:
    spectra = report.spectra
    if spectra is None or not spectra.divergence:
        return sentence(report, "Comparisons of the blocks' spectra", "spectra")
    names, value = spectra.names, spectra.divergence
    n = range(len(names))
    pairs = sorted(
        ((value[i][j], i, j) for i in n for j in n if i < j and math.isfinite(value[i][j])), reverse=True
    )
    lead = "Only one block has a spectrum."
    if pairs:
        d, i, j = pairs[0]
        mean = sum(v for v, *_ in pairs) / len(pairs)
        lead = (
            f"Most unlike are {names[i]} and {names[j]}, {measured(d, spectra.stderr[i][j])} of at most ln 2 = 0.693; "
            f"the mean over pairs is {number(mean)}."
        )
    colouring = Colouring.linear([], 0.0, math.log(2))
    source = (
        Source("spectra/divergence", "spectra/stderr", "spectra/names")
        if len(names) ** 2 > MOST_WORDS
        else None
    )
    return Figure(
        "heterogeneity",
        "How unlike the blocks' spectra are",
        lead,
        "Jensen-Shannon divergence of the spectral densities, in nats: 0 alike, ln 2 without overlap. Optimizers with "
        "one rate for all parameters do worse where blocks differ much.",
        (
            Panel(
                lambda width: heatmap(
                    "heterogeneity",
                    "Jensen-Shannon divergence between spectra of blocks",
                    "Blocks by blocks.",
                    value,
                    names,
                    names,
                    colouring,
                    errors=spectra.stderr,
                    unit="Jensen-Shannon divergence, nats",
                    what="divergence",
                    width=width,
                    source=source,
                )
            ),
        ),
        Table(
            ("block", "block", "divergence", "±"),
            tuple((names[i], names[j], d, spectra.stderr[i][j]) for d, i, j in pairs[:40]),
            f"The 40 largest of {len(pairs):,}." if len(pairs) > 40 else "",
        ),
    )


def _by_layer(names: list[str], value: list[list[float]]) -> tuple[list[str], list[list[float]]]:
    rows = runs(names)
    return [layer for layer, _, _ in rows], [
        [sum(column) for column in zip(*value[first:last], strict=True)] for _, first, last in rows
    ]


def eigenvectors(report: Report) -> Figure | str:
    pairs = [p for p in report.eigenpairs if p.mass]
    if not pairs:
        return sentence(report, "The outermost eigenvectors", "eigenvalues")
    names = [g.name for g in report.groups]
    value = [[p.mass[b] for p in pairs] for b in range(len(names))]
    top = pairs[0]
    order = sorted(range(len(names)), key=lambda b: -top.mass[b])[:3]
    shown, value = _by_layer(names, value) if len(names) > MOST_ROWS else (names, value)
    columns = [number(p.value, 3) for p in pairs]
    header = ("eigenvalue", "± eigenvalue", "cos² with the gradient", "block", "share")
    rows = tuple(
        (p.value, 0.0 if p.exact else p.residual, p.gradient, names[b], p.mass[b])
        for p in pairs
        for b in sorted(range(len(names)), key=lambda b: -p.mass[b])
        if p.mass[b] >= LEAST_SHARE
    )
    coarse = " Blocks of one layer are added up; the data have each." if len(names) > MOST_ROWS else ""
    return Figure(
        "eigenvectors",
        "Where the sharpest directions live",
        f"The direction of {number(top.value)} lies in "
        + ", ".join(f"{names[b]} ({top.mass[b]:.0%})" for b in order)
        + f"; the gradient has {top.gradient:.1%} of its square along it.",
        "Share of each eigenvector's square in every block; columns are eigenvalues and sum to one." + coarse,
        (
            Panel(
                lambda width: heatmap(
                    "eigenvectors",
                    "Mass of eigenvectors by block",
                    "Blocks by eigenvalues.",
                    value,
                    shown,
                    columns,
                    Colouring.linear([], 0.0, max(max(row) for row in value)),
                    unit="share of the eigenvector's square",
                    what="share",
                    width=width,
                    cell=44,
                    cell_height=22,
                    thin=True,
                )
            ),
        ),
        Table(header, rows, f"Shares of {LEAST_SHARE:.0%} and more."),
    )
