"""Plots in the papers' form: one look for all, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

COLOURS = {"total": "#222222", "outer": "#c0392b", "functional": "#2471a3"}
LABELS = {"total": "$H$", "outer": "$H_o$", "functional": "$H_f$"}
DOTS_PER_INCH = 100
SHADES = 128  # colours kept in a file: a plot needs no more, and the file is a third


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "expected matplotlib for the figures, got none: pip install 'curvlens[report]', or run without figures"
        ) from error


def panels(columns: int, rows: int = 1, width: float = 3.2, height: float = 2.6) -> tuple[Any, Any]:
    """A figure and its axes `[rows, columns]`, always as an array."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def titled(axis: Any, title: str, x: str = "", y: str = "") -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


def curve(
    axis: Any,
    x: Sequence[float],
    runs: Sequence[Sequence[float]],
    label: str,
    colour: str,
    wide: bool = False,
) -> None:
    """The mean of repeats `runs [repeats, points]` and a band of one standard error.

    `wide` draws a pale broad line, to lie below another one: H where one of its parts rules.
    """
    count = len(runs)
    means = [sum(values) / count for values in zip(*runs, strict=True)]
    look: dict[str, Any] = {"lw": 4.0, "alpha": 0.3} if wide else {"lw": 1.1, "marker": ".", "ms": 3.5}
    axis.plot(x, means, color=colour, label=label, **look)
    if wide:
        return
    if count > 1:
        errors = [
            (sum((v - m) ** 2 for v in values) / (count - 1) / count) ** 0.5
            for values, m in zip(zip(*runs, strict=True), means, strict=True)
        ]
        low = [max(m - e, 0.02 * m) for m, e in zip(means, errors, strict=True)]
        high = [m + e for m, e in zip(means, errors, strict=True)]
        axis.fill_between(x, low, high, color=colour, alpha=0.25, lw=0)


def trend(
    axis: Any, x: Sequence[float], anchor: tuple[float, float], exponent: float, text: str = ""
) -> None:
    """The dashed line `y ∝ x^exponent` through a point."""
    x0, y0 = anchor
    ends = [min(x), max(x)]
    axis.plot(ends, [y0 * (end / x0) ** exponent for end in ends], "--", color="0.55", lw=0.9)
    if text:
        end = (ends[1], y0 * (ends[1] / x0) ** exponent)
        axis.annotate(text, end, (2, -3), textcoords="offset points", fontsize=7, color="0.35")


def legend(axis: Any, **options: Any) -> None:
    axis.legend(fontsize=7, frameon=False, **options)


def save(figure: Any, path: str | Path) -> Path:
    """A small PNG."""
    from matplotlib.ticker import NullFormatter
    from PIL import Image

    for axis in figure.axes:
        for side, scale in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
            if scale == "log":  # labels at 2, 3, 4, … of a short range run into one another
                side.set_minor_formatter(NullFormatter())

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    # the palette that reaches farthest: the usual one gives up the colour of a thin line
    wide = Image.Quantize.MAXCOVERAGE
    image = Image.open(drawn).convert("RGB").quantize(SHADES, wide, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    return path
