"""Forward over reverse: a tangent pushed through the gradient, `H v = d/dε ∇s(θ + ε v)`.

For a Gauss-Newton matrix, the tangent is pushed through the model and pulled back: `Jᵀ M (J v)`.
Several vectors share the primal work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from curvlens.batches import Batch
from curvlens.engine.double_backward import pull_back
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape, Parameters


def product(
    land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters, chunk: int
) -> Parameters:
    """The rows' images of directions `{column parameter: [K, *shape]}`, summed over one piece of the data."""
    if quantity.is_gauss_newton:
        return _gauss_newton(land, quantity, piece, rows, directions, chunk)
    parameters = land.parameters()
    moving = {name: parameters.pop(name) for name in directions}
    scalar = quantity.scalar(land, piece)

    def gradient(columns: Parameters) -> Parameters:
        """The rows' gradient as a function of the columns' parameters."""
        at = {name: columns.get(name, parameters.get(name)) for name in rows}
        rest = {name: p for name, p in {**parameters, **columns}.items() if name not in at}
        return grad(lambda leaves: scalar({**rest, **leaves}))(at)

    return push_forward(gradient, moving, directions, chunk)


def _gauss_newton(
    land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters, chunk: int
) -> Parameters:
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

    with torch.no_grad():  # the tangent needs no graph
        tangents = push_forward(output, moving, directions, chunk)["output"]
    leaves = {name: parameters[name].requires_grad_() for name in rows}
    value = land.output({**parameters, **leaves}, piece)
    cotangents = quantity.middle(land, piece, value)(tangents)
    del tangents
    return dict(zip(rows, pull_back([value], list(leaves.values()), [cotangents], chunk), strict=True))


def push_forward(
    function: Callable[[Parameters], Parameters], at: Parameters, directions: Parameters, chunk: int
) -> Parameters:
    """`Df(at) v` for a stack of directions, `chunk` of them at once."""

    def tangent(direction: Parameters) -> Parameters:
        return jvp(function, (at,), (direction,))[1]

    count = len(next(iter(directions.values())))
    parts: list[dict[str, Tensor]] = []
    for start in range(0, count, chunk):
        part = {name: stack[start : start + chunk] for name, stack in directions.items()}
        if chunk > 1 and count > 1:
            parts.append(vmap(tangent)(part))
        else:
            one = tangent({name: stack[0] for name, stack in part.items()})
            parts.append({name: image[None] for name, image in one.items()})
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
