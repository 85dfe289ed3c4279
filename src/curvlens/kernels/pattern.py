"""Which keys a query sees: a mask, causality, a sliding window; and which tiles of them can be left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The part of a mask that is known without a tensor, and the scale of the scores.

    causal  query i sees key j only if j ≤ i, counted from the first of both, as `is_causal` in torch
    window  query i sees key j only if |i − j| < window
    """

    scale: float
    causal: bool = False
    window: int | None = None

    def keys(self, start: int, stop: int, count: int) -> tuple[int, int]:
        """The range of keys, out of `count`, that some query in `start … stop − 1` can see."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        last = count
        if self.causal:
            last = min(last, stop)
        elif self.window is not None:
            last = min(last, stop + self.window - 1)
        return min(first, count), max(min(first, count), last)

    def visible(self, start: int, stop: int, first: int, last: int, device: torch.device) -> Tensor | None:
        """`[queries, keys]` of a tile, true where seen; None where every key is."""
        future = self.causal and last - 1 > start
        far = self.window is not None and (
            stop - 1 - first >= self.window or (not self.causal and last - 1 - start >= self.window)
        )
        if not (future or far):
            return None
        distance = (
            torch.arange(start, stop, device=device)[:, None]
            - torch.arange(first, last, device=device)[None, :]
        )
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen &= distance.abs() < self.window
        return seen

    def key_tiles(self, start: int, stop: int, count: int, size: int) -> Iterator[tuple[int, int]]:
        """The tiles of at most `size` keys that a tile of queries meets."""
        first, last = self.keys(start, stop, count)
        while first < last:
            end = min(first - first % size + size, last)
            yield first, end
            first = end
