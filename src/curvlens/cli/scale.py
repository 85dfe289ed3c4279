from __future__ import annotations

from typing import Annotated

import typer

from curvlens.cli.exits import DONE, INCOMPLETE, expected_input
from curvlens.cli.options import Device, Dtype, Json, MaxMinutes, Out, Quiet, Resume, Seed


def scale(
    task: Annotated[
        str, typer.Option(help="What the GPTs learn: addition, or text of a small grammar.")
    ] = "addition",
    axis: Annotated[str, typer.Option(help="What grows: width, depth or data.")] = "width",
    sizes: Annotated[str | None, typer.Option(help="Sizes along the axis, with commas: 8,12,16,24.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Models of each size.")] = 3,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps of each; 0 measures at initialisation.")
    ] = 100,
    measures: Annotated[
        str, typer.Option(help="What to measure: loss, gradient, sharpness, trace, frobenius, condition.")
    ] = "loss,sharpness,trace,frobenius",
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    max_minutes: MaxMinutes = None,
    out: Out = None,
    resume: Resume = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Curvature over a family of small GPTs, the power laws it follows, and a word where it follows none.

    The largest size is also left out of a fit and predicted. With --resume a run that was broken off goes on. For a
    family of your own: `cl.scaling(family, sizes)`.
    """
    with expected_input():
        from curvlens.scaling import scaling
        from curvlens.scaling.families import gpt, number_type

        grown = _numbers(
            sizes or {"width": "8,12,16,24", "depth": "1,2,3,4", "data": "32,64,128,256"}.get(axis, "1")
        )
        kind = "width" if axis == "data" else axis
        family = gpt(task, kind, steps=steps, device=device or "cpu", dtype=number_type(dtype))  # type: ignore[arg-type]
        models, data = ([16], grown) if axis == "data" else (grown, [256])
        path = None if resume is None else resume / "scale.jsonl"
        chosen = [name.strip() for name in measures.split(",")]
        result = scaling(
            family, models, data, range(seed, seed + seeds), chosen, path=path, max_minutes=max_minutes
        )
    if out is not None:
        result.to_json(out)
    if json:
        typer.echo(result.to_json())
    elif not quiet or out is None:
        typer.echo(str(result))
    raise typer.Exit(INCOMPLETE if result.missing else DONE)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"expected whole numbers with commas between, got {text!r}") from None
