"""Where a landscape's model is cut into segments, found and verified once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from curvlens import families, guards
from curvlens.batches import Batch
from curvlens.engine.head import Projection, find_projection
from curvlens.engine.room import is_out_of_memory
from curvlens.engine.segments import Uncut, met, record
from curvlens.engine.trust import has_own_functions, require_second_derivatives
from curvlens.landscape import Landscape, Parameters


@dataclass(frozen=True)
class Cut:
    layers: Mapping[str, str]  # names by path
    projection: Projection | None  # None: the logits, or whatever the output is, exist as a whole


_cuts: weakref.WeakKeyDictionary[Landscape, Cut | Uncut] = weakref.WeakKeyDictionary()


def cut(land: Landscape) -> Cut:
    """The cut of a landscape's model; `Uncut` if there is none. Found and verified with one sample of its data."""
    if land not in _cuts:
        try:
            with guards.twice_differentiable(land.model, land.device):
                _cuts[land] = _find(land)
        except Uncut as reason:
            _cuts[land] = reason
    found = _cuts[land]
    if isinstance(found, Uncut):
        raise found
    return found


def _find(land: Landscape) -> Cut:
    layers = families.layers(land.model)
    if not layers:
        raise Uncut("no family knows its layers, and it holds no list of like modules")
    sample = next(next(iter(land.pieces())).split(1))
    land.probe(sample)
    found = Cut(layers, find_projection(land, sample))
    try:
        _verify(land, sample, found)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, Uncut) or is_out_of_memory(error):
            raise
        raise Uncut(str(error)) from error
    return found


def _verify(land: Landscape, piece: Batch, at: Cut) -> None:
    """The value and a tangent of the model as a whole, beside those of its segments.

    What one layer hands to another in secret, not as an argument, would be a constant to the segments.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = land.parameters()
    directions = {
        name: torch.randn(p.shape, generator=generator, dtype=land.dtype).to(p.device)
        * (p.norm() / p.numel() ** 0.5).clamp(min=1e-3)
        for name, p in parameters.items()
    }
    stacks = {name: v[None] for name, v in directions.items()}
    recording = record(land, piece, list(parameters), stacks, at.layers, at.projection)
    end = recording.end
    assert end is not None
    if any(has_own_functions(y) for segment in recording.segments for y in segment.graph().outputs):
        require_second_derivatives(land, piece)
    del recording
    with torch.no_grad():
        value, tangent = jvp(lambda p: _whole(land, p, piece, at.projection), (parameters,), (directions,))[
            :2
        ]
    tolerance = torch.finfo(land.dtype).eps ** 0.5
    found = end.primal.new_zeros(end.primal.shape) if end.tangents is None else end.tangents[0]
    for ours, models in ((end.primal, value), (found, tangent)):
        if not (ours - models).norm() <= tolerance * models.norm():
            raise Uncut("its layers, run one by one, do not give what the model gives as a whole")


def _whole(land: Landscape, parameters: Parameters, piece: Batch, projection: Projection | None) -> Tensor:
    """What the projection is given, or the output, by the model as it is."""
    if projection is None:
        return land.output(parameters, piece)
    seen: list[Tensor] = []

    def meet(path: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        seen.append(args[0])
        return projection.stand_in(args[0])

    model: nn.Module = land.model
    with met(model, [projection.path], meet):
        land.output(parameters, piece)
    return seen[0]
