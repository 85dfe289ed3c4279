"""Curvature through training, from the records of a `Tracker`: sharpness, losses, and each block over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from curvlens.report.figures import track_parts as parts
from curvlens.report.figures.figure import Figure, Panel, Table
from curvlens.report.figures.heatmap import Colouring, heatmap
from curvlens.report.figures.lines import Line, lines, steps_axis
from curvlens.report.figures.scale import Linear, Log
from curvlens.report.figures.words import measured, number

Marks = Sequence[tuple[float, str]]


class Track(Protocol):
    """What is needed of a track: `curvlens.training.record.Track` has it."""

    measurements: list[dict[str, Any]]
    header: dict[str, Any]

    @property
    def steps(self) -> list[int]: ...

    def series(self, *path: str) -> list[Any]: ...


def figures(track: Track, events: Marks = ()) -> Iterator[Figure | str]:
    """The figures of a run, or a sentence for what was not measured."""
    if not track.measurements:
        yield "The track holds no measurement yet."
        return
    yield _sharpness(track, events) or "The largest eigenvalue was not tracked."
    yield _preconditioned(track, events) or "Sharpness as the optimizer sees it was not tracked."
    yield _loss(track, events) or "No loss was tracked."
    yield _blocks(track) or "The curvature of single blocks was not tracked."
    yield from parts.figures(track, events)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _known(*series: Sequence[float]) -> bool:
    return any(math.isfinite(v) for values in series for v in values)


def _span(*series: Sequence[float]) -> Log:
    """From a little below the least to a little above the largest, thresholds far away left out of view."""
    both = Log.of((v for values in series for v in values), 8)
    return Log(both.low / 1.3, both.high * 1.3)


def _sharpness(track: Track, events: Marks) -> Figure | None:
    steps = [float(s) for s in track.steps]
    top, error = (_numbers(track.series("lambda_max", key)) for key in ("value", "error"))
    bottom = _numbers(track.series("lambda_min", "value"))
    limit = _numbers(track.series("descent_threshold"))
    if not _known(top):
        return None
    size = [-v for v in bottom]
    curves = [
        Line("λ_max", "total", steps, top, error, dots=True),
        Line("−λ_min", "functional", steps, size, _numbers(track.series("lambda_min", "error")), dots=True),
    ]
    near = [v for v in limit if math.isfinite(v) and v < 10 * max(t for t in top if math.isfinite(t))]
    if near:
        curves.append(Line("2/η, gradient descent's limit", "alarm", steps, limit, dashed=True))
    if not _known(size):
        curves.pop(1)
    scale = _span(top, size, near)
    last = max(i for i, v in enumerate(top) if math.isfinite(v))
    rows = tuple(zip(track.steps, top, error, bottom, limit, strict=True))
    return Figure(
        "track-sharpness",
        "Sharpness through training",
        f"λ_max goes from {measured(top[0], error[0])} at step {track.steps[0]:,} to "
        f"{measured(top[last], error[last])} at step {track.steps[last]:,}."
        + ("" if near else " The limit of gradient descent, 2/η, lies far above and is left out."),
        "Ends of the spectrum of the Hessian on the held batches, with residuals; logarithmic. Vertical lines are "
        "events. A triangle at the foot marks a value with the other sign.",
        (
            Panel(
                lambda width: lines(
                    "track-sharpness",
                    "Sharpness through training",
                    "Largest eigenvalue of the Hessian by step.",
                    curves,
                    steps_axis(steps),
                    scale,
                    x_label="step",
                    y_label="eigenvalue",
                    events=events,
                    width=width,
                )
            ),
        ),
        Table(("step", "λ_max", "± λ_max", "λ_min", "2/η"), rows),
    )


def _preconditioned(track: Track, events: Marks) -> Figure | None:
    steps = [float(s) for s in track.steps]
    value, error, limit = (
        _numbers(track.series("preconditioned", key)) for key in ("value", "error", "threshold")
    )
    if not _known(value):
        return None
    rules = [rule for rule in track.series("preconditioned", "rule") if rule]
    ratios = (
        [v / t for v, t in zip(value, limit, strict=True) if math.isfinite(v / t)] if _known(limit) else []
    )
    over = sum(r > 1 for r in ratios)
    curves = [
        Line("as the optimizer sees it", "total", steps, value, error, dots=True),
        Line("its limit", "alarm", steps, limit, dashed=True),
    ]
    optimizer = track.header.get("optimizer", "the optimizer")
    return Figure(
        "track-preconditioned",
        f"Sharpness as {optimizer} sees it",
        f"Above the limit at {over} of {len(ratios)} measurements"
        + (f"; at the last it is {number(ratios[-1])} of the limit." if ratios else "."),
        "Largest eigenvalue of the preconditioned Hessian beside the limit of stability"
        + (f", {rules[-1]}" if rules else "")
        + ". Above the limit the component along its eigenvector grows at every step.",
        (
            Panel(
                lambda width: lines(
                    "track-preconditioned",
                    f"Sharpness as {optimizer} sees it",
                    "Largest eigenvalue of the preconditioned Hessian by step, beside its limit.",
                    curves,
                    steps_axis(steps),
                    _span(value, limit),
                    x_label="step",
                    y_label="eigenvalue",
                    events=events,
                    width=width,
                )
            ),
        ),
        Table(
            ("step", "value", "± value", "limit"), tuple(zip(track.steps, value, error, limit, strict=True))
        ),
    )


def _loss(track: Track, events: Marks) -> Figure | None:
    held = _numbers(track.series("loss"))
    trained: dict[int, float] = {}
    for m in track.measurements:
        part = m.get("train") or {}
        trained.update(zip(part.get("step", ()), _numbers(part.get("loss", ())), strict=False))
    if not _known(held, list(trained.values())):
        return None
    at = sorted(trained)
    every = max(1, len(at) // 400)  # a drawing shows no more
    shown = at[::every]
    curves = [Line("held batches", "total", [float(s) for s in track.steps], held, dots=True)]
    if shown:
        curves.insert(0, Line("training", "muted", [float(s) for s in shown], [trained[s] for s in shown]))
    known = [v for c in curves for v in c.y if math.isfinite(v)]
    room = 0.05 * ((max(known) - min(known)) or 1.0)
    scale = Linear(min(known) - room, max(known) + room)
    x = steps_axis([s for c in curves for s in c.x])
    rows = tuple((step, value, trained.get(step)) for step, value in zip(track.steps, held, strict=True))
    return Figure(
        "track-loss",
        "The loss beside it",
        f"The held batches' loss goes from {number(held[0], 4)} to {number(held[-1], 4)}.",
        "Loss of training as handed to the tracker, and of the batches on which curvature is measured"
        + (f"; every {every}th step drawn." if every > 1 else "."),
        (
            Panel(
                lambda width: lines(
                    "track-loss",
                    "Loss through training",
                    "Loss by step.",
                    curves,
                    x,
                    scale,
                    x_label="step",
                    y_label="loss",
                    events=events,
                    width=width,
                    height=220,
                )
            ),
        ),
        Table(("step", "held batches", "training"), rows),
    )


def _blocks(track: Track) -> Figure | None:
    names = track.header.get("blocks") or []
    kinds = (("‖H_b·‖_F", "row_norm"), ("trace", "trace"), ("gradient norm", "gradient"))
    found = []
    for label, key in kinds:
        columns = [
            (m["step"], m["blocks"][key]) for m in track.measurements if key in (m.get("blocks") or {})
        ]
        if names and columns:
            steps, values = [step for step, _ in columns], [_numbers(v) for _, v in columns]
            matrix = [[column[b] for column in values] for b in range(len(names))]
            spread = [
                _numbers(m["blocks"].get(f"{key}_error") or [None] * len(names))
                for m in track.measurements
                if key in (m.get("blocks") or {})
            ]
            errors = (
                None if key == "gradient" else [[column[b] for column in spread] for b in range(len(names))]
            )
            found.append((label, key, steps, matrix, errors))
    if not found:
        return None

    def panel(k: int) -> Panel:
        label, key, steps, matrix, errors = found[k]
        flat = [v for row in matrix for v in row]
        colouring = Colouring.around_zero(flat) if key == "trace" else Colouring.log(flat)
        return Panel(
            lambda width: heatmap(
                f"track-blocks-{key}",
                f"{label} of each block through training",
                "Blocks by steps.",
                matrix,
                names,
                [f"{s}" for s in steps],
                colouring,
                errors=errors,
                unit=label,
                width=width,
                cell=56,
                cell_height=16,
                what=label,
                numbers=False,
                thin=True,
            ),
            (k,),
            key.replace("_", "-"),
        )

    label, _, steps, matrix, _ = found[0]
    final = max(range(len(names)), key=lambda b: matrix[b][-1] if math.isfinite(matrix[b][-1]) else -math.inf)
    rows = tuple((names[b], *matrix[b]) for b in range(len(names)))
    return Figure(
        "track-blocks",
        "Each block through training",
        f"At the last step {names[final]} has the largest {label}, {number(matrix[final][-1])}.",
        "One row a block, one column a measurement. ‖H_b·‖_F is the norm of the block's rows of the Hessian, an "
        "estimate like the trace; the data have the errors.",
        tuple(panel(k) for k in range(len(found))),
        Table(("block", *(f"step {s}" for s in steps)), rows, f"{label}."),
        (("Shown", tuple(label for label, *_ in found)),) if len(found) > 1 else (),
    )
