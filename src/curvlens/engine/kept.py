"""What an operator keeps between products, as long as weights and data stay the same.

Weights are the same if no tensor was replaced, no version counter moved, and no sum of entries changed: the last
notices what is written past the counters, at the price of reading the weights once. Data are compared by the
landscape itself on every pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from curvlens.landscape import Landscape


class Kept:
    """A store of at most a number of bytes, by the piece of the data and what is kept of it."""

    def __init__(self, budget: int = 0):
        self.budget = budget
        self.bytes = 0
        self.piece = 0  # the one at work
        self._found: dict[tuple[int, Hashable], Any] = {}
        self._state: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self._found)

    def renew(self, land: Landscape, micro_batch: int | None) -> None:
        """Forget everything if weights or the pieces of the data are not those of the last time."""
        if not self.budget:
            return
        state = (micro_batch, *_state(land))
        if state != self._state:
            self.clear()
            self._state = state

    def get(self, key: Hashable) -> Any:
        return self._found.get((self.piece, key))

    def fits(self, size: int) -> bool:
        return self.bytes + size <= self.budget

    def put(self, key: Hashable, value: Any, size: int) -> bool:
        """Keep a value if it fits."""
        if not self.fits(size):
            return False
        self._found[self.piece, key] = value
        self.bytes += size
        return True

    def clear(self) -> None:
        self._found.clear()
        self.bytes = 0
        self._state = None


def _state(land: Landscape) -> Iterator[Any]:
    for tensor in _tensors(land):
        yield tensor.data_ptr(), tensor._version, tensor.shape, tensor.dtype, tensor.requires_grad
    sums = [t.detach().sum(dtype=torch.float64 if t.is_floating_point() else None) for t in _tensors(land)]
    if sums:
        yield tuple(torch.stack([s.double() for s in sums]).tolist())


def _tensors(land: Landscape) -> Iterator[Tensor]:
    yield from land.model.parameters()
    yield from land.model.buffers()
