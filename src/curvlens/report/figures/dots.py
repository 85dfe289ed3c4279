"""Numbers by row, with errors: a profile by depth, bounds beside truth, two runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from curvlens.report.figures.scale import Linear, Log, SymLog
from curvlens.report.figures.scene import Point, Scene
from curvlens.report.figures.words import extent, measured

SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Series:
    """One value a row; NaN for what is not known. `errors` are standard errors, 0 where exact."""

    label: str
    colour: str  # one of style.SERIES
    values: Sequence[float]
    errors: Sequence[float] | None = None

    def error(self, i: int) -> float:
        return self.errors[i] if self.errors is not None else 0.0


def log_range(series: Sequence[Series], decades: float = 10) -> Log:
    """Of the sizes of all values."""
    return Log.of((abs(v) for s in series for v in s.values), decades).wider()


def dots(
    name: str,
    title: str,
    description: str,
    rows: Sequence[str],
    series: Sequence[Series],
    scale: Linear | Log | SymLog,
    *,
    unit: str = "",
    connect: bool = False,
    lines: Sequence[tuple[float, str]] = (),
    key: Sequence[tuple[str, str, str]] = (),
    width: float = 680,
) -> Scene:
    """A dot a value on its row, with a whisker of one standard error; `lines` are values to compare with; `key` is what
    the marks mean (colour, shape, words), by default the names of the series.

    On a logarithmic scale a negative value is a hollow mark at its size; zero, and what is not known, stand in a
    column of their own to the left.
    """
    pitch = 22.0 if len(rows) <= 32 else 14.0 if len(rows) <= 64 else 8.0
    left = 10 + min(0.42 * width, max(extent(row) for row in rows))
    log = isinstance(scale, Log)
    apart = log and any(not math.isfinite(v) or v == 0 for s in series for v in s.values)
    start = left + (34 if apart else 8)
    stop = width - 14
    scene = Scene(name, title, description, width)
    top = _key(scene, series, log, left, width, key) + (18 if lines else 0)
    bottom = top + pitch * len(rows)
    _axes(scene, scale, (start, stop, top, bottom), unit, width)
    if apart:
        scene.line("frame", (left + 26, top), (left + 26, bottom))
    every = max(1, round(11 / pitch + 0.4))
    for i, row in enumerate(rows):
        if i % every == 0:
            scene.text("name", left - 4, top + (i + 0.5) * pitch + 4, row, "end")

    def place(value: float) -> float | None:
        fraction = scale.fraction(abs(value) if log else value)
        return None if fraction is None else start + min(1.0, max(0.0, fraction)) * (stop - start)

    for value, words in lines:
        at = place(value)
        if at is not None:
            scene.line("dash-alarm", (at, top), (at, bottom))
            anchor = "end" if at > (start + stop) / 2 else "start"
            scene.text("text-alarm", at + (-4 if anchor == "end" else 4), top - 6, words, anchor)
    spread = 3.4 if pitch >= 18 and len(series) > 1 else 0.0
    for k, s in enumerate(series):
        shift = spread * (k - (len(series) - 1) / 2) * 2 / max(1, len(series) - 1)
        whiskers = [
            _whisker(place, v, s.error(i), log, top + (i + 0.5) * pitch + shift)
            for i, v in enumerate(s.values)
        ]
        if any(whiskers):
            scene.segments(f"line-{s.colour}", [w for w in whiskers if w])
        spots = [(place(v), top + (i + 0.5) * pitch + shift) for i, v in enumerate(s.values)]
        if connect:
            _joined(scene, f"thin-{s.colour}", spots)
        for i, (v, (at, y)) in enumerate(zip(s.values, spots, strict=True)):
            tip = f"{rows[i]}, {s.label}: {measured(v, s.error(i))}"
            shape = next((mark for colour, mark, _ in key if colour == s.colour), SHAPES[k % 4])
            _mark(scene, s, shape, v, at, y, left + 13, log, pitch, tip)
    scene.height = bottom + (44 if unit else 26)
    return scene


def _whisker(
    place: Callable[[float], float | None], value: float, error: float, log: bool, y: float
) -> tuple[Point, Point] | None:
    """One standard error to both sides; to the end of the axis where that reaches below zero on a log scale."""
    if not (error and math.isfinite(error) and math.isfinite(value)):
        return None
    low, high = (abs(value) - error, abs(value) + error) if log else (value - error, value + error)
    a, b = place(low if not log or low > 0 else 5e-324), place(high)
    return None if a is None or b is None or b - a < 5 else ((a, y), (b, y))


def _mark(
    scene: Scene,
    s: Series,
    shape: str,
    value: float,
    at: float | None,
    y: float,
    gutter: float,
    log: bool,
    pitch: float,
    tip: str,
) -> None:
    radius = 4.0 if pitch >= 12 else 2.6
    if at is None:
        if value == 0:
            scene.dot(f"hollow-{s.colour}", gutter, y, shape, radius, tip)
        else:
            scene.text("label", gutter, y + 4, "?", "middle")
        return
    hollow = log and value < 0
    scene.dot(f"{'hollow' if hollow else 'mark'}-{s.colour}", at, y, shape, radius, tip)


def _joined(scene: Scene, role: str, spots: Sequence[tuple[float | None, float]]) -> None:
    """A line through the spots, broken where there is none."""
    piece: list[tuple[float, float]] = []
    for at, y in [*spots, (None, 0.0)]:
        if at is not None:
            piece.append((at, y))
            continue
        if len(piece) > 1:
            scene.line(role, *piece)
        piece = []


def _key(
    scene: Scene,
    series: Sequence[Series],
    log: bool,
    left: float,
    width: float,
    key: Sequence[tuple[str, str, str]],
) -> float:
    """The marks and their names above the plot; the lower end."""
    at, y = left + 8, 12.0
    key = key or [(s.colour, SHAPES[k % 4], s.label) for k, s in enumerate(series)]
    entries = [(f"mark-{colour}", shape, words, f"text-{colour}") for colour, shape, words in key]
    if log and any(v < 0 for s in series for v in s.values):
        entries.append(("hollow-muted", "circle", "hollow: negative, at its size", "label"))
    if log and any(v == 0 for s in series for v in s.values):
        entries.append(("hollow-muted", "circle", "left of the axis: zero", "label"))
    if len(entries) == 1:
        return 8.0
    for role, shape, words, text in entries:
        if at + 14 + extent(words, 12) > width and at > left + 8:
            at, y = left + 8, y + 18
        scene.dot(role, at, y - 4, shape, 4)
        scene.text(text, at + 10, y, words)
        at += 30 + extent(words, 12)
    return y + 12


def _axes(
    scene: Scene,
    scale: Linear | Log | SymLog,
    box: tuple[float, float, float, float],
    unit: str,
    width: float,
) -> None:
    start, stop, top, bottom = box
    last = -math.inf
    for value, words in scale.ticks(max(3, int((stop - start) / 70))):
        fraction = scale.fraction(value)
        if fraction is None or not -1e-9 <= fraction <= 1 + 1e-9:
            continue
        at = start + fraction * (stop - start)
        scene.line("zero-line" if value == 0 else "grid", (at, top), (at, bottom))
        if at - last > 24:
            scene.text("label", at, bottom + 16, words, "middle")
            last = at
    if unit:
        scene.text("label", (start + stop) / 2, bottom + 34, unit, "middle")
