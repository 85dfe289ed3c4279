"""Through training: the gradient beside the sharp directions, every attention head, every sublayer of the depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from curvlens.report.figures.figure import Figure, Panel, Table
from curvlens.report.figures.heatmap import Colouring, heatmap
from curvlens.report.figures.lines import Line, lines, steps_axis
from curvlens.report.figures.scale import Linear
from curvlens.report.figures.words import number

if TYPE_CHECKING:
    from curvlens.report.figures.track import Marks, Track


def figures(track: Track, events: Marks) -> Iterator[Figure | str]:
    yield _alignment(track, events) or "How the gradient lies to the curvature was not tracked."
    yield _heads(track) or "The curvature of attention heads was not tracked."
    yield _depth(track) or "Curvature through the depth was not tracked."


def _numbers(values: Sequence[Any]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _alignment(track: Track, events: Marks) -> Figure | None:
    top = _numbers(track.series("alignment", "top"))
    along = _numbers(track.series("alignment", "gradient_curvature"))
    largest = _numbers(track.series("lambda_max", "value"))
    share = [a / b if b else math.nan for a, b in zip(along, largest, strict=True)]
    known = [v for v in (*top, *share) if math.isfinite(v)]
    if not known:
        return None
    steps = [float(s) for s in track.steps]
    curves = [
        Line("cos² of gradient and sharpest direction", "total", steps, top, dots=True),
        Line("gᵀHg / gᵀg over λ_max", "functional", steps, share, dots=True),
    ]
    scale = Linear(min(0.0, *known) - 0.02, max(known) + 0.05)
    return Figure(
        "track-alignment",
        "The gradient beside the curvature",
        f"At the last measurement {number(top[-1], 3)} of the gradient's square lie in the sharpest direction, and "
        f"along the gradient the curvature is {number(share[-1], 3)} of the largest.",
        "Of the gradient on the held batches. Both are 1 where the gradient points along the sharpest direction, as it "
        "does when the rate is at the edge of stability.",
        (
            Panel(
                lambda width: lines(
                    "track-alignment",
                    "The gradient beside the curvature",
                    "Alignment by step.",
                    curves,
                    steps_axis(steps),
                    scale,
                    x_label="step",
                    y_label="share",
                    events=events,
                    width=width,
                    height=220,
                )
            ),
        ),
        Table(
            ("step", "cos²", "gᵀHg / gᵀg", "λ_max"),
            tuple(zip(track.steps, top, along, largest, strict=True)),
        ),
    )


def _heads(track: Track) -> Figure | None:
    found = [(m["step"], m["heads"]) for m in track.measurements if m.get("heads")]
    if not found:
        return None
    first = found[0][1]
    kinds = [block for block in ("QQ", "KK", "QK", "VQ", "VK") if block in first["norms"]]
    rows: list[tuple[str | float, ...]] = []
    maps: list[Map] = []
    for block in kinds:
        places = [
            (i, h)
            for i, row in enumerate(first["norms"][block])
            for h, value in enumerate(row)
            if value is not None
        ]
        names = [f"{first['layers'][i]} {h}" for i, h in places]
        matrix = [_numbers([heads["norms"][block][i][h] for _, heads in found]) for i, h in places]
        errors = [_numbers([heads["stderr"][block][i][h] for _, heads in found]) for i, h in places]
        maps.append((block, names, matrix, errors))
        rows += [(block, name, *values) for name, values in zip(names, matrix, strict=True)]
    return _maps(
        "track-heads",
        "Every attention head through training",
        "The functional curvature of every head by itself, in closed form from one gradient.",
        "‖H_f‖_F of the blocks of one head, split at the output of its layer: queries and keys (QQ, KK, QK), values "
        "with queries and keys (VQ, VK).",
        [step for step, _ in found],
        maps,
        Table(("block", "head", *(f"step {step}" for step, _ in found)), tuple(rows), "‖H_f‖_F"),
    )


def _depth(track: Track) -> Figure | None:
    found = [(m["step"], m["depth"]) for m in track.measurements if m.get("depth")]
    if not found:
        return None
    names = found[0][1]["names"]
    rows: list[tuple[str | float, ...]] = []
    maps: list[Map] = []
    for kind in ("passed", "created", "total"):
        matrix = [_numbers([depth[kind]["frobenius"][i] for _, depth in found]) for i in range(len(names))]
        errors = [
            _numbers([depth[kind]["frobenius_error"][i] for _, depth in found]) for i in range(len(names))
        ]
        maps.append((kind, names, matrix, errors))
        rows += [(kind, name, *values) for name, values in zip(names, matrix, strict=True)]
    return _maps(
        "track-depth",
        "Curvature by depth through training",
        "What every sublayer passes down of the curvature above it, and what it creates itself.",
        "Frobenius norms of the loss's curvature by the stream at the sublayer's start, total = passed + created; "
        "estimates, the data have their errors.",
        [step for step, _ in found],
        maps,
        Table(("part", "sublayer", *(f"step {step}" for step, _ in found)), tuple(rows), "‖·‖_F"),
    )


Map = tuple[str, list[str], list[list[float]], list[list[float]]]  # name, rows, values, errors


def _maps(
    name: str, title: str, lead: str, how: str, steps: list[int], maps: list[Map], table: Table
) -> Figure:
    def panel(k: int) -> Panel:
        kind, names, matrix, errors = maps[k]
        return Panel(
            lambda width: heatmap(
                f"{name}-{kind}",
                f"{title}: {kind}",
                "Rows by steps.",
                matrix,
                names,
                [f"{step}" for step in steps],
                Colouring.log([v for row in matrix for v in row]),
                errors=errors,
                unit=kind,
                width=width,
                cell=56,
                cell_height=16,
                what=kind,
                numbers=False,
                thin=True,
            ),
            (k,),
            kind.lower(),
        )

    panels = tuple(panel(k) for k in range(len(maps)))
    return Figure(name, title, lead, how, panels, table, (("Shown", tuple(m[0] for m in maps)),))
