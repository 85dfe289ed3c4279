"""The papers' dial σ: networks whose token and position embeddings are drawn from `N(0, σ²)`.

Both embeddings are scaled, as in the authors' code, so that `X` has the standard deviation `√2 σ`. All else keeps the
draw `N(0, 0.64 / d)`. One repeat draws weights and data once and only multiplies the embeddings by σ, so that a curve
over σ is one network's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from curvlens import digits, nets


def logarithmic(low: float, high: float, points: int) -> tuple[float, ...]:
    """`points` scales from `10^low` to `10^high`."""
    return tuple(10 ** (low + (high - low) * i / (points - 1)) for i in range(points))


def addition(sequences: int, seed: int, device: str) -> digits.Batch:
    """One batch of digit addition."""
    ids, labels = digits.batches(1, sequences, seed)[0]
    return ids.to(device), labels.to(device)


def network(width: int, seed: int, device: str, vocabulary: int = digits.VOCABULARY, **kind: Any) -> nets.GPT:
    """A float64 GPT for digit addition, drawn with this seed."""
    net = nets.GPT(vocabulary, digits.LENGTH, width, seed=seed, **kind).to(torch.float64)
    net.reset(seed)
    return net.to(device)


@torch.no_grad()
def embed(net: nets.GPT, sigma: float, seed: int) -> None:
    """Draw both embeddings from `N(0, σ²)`: for one seed, σ times the same numbers."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    for embedding in (net.token, net.position):
        draw = torch.randn(embedding.weight.shape, generator=generator, dtype=torch.float64)
        embedding.weight.copy_(sigma * draw)


def exponent(scales: Sequence[float], norms: Sequence[float], low: float, high: float) -> float:
    """The least-squares slope of `log norm` against `log σ` over the scales in `[low, high]`."""
    pairs = [
        (math.log(s), math.log(n)) for s, n in zip(scales, norms, strict=True) if low <= s <= high and n > 0
    ]
    if len(pairs) < 2:
        return math.nan
    x, y = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def local_slopes(scales: Sequence[float], norms: Sequence[float]) -> list[float]:
    """The slope between each two neighbouring scales."""
    return [
        math.log(norms[i + 1] / norms[i]) / math.log(scales[i + 1] / scales[i])
        if norms[i] and norms[i + 1]
        else math.nan
        for i in range(len(scales) - 1)
    ]
