"""Curves with their bands: a spectrum, small spectra beside each other, curvature through training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from curvlens.report.figures.scale import Linear, Log, Scale, SymLog
from curvlens.report.figures.scene import Point, Scene
from curvlens.report.figures.words import extent, measured, number


@dataclass(frozen=True)
class Line:
    """A curve through points, with one standard error on both sides where `errors` are given."""

    label: str
    colour: str  # one of style.SERIES
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] | None = None
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Frame:
    """Where on the drawing the scales run."""

    x: Scale
    y: Scale
    left: float
    right: float
    top: float
    bottom: float

    def across(self, value: float) -> float | None:
        f = self.x.fraction(value)
        return None if f is None else self.left + f * (self.right - self.left)

    def up(self, value: float) -> float | None:
        """What lies beyond an end is drawn at the end."""
        f = self.y.fraction(value)
        return None if f is None else self.bottom - min(1.0, max(0.0, f)) * (self.bottom - self.top)

    def at(self, x: float, y: float, floor: bool) -> Point | None:
        a, b = self.across(x), self.up(y)
        if b is None and floor and math.isfinite(y):  # zero or less on a logarithmic scale
            b = self.bottom
        return None if a is None or b is None else (a, b)


def lines(
    name: str,
    title: str,
    description: str,
    curves: Sequence[Line],
    x: Scale,
    y: Scale,
    *,
    x_label: str = "",
    y_label: str = "",
    floor: bool = False,
    events: Sequence[tuple[float, str]] = (),
    rug: Sequence[tuple[float, float, str]] = (),
    width: float = 680,
    height: float = 300,
) -> Scene:
    """Curves on common axes.

    `floor`: a density below the axis is drawn on it; elsewhere a value without a place breaks its curve and is marked
    below the axis. `rug`: single values with errors along the foot. `events`: steps to mark by a vertical line.
    """
    scene = Scene(name, title, description, width)
    top = _key(scene, curves, width) + (16 if events else 0) + (14 if y_label else 0)
    foot = 16 if rug else 0
    frame = Frame(x, y, 54, width - 16, top, top + height)
    _axes(scene, frame, x_label, y_label, foot)
    for curve in curves:
        if curve.errors is not None:
            _band(scene, frame, curve, floor)
    for curve in curves:
        _curve(scene, frame, curve, floor)
    _events(scene, frame, events)
    for value, error, tip in rug:
        _rug(scene, frame, value, error, tip)
    scene.height = frame.bottom + foot + (42 if x_label else 24)
    return scene


def multiples(
    name: str,
    title: str,
    description: str,
    panels: Sequence[tuple[str, Line]],
    x: Scale,
    y: Scale,
    *,
    x_label: str = "",
    width: float = 680,
    panel: float = 150,
    height: float = 62,
) -> Scene:
    """The same axes once a panel, in rows; the axis is written under the last of each column."""
    count = max(1, min(int((width + 10) / (panel + 10)), len(panels)))
    each = (width - 10 * (count - 1) - 12) / count
    scene = Scene(name, title, description, width)
    pitch = height + 28
    zeros: list[tuple[Point, Point]] = []
    feet: list[tuple[Point, Point]] = []
    for k, (label, curve) in enumerate(panels):
        left, top = 6 + (k % count) * (each + 10), 16 + (k // count) * pitch
        frame = Frame(x, y, left, left + each, top, top + height)
        zero = frame.across(0.0)
        if zero is not None:
            zeros.append(((zero, top), (zero, frame.bottom)))
        feet.append(((left, frame.bottom), (left + each, frame.bottom)))
        room = int(each / (0.55 * 11.5))
        scene.text("name", left, top - 4, label if len(label) <= room else "…" + label[1 - room :])
        spots = [p for a, b in zip(curve.x, curve.y, strict=True) if (p := frame.at(a, b, True)) is not None]
        if len(spots) > 1:
            ends = [(spots[-1][0], frame.bottom), (spots[0][0], frame.bottom)]
            scene.area(f"hill-{curve.colour}", [*spots, *ends])
        if k >= len(panels) - count:
            _ticks_below(scene, frame, 0, max(3, int(each / 40)))
    scene.segments("zero-line", zeros)
    scene.segments("axis", feet)
    rows = -(-len(panels) // count)
    scene.height = 16 + rows * pitch + (22 if x_label else 6)
    if x_label:
        scene.text("label", width / 2, scene.height - 4, x_label, "middle")
    return scene


def _ticks_below(scene: Scene, frame: Frame, foot: float, most: int) -> None:
    ticks = sorted(frame.x.ticks(most), key=lambda tick: (tick[0] != 0, -abs(tick[0])))
    taken: list[tuple[float, float]] = []
    for value, words in ticks:  # zero and the ends first
        at = frame.across(value)
        half = extent(words) / 2 + 3
        if at is None or not frame.left - 1 <= at <= frame.right + 1:
            continue
        scene.line("axis", (at, frame.bottom + foot), (at, frame.bottom + foot + 4))
        if all(at + half <= a or at - half >= b for a, b in taken):
            scene.text("label", at, frame.bottom + foot + 16, words, "middle")
            taken.append((at - half, at + half))


def _axes(scene: Scene, frame: Frame, x_label: str, y_label: str, foot: float) -> None:
    for value, words in frame.y.ticks(max(3, int((frame.bottom - frame.top) / 45))):
        f = frame.y.fraction(value)
        if f is None or not -1e-9 <= f <= 1 + 1e-9:
            continue
        at = frame.bottom - f * (frame.bottom - frame.top)
        scene.line("grid", (frame.left, at), (frame.right, at))
        scene.text("label", frame.left - 6, at + 4, words, "end")
    zero = frame.across(0.0) if not isinstance(frame.x, Log) else None
    if zero is not None and frame.left < zero < frame.right and isinstance(frame.x, SymLog):
        scene.line("zero-line", (zero, frame.top), (zero, frame.bottom + foot))
    scene.line("axis", (frame.left, frame.bottom + foot), (frame.right, frame.bottom + foot))
    _ticks_below(scene, frame, foot, max(4, int((frame.right - frame.left) / 60)))
    if x_label:
        scene.text("label", (frame.left + frame.right) / 2, frame.bottom + foot + 34, x_label, "middle")
    if y_label:
        scene.text("label", 4, frame.top - 12, y_label)


def _key(scene: Scene, curves: Sequence[Line], width: float) -> float:
    if len(curves) < 2:
        return 6.0
    at, y = 54.0, 12.0
    for curve in curves:
        if at + 30 + extent(curve.label, 12) > width and at > 54:
            at, y = 54.0, y + 18
        scene.line(f"{'dash' if curve.dashed else 'line'}-{curve.colour}", (at, y - 4), (at + 20, y - 4))
        scene.text(f"text-{curve.colour}", at + 26, y, curve.label)
        at += 46 + extent(curve.label, 12)
    return y + 14


def _pieces(points: Sequence[Point | None]) -> list[list[Point]]:
    found: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [piece for piece in found if piece]


def _curve(scene: Scene, frame: Frame, curve: Line, floor: bool) -> None:
    points = [frame.at(a, b, floor) for a, b in zip(curve.x, curve.y, strict=True)]
    role = f"{'dash' if curve.dashed else 'line'}-{curve.colour}"
    for piece in _pieces(points):
        if len(piece) > 1:
            scene.line(role, *piece)
    if floor:
        return
    tips = [f"{curve.label} at {number(a, 6)}: " for a in curve.x]
    lone = {piece[0] for piece in _pieces(points) if len(piece) == 1}
    for i, (point, tip) in enumerate(zip(points, tips, strict=True)):
        value = curve.y[i]
        error = curve.errors[i] if curve.errors is not None else 0.0
        if point is None:
            across = frame.across(curve.x[i])
            if across is not None and math.isfinite(value):
                words = f"{tip}{number(value)}, which has no place on this axis"
                scene.dot(f"hollow-{curve.colour}", across, frame.bottom, "triangle", 4, words)
            elif across is not None:
                scene.dot(
                    f"hollow-{curve.colour}", across, frame.top, "diamond", 4, f"{tip}not a finite number"
                )
        elif curve.dots or point in lone:
            scene.dot(f"mark-{curve.colour}", *point, "circle", 3, tip + measured(value, error))


def _band(scene: Scene, frame: Frame, curve: Line, floor: bool) -> None:
    upper: list[Point | None] = []
    lower: list[Point | None] = []
    for a, b, e in zip(curve.x, curve.y, curve.errors or (), strict=True):
        known = math.isfinite(e) and frame.at(a, b, floor) is not None
        upper.append(frame.at(a, b + e, True) if known else None)
        lower.append(frame.at(a, b - e, True) if known else None)
    for above, below in zip(_pieces(upper), _pieces(lower), strict=True):
        if len(above) > 1:
            scene.area(f"band-{curve.colour}", [*above, *reversed(below)])


def _events(scene: Scene, frame: Frame, events: Sequence[tuple[float, str]]) -> None:
    last = -math.inf
    for value, words in events:
        at = frame.across(value)
        if at is None or not frame.left <= at <= frame.right:
            continue
        scene.line("dash-alarm", (at, frame.top), (at, frame.bottom), tip=f"{words} at {number(value, 6)}")
        half = extent(words) / 2
        middle = min(max(at, frame.left + half), frame.right - half)
        if middle - half > last:
            scene.text("text-alarm", middle, frame.top - 5, words, "middle")
            last = middle + half + 6


def _rug(scene: Scene, frame: Frame, value: float, error: float, tip: str) -> None:
    at = frame.across(value)
    if at is None:
        return
    foot = frame.bottom + 16
    a, b = frame.across(value - error), frame.across(value + error)
    if a is not None and b is not None and b - a > 2:
        scene.line("thin-ink", (max(a, frame.left), foot - 6), (min(b, frame.right), foot - 6))
    scene.line("line-ink", (at, foot - 11), (at, foot - 1), tip=tip)


def spectrum_axis(low: float, high: float) -> SymLog:
    """Symmetric-logarithmic over a range, linear within a ten-thousandth of its larger end."""
    return SymLog(low, high, 1e-4 * (max(abs(low), abs(high)) or 1.0))


def steps_axis(steps: Sequence[float]) -> Linear:
    known = [s for s in steps if math.isfinite(s)] or [0.0]
    return Linear(min(known), max(known) if max(known) > min(known) else min(known) + 1)
