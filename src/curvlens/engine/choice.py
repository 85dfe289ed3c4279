"""Which engine "auto" stands for.

Layer by layer, where the model can be cut, if the graph that another engine would hold is larger than `LARGE`, or than
`SHARE` of the memory that is free. Below that a whole graph is quicker on a CPU, and shares its primal work between all
vectors: then one tangent forward and one backward for a Gauss-Newton product, else double backward, whose graph can
also be kept between products.

The size of the graph is that of one sample, measured by one forward pass, times the samples of the largest batch. It is
chosen once for a landscape, so that every operator of it goes one way.
"""

from __future__ import annotations

import weakref

from curvlens import guards
from curvlens.engine.cut import cut
from curvlens.engine.double_backward import graph_bytes
from curvlens.engine.quantity import Quantity
from curvlens.engine.room import is_out_of_memory
from curvlens.engine.segments import Uncut
from curvlens.landscape import Landscape
from curvlens.operator import free_memory

LARGE = 2**29  # bytes, from where on layer by layer is as quick on a CPU (benchmarks/LOG.md)
SHARE = 0.25  # of the free memory

_large: weakref.WeakKeyDictionary[Landscape, dict[bool, bool]] = weakref.WeakKeyDictionary()


def auto(land: Landscape, quantity: Quantity, keep: int = 0) -> str:
    """The engine for a quantity. Cost: one forward pass of one sample, once; for a large graph also a cut."""
    if quantity.at is not None:
        return "double-backward"  # the only one that knows inner splits
    small = "forward-over-reverse" if quantity.is_gauss_newton and not keep else "double-backward"
    known, kind = _large.setdefault(land, {}), quantity.is_gauss_newton
    if kind not in known:
        try:
            known[kind] = _is_large(land, quantity) and _can_be_cut(land)
        except Exception:  # of the model: the product says it in better words
            return small
    return "layered" if known[kind] else small


def _is_large(land: Landscape, quantity: Quantity) -> bool:
    try:
        return held_bytes(land, quantity) > min(LARGE, SHARE * free_memory(land.device))
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return True
        raise


def held_bytes(land: Landscape, quantity: Quantity) -> int:
    """About what the graph of the largest batch, or micro-batch, holds."""
    largest = max(land.pieces(), key=lambda piece: piece.target.numel())
    with guards.twice_differentiable(land.model, land.device):
        return graph_bytes(land, next(largest.split(1)), quantity) * len(largest.target)


def _can_be_cut(land: Landscape) -> bool:
    try:
        cut(land)
    except Uncut:
        return False
    return True
