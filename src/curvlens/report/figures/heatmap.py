"""A matrix as colours: logarithmic, linear, or signed around zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from curvlens.report.figures.colour import LEVELS
from curvlens.report.figures.scale import Linear, Log, SymLog
from curvlens.report.figures.scene import Point, Scene
from curvlens.report.figures.style import over
from curvlens.report.figures.words import extent, measured, runs

Matrix = Sequence[Sequence[float]]
DECADES = 8.0  # of a map of norms
MOST_CELLS = 100  # drawn one by one; a larger map is one picture
SQUARE = 27.0  # width of a cell without a number in it
MOST_WORDS = 1500  # cells whose values the page writes out beside the map; of a larger map it looks them up
NOUGHT, MISSING = "nought", "missing"


@dataclass(frozen=True)
class Colouring:
    """From a value to the role of its colour. What has no place on the scale is shown as zero or as missing."""

    scale: Linear | Log | SymLog
    signed: bool = False

    @classmethod
    def log(cls, values: Iterable[float], decades: float = DECADES) -> Colouring:
        """For norms: at most so many decades, smaller ones get the lowest colour."""
        return cls(Log.of(values, decades))

    @classmethod
    def linear(
        cls, values: Iterable[float], low: float | None = None, high: float | None = None
    ) -> Colouring:
        known = [v for v in values if math.isfinite(v)] or [0.0]
        return cls(Linear(min(known) if low is None else low, max(known) if high is None else high))

    @classmethod
    def around_zero(cls, values: Iterable[float], decades: float = 4) -> Colouring:
        """For signed values: as much to the left of zero as to the right, logarithmic in size."""
        top = max((abs(v) for v in values if math.isfinite(v)), default=0.0) or 1.0
        return cls(SymLog(-top, top, top * 10.0**-decades), signed=True)

    def level(self, value: float) -> int | None:
        fraction = self.scale.fraction(value)
        return None if fraction is None else min(LEVELS - 1, max(0, int(fraction * LEVELS)))

    def role(self, value: float) -> str:
        if value == 0 and not isinstance(self.scale, Linear):
            return NOUGHT
        level = self.level(value)
        if level is None:
            return MISSING
        return f"{'d' if self.signed else 'q'}{level}"


@dataclass(frozen=True)
class Source:
    """Paths in the data of a page: values, errors where there are some, names of rows; columns are named as rows or
    counted."""

    source: str
    errors: str
    names: str
    column: str = ""


def heatmap(
    name: str,
    title: str,
    description: str,
    values: Matrix,
    rows: Sequence[str],
    columns: Sequence[str],
    colouring: Colouring,
    *,
    unit: str = "",
    errors: Matrix | None = None,
    what: str = "",
    width: float = 680,
    cell: float = 44,
    cell_height: float | None = None,
    source: Source | None = None,
    numbers: bool = True,
    thin: bool = False,
    absent: str = "not known",
) -> Scene:
    """Rows and columns by name; by layer where there are too many to name. A cell says `what` it is and its value.

    `source` says where in the data the numbers are, for a map of more than `MOST_WORDS` cells; those of others may be
    written out. `thin` leaves out column labels where they would touch; `absent` is what a missing value means.
    """
    dense = not thin and (width - 130) / max(1, len(columns)) < 12
    left = 12 + min(0.4 * width, max((extent(text) for text, _ in _names(rows, dense)), default=0))
    longest = max((extent(text) for text, _ in _names(columns, dense)), default=0)
    flat = (
        thin
        or longest <= min(cell, (width - left - 8) / max(1, len(columns))) - 4
        or (dense and longest < 30)
    )
    top = 18.0 if flat else 10 + 0.82 * min(longest, 150)
    w = min(cell, (width - left - (8 if flat else 0.58 * min(longest, 60))) / max(1, len(columns)))
    h = min(w, cell) if cell_height is None else cell_height
    scene = Scene(name, title, description, width)
    x = lambda j: left + j * w  # noqa: E731
    y = lambda i: top + i * h  # noqa: E731
    for text, middle in _names(rows, dense or h < 11):
        scene.text("name", left - 7, y(0) + middle * h + 4, text, "end")
    free = -math.inf
    for text, middle in _names(columns, dense):
        if thin and middle * w - extent(text) / 2 < free:
            continue
        free = middle * w + extent(text) / 2 + 4
        at = x(0) + middle * w
        scene.text(
            "name", at if flat else at + 3, top - 6, text, "middle" if flat else "start", 0 if flat else -55
        )
    if len(rows) * len(columns) > MOST_CELLS:
        _picture(scene, values, colouring, (left, top, w, h))
    else:
        _cells(scene, values, colouring, (left, top, w, h), numbers)
    if dense:
        _separate(scene, rows, columns, (left, top, w, h))
    scene.rect("frame", left, top, w * len(columns), h * len(rows))
    scene.grid = {"x": left, "y": top, "w": w, "h": h, "rows": len(rows), "cols": len(columns)}
    if source:
        scene.cell_words = {k: v for k, v in asdict(source).items() if v}
    else:
        error = (lambda i, j: errors[i][j]) if errors is not None else lambda i, j: 0.0
        say = lambda v, e: "" if math.isnan(v) else measured(v, e)  # noqa: E731
        words = (say(v, error(i, j)) for i, row in enumerate(values) for j, v in enumerate(row))
        scene.cell_words = {"down": "|".join(rows), "across": "|".join(columns), "words": "|".join(words)}
        scene.cell_words["absent"] = absent
    scene.cell_words["what"] = what or unit
    right = max(
        left + w * len(columns),
        *(
            left + (j + 0.5) * w + (0 if flat else 0.6 * extent(c))
            for c, j in [(text, m - 0.5) for text, m in _names(columns, dense)][-2:]
        ),
        left + 290,
    )
    scene.width = min(width, right + 12)
    scene.height = _legend(
        scene, colouring, values, left, y(len(rows)) + 18, scene.width - left - 8, unit, absent
    )
    return scene


def _names(names: Sequence[str], dense: bool) -> list[tuple[str, float]]:
    """Each label with the middle of what it names, in cells."""
    if not dense:
        return [(name, i + 0.5) for i, name in enumerate(names)]
    found = [
        (layer.rpartition("layer.")[2] if "layer." in layer else layer, (a + b) / 2, b - a)
        for layer, a, b in runs(names)
    ]
    kept: list[tuple[str, float]] = []
    least = len(names) / 40  # of a label's distance to the one before
    for text, middle, _ in found:
        if not kept or middle - kept[-1][1] >= least:
            kept.append((text, middle))
    return kept


def _picture(
    scene: Scene, values: Matrix, colouring: Colouring, box: tuple[float, float, float, float]
) -> None:
    """All cells as one picture, with lines between them and crosses over what is missing where there is room."""
    left, top, w, h = box
    right, bottom = left + w * len(values[0]), top + h * len(values)
    roles = [[colouring.role(v) for v in row] for row in values]
    if (
        len(values) * len(values[0]) > MOST_WORDS
    ):  # half the colours: at a few pixels a cell nobody tells them apart
        roles = [[f"{r[0]}{int(r[1:]) & ~1}" if r[1:].isdigit() else r for r in row] for row in roles]
    scene.raster(left, top, right - left, bottom - top, [[_plain(role) for role in row] for row in roles])
    if min(w, h) < 8:
        return
    across = [((left, top + i * h), (right, top + i * h)) for i in range(1, len(values))]
    down = [((left + j * w, top), (left + j * w, bottom)) for j in range(1, len(values[0]))]
    scene.segments("gap", [*across, *down])
    crosses, r = [], min(w, h) * 0.25
    for i, row in enumerate(roles):
        for j, role in enumerate(row):
            if role == MISSING:
                x, y = left + (j + 0.5) * w, top + (i + 0.5) * h
                crosses += [((x - r, y - r), (x + r, y + r)), ((x - r, y + r), (x + r, y - r))]
    if crosses:
        scene.segments("cross", crosses)


def _plain(role: str) -> str:
    return {NOUGHT: "blank", MISSING: MISSING}.get(role, role)


def _cells(
    scene: Scene,
    values: Matrix,
    colouring: Colouring,
    box: tuple[float, float, float, float],
    numbers: bool,
) -> None:
    left, top, w, h = box
    gap = 1 if min(w, h) >= 8 else 0
    corners: dict[str, list[Point]] = {}
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            corners.setdefault(colouring.role(value), []).append((left + j * w, top + i * h))
    for role in sorted(corners):
        scene.cells(role, corners[role], w - gap, h - gap)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            role, a, b = colouring.role(value), left + j * w, top + i * h
            if role == MISSING and min(w, h) >= 8:
                c, d = min(w, h) * 0.25, (a + (w - gap) / 2, b + (h - gap) / 2)
                scene.line("cross", (d[0] - c, d[1] - c), (d[0] + c, d[1] + c))
                scene.line("cross", (d[0] - c, d[1] + c), (d[0] + c, d[1] - c))
            elif numbers and w >= 38 and h >= 16:
                words = "0" if role == NOUGHT else _short(value)
                scene.text(over(role), a + (w - gap) / 2, b + h / 2 + 3.5, words, "middle")
            elif role == NOUGHT and min(w, h) >= 14:
                scene.text("label", a + w / 2, b + h / 2 + 4, "0", "middle")


def _short(value: float) -> str:
    """Two digits, for the inside of a cell."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{float(f'{value:.2g}'):g}".replace("-", "−")
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _separate(
    scene: Scene, rows: Sequence[str], columns: Sequence[str], box: tuple[float, float, float, float]
) -> None:
    """Thin lines between layers."""
    left, top, w, h = box
    right, bottom = left + w * len(columns), top + h * len(rows)
    if w * len(columns) / max(1, len(runs(columns))) < 14:
        return
    for _, at, _ in runs(rows)[1:]:
        scene.line("grid", (left, top + at * h), (right, top + at * h))
    for _, at, _ in runs(columns)[1:]:
        scene.line("grid", (left + at * w, top), (left + at * w, bottom))


