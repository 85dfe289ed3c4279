"""Forward over reverse: a tangent pushed through the gradient, `H v = d/dε ∇s(θ + ε v)`.

For a Gauss-Newton matrix, the tangent is pushed through the model and pulled back: `Jᵀ M (J v)`.
Several vectors share the primal work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.func import grad, jvp, vmap

from curvlens.batches import Batch
from curvlens.engine.double_backward import pull_back
from curvlens.engine.job import Job
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape, Parameters


def product(job: Job, directions: Parameters, chunk: int) -> Iterator[tuple[int, Parameters]]:
    land, quantity, piece, rows = job.land, job.quantity, job.piece, job.rows
    if quantity.is_gauss_newton:
        yield from _gauss_newton(land, quantity, piece, rows, directions, chunk)
        return
    parameters = land.parameters()
    moving = {name: parameters.pop(name) for name in directions}
    scalar = quantity.scalar(land, piece)

    def gradient(columns: Parameters) -> Parameters:
        """The rows' gradient as a function of the columns' parameters."""
        every = {**parameters, **columns}
        at = {name: every.pop(name) for name in rows}
        return grad(lambda leaves: scalar({**every, **leaves}))(at)

    for start in range(0, _count(directions), chunk):
        yield start, push_forward(gradient, moving, _part(directions, start, chunk))


def _gauss_newton(
    land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters, chunk: int
) -> Iterator[tuple[int, Parameters]]:
    if quantity.at is not None:
        raise ValueError(
            "expected a split at the model's output for this engine, got one at "
            f'{quantity.at!r}; use engine="double-backward"'
        )
    parameters = land.parameters()
    constants = {name: p for name, p in parameters.items() if name not in directions}
    moving = {name: parameters[name] for name in directions}

    def output(columns: Parameters) -> Parameters:
        return {"output": land.output({**constants, **columns}, piece)}

    leaves = {name: parameters[name].detach().requires_grad_() for name in rows}
    value = land.output({**parameters, **leaves}, piece)
    middle = quantity.middle(land, piece, value)
    count = _count(directions)
    for start in range(0, count, chunk):
        with torch.no_grad():  # the tangent needs no graph
            tangents = push_forward(output, moving, _part(directions, start, chunk))["output"]
            tangents = middle(tangents)
        images = pull_back([value], list(leaves.values()), [tangents], keep=start + chunk < count)
        yield start, dict(zip(rows, images, strict=True))
        del images


def push_forward(
    function: Callable[[Parameters], Parameters], at: Parameters, directions: Parameters
) -> Parameters:
    """`Df(at) v` for a stack of directions."""

    def tangent(direction: Parameters) -> Parameters:
        return jvp(function, (at,), (direction,))[1]

    if _count(directions) > 1:
        return vmap(tangent)(directions)
    one = tangent({name: stack[0] for name, stack in directions.items()})
    return {name: image[None] for name, image in one.items()}


def _count(directions: Parameters) -> int:
    return len(next(iter(directions.values())))


def _part(directions: Parameters, start: int, chunk: int) -> Parameters:
    return {name: stack[start : start + chunk] for name, stack in directions.items()}
