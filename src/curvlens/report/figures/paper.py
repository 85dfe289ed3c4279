"""A scene drawn by matplotlib, for PNG: the same marks in the same places, without a browser."""

from __future__ import annotations

from pathlib import Path as File
from typing import Any

from curvlens.report.figures import style
from curvlens.report.figures.colour import LEVELS, bytes_of
from curvlens.report.figures.scene import (
    Cells,
    Dot,
    Mark,
    Path,
    Ramp,
    Raster,
    Rect,
    Scene,
    Segments,
    Text,
    shape_points,
)
from curvlens.report.figures.words import indexed

POINT = 0.75  # of a CSS pixel, which is 1/96 inch


def available() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def save_png(scene: Scene, path: File, scale: float = 2.0) -> None:
    """Write the scene at so many pixels a unit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(scene.width / 96, scene.height / 96), dpi=96 * scale)
    figure.patch.set_facecolor(style.COLOURS["ground"][0])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    for order, mark in enumerate(scene.marks):
        _draw(axes, mark, order)
    FigureCanvasAgg(figure).print_png(str(path))


def _draw(axes: Any, mark: Mark, order: int) -> None:
    look: dict[str, Any]
    from matplotlib.colors import to_rgba
    from matplotlib.lines import Line2D

    if isinstance(mark, Text):
        look = dict(style.resolved(mark.role))
        axes.text(
            mark.x,
            mark.y,
            _lowered(mark.words),
            color=look["fill"],
            fontsize=float(str(look["font-size"])[:-2]) * POINT,
            fontweight="bold" if "font-weight" in look else "normal",
            rotation=-mark.turn,
            rotation_mode="anchor",
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            va="baseline",
            zorder=order,
        )
        return
    if isinstance(mark, Ramp):
        levels = ((f"{mark.kind}{i}" for i in range(LEVELS)),)
        mark = Raster("raster", mark.x, mark.y, mark.width, mark.height, tuple(tuple(row) for row in levels))
    if isinstance(mark, Raster):
        pixels = [[bytes_of(str(style.resolved(role)["fill"])) for role in row] for row in mark.cells]
        box = (mark.x, mark.x + mark.width, mark.y + mark.height, mark.y)
        axes.imshow(pixels, extent=box, aspect="auto", interpolation="nearest", zorder=order)
        return
    look = dict(style.resolved(mark.role))
    width = float(look.get("stroke-width", 0)) * POINT
    if isinstance(mark, (Segments, Path)) and not (isinstance(mark, Path) and mark.closed):
        dashes = look.get("stroke-dasharray")
        pattern: Any = (0, [float(part) for part in dashes.split()]) if dashes else "-"
        for piece in (mark.points,) if isinstance(mark, Path) else mark.pieces:
            xs, ys = zip(*piece, strict=True)
            axes.add_line(
                Line2D(xs, ys, color=look["stroke"], linewidth=width, linestyle=pattern, zorder=order)
            )
        return
    fill = look.get("fill", "none")
    inside = "none" if fill == "none" else to_rgba(fill, look.get("fill-opacity"))
    for shape in _shapes(mark):
        shape.set(facecolor=inside, edgecolor=look.get("stroke", "none"), linewidth=width, zorder=order)
        axes.add_patch(shape)


def _shapes(mark: Rect | Cells | Dot | Path) -> list[Any]:
    from matplotlib.patches import Circle, Polygon, Rectangle

    if isinstance(mark, Rect):
        return [Rectangle((mark.x, mark.y), mark.width, mark.height)]
    if isinstance(mark, Cells):
        return [Rectangle(corner, mark.width, mark.height) for corner in mark.corners]
    if isinstance(mark, Path):
        return [Polygon(mark.points)]
    if mark.shape == "circle":
        return [Circle((mark.x, mark.y), mark.radius)]
    return [Polygon(shape_points(mark.shape, mark.x, mark.y, mark.radius))]


def _lowered(words: str) -> str:
    """Indices in the notation of matplotlib; a dollar sign would begin a formula."""
    pieces = indexed(words.replace("$", r"\$"))
    return "".join(rf"$_{{\mathrm{{{text}}}}}$" if below else text for text, below in pieces)
