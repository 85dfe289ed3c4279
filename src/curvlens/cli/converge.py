from __future__ import annotations

from typing import Annotated

import typer

from curvlens.cli.exits import DONE, expected_input
from curvlens.cli.options import Device, Dtype, Json, Out, Quiet, Seed


def converge(
    task: Annotated[
        str, typer.Option(help="What to train the embedded GPT on: addition, or text of a small grammar.")
    ] = "addition",
    samples: Annotated[int, typer.Option(min=2, help="Sequences whose losses are added up.")] = 64,
    steps: Annotated[int, typer.Option(min=0, help="Training steps before.")] = 300,
    width: Annotated[int, typer.Option(min=2, help="Width of the GPT.")] = 16,
    sigma: Annotated[float, typer.Option(help="Size of the Gaussian steps around the weights.")] = 1e-2,
    draws: Annotated[int, typer.Option(min=4, help="Steps, and probes of the closed form.")] = 16,
    dims: Annotated[int, typer.Option(min=1, help="D of Δ₂ in the D sharpest directions.")] = 5,
    tol: Annotated[float, typer.Option(help="By how much more data may move the loss.")] = 1e-3,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How far one more sample moves the loss landscape, beside its bound, its closed form and its null.

    Trains a small GPT, then adds up the losses of fresh samples one by one: |L_{k+1} − L_k|, Δ₁, Δ₂ and Δ₂^(D) for all
    k, and how many samples it takes until more data moves the landscape by less than --tol. For a model of your own:
    `cl.landscape_convergence(model, samples)`.
    """
    with expected_input():
        from curvlens.scaling import landscape_convergence
        from curvlens.scaling.families import gpt, number_type

        family = gpt(task, steps=steps, measured=samples, device=device or "cpu", dtype=number_type(dtype))  # type: ignore[arg-type]
        land = family(width, 512, seed)
        result = landscape_convergence(land, None, sigma=sigma, draws=draws, dims=dims, seed=seed)
        needed = [result.needed(tol, kind, seed=seed) for kind in ("step", "rest")]
    if out is not None:
        result.to_json(out)
    if json:
        typer.echo(result.to_json())
    elif not quiet or out is None:
        typer.echo(f"{result}\n" + "\n".join(f"  {need}" for need in needed))
    raise typer.Exit(DONE)
