"""How many vectors go through a pass at once: as many as fit, and as pay."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.batches import Batch
from curvlens.landscape import Landscape
from curvlens.operator import free_memory

# On a CPU more vectors at once save only Python's overhead: beyond this much memory a pass they cost more than
# one after the other, since they leave the caches (measured in benchmarks/LOG.md).
CPU_BYTES = 64 * 2**20
FEW = 4  # where fewer vectors than these stay within, one after the other is quicker on a graph that is kept

_saved: weakref.WeakKeyDictionary[Landscape, dict[tuple[torch.Size, ...], int]] = weakref.WeakKeyDictionary()


def chunk_size(land: Landscape, piece: Batch, vectors: int, kept: bool = False) -> int:
    """The number of vectors a pass: between 1 and `vectors`, by the memory of one vector's intermediates.

    `kept` says that the primal work is done once for all passes, not once a pass.
    """
    if vectors == 1:
        return 1
    # a tangent's intermediates are about three times what a forward pass saves: its own, the gradient's, the mixed
    each = max(1, 3 * saved_bytes(land, piece) + land.blocks.size * land.dtype.itemsize)
    count = free_memory(land.device) // 4 // each
    if land.device.type == "cpu":
        cached = CPU_BYTES // each
        count = min(count, 1 if kept and cached < FEW else cached)
    return max(1, min(vectors, count))


def saved_bytes(land: Landscape, piece: Batch) -> int:
    """Bytes that a forward pass saves for its backward pass, measured once for each shape of batch."""
    known = _saved.setdefault(land, {})
    shapes = tuple(tensor.shape for tensor in piece.tensors())
    if shapes not in known:
        known[shapes] = _measure(land, piece)
    return known[shapes]


def layer_bytes(land: Landscape, piece: Batch, layers: int) -> int:
    """Bytes that a forward pass saves for one layer, told from one sample, so that the whole need not fit."""
    samples = len(piece.target)
    return saved_bytes(land, next(piece.split(1))) * samples // max(1, layers)


def _measure(land: Landscape, piece: Batch) -> int:
    leaves = {name: p.requires_grad_() for name, p in land.parameters().items()}
    return bytes_saved_by(
        lambda: land.loss.value(land.output(leaves, piece), piece.target), list(leaves.values())
    )


def bytes_saved_by(run: Callable[[], object], leaves: list[Tensor]) -> int:
    """Bytes that the graph of a run holds beside its leaves."""
    seen: dict[int, torch.UntypedStorage] = {}

    def keep(
        tensor: Tensor,
    ) -> None:  # the storage, not the tensor: a node that held its output would never be freed
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        result = run()
    del result
    for leaf in leaves:
        seen.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in seen.values())