def _legend(
    scene: Scene,
    colouring: Colouring,
    values: Matrix,
    left: float,
    top: float,
    room: float,
    unit: str,
    absent: str,
) -> float:
    """A bar with ticks, and what stands for zero and for a missing value where there are some; its lower end."""
    length = min(260.0, room)
    if unit:
        scene.text("label", left, top + 2, unit)
        top += 10
    scene.ramp("d" if colouring.signed else "q", left, top, length, 9)
    last = -math.inf
    for value, words in colouring.scale.ticks(5):
        fraction = colouring.scale.fraction(value)
        if fraction is not None and -0.01 <= fraction <= 1.01:
            at = left + fraction * length
            scene.line("axis", (at, top + 9), (at, top + 13))
            if at - last > 26:
                scene.text("label", at, top + 25, words, "middle")
                last = at
    bottom = top + 30
    roles = {colouring.role(v) for row in values for v in row}
    at, line = left + length + 24, top
    for role, words in ((NOUGHT, "exactly zero"), (MISSING, absent)):
        if role in roles:
            if at + 24 + extent(words) > left + room:
                at, line = left, bottom + 4
            scene.rect(role, at, line, 12, 10)
            if role == MISSING:
                scene.line("cross", (at + 3, line + 2), (at + 9, line + 8))
                scene.line("cross", (at + 3, line + 8), (at + 9, line + 2))
            scene.text("label", at + 18, line + 9, words)
            at += 36 + extent(words)
            bottom = max(bottom, line + 14)
    return bottom + 4
