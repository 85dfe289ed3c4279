"""What claims are checked on: small random problems, the edge cases among them, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact.verification import autodiff


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def large(T: Tensor) -> Tensor:
    """Scores scaled so that the largest is 6: weights in a row up to e¹² apart."""
    return 6 / T.abs().max() * T


class Draw:
    """Float64 normal numbers and small integers from a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def classes(self, count: int, classes: int) -> Tensor:
        return torch.randint(classes, (count,), generator=self.generator)


@dataclass(frozen=True)
class Attention:
    """One head of attention with its tokens and targets. `edge`: some blocks of its Hessian vanish."""

    case: str
    W: dict[str, Tensor]
    X: Tensor
    Y: Tensor
    edge: bool = False

    def layer(self, **options: Any) -> exact.SelfAttention:
        return exact.SelfAttention(self.W["query"], self.W["key"], self.W["value"], **options)

    def plain(self, W: dict[str, Tensor]) -> Tensor:
        """The layer by its definition."""
        return autodiff.attention(W, self.X)

    def loss(self, F: Tensor) -> Tensor:
        return autodiff.mse(F, self.Y)


def attention(draw: Draw, case: str, L: int, d: int, k: int, v: int, **made: Any) -> Attention:
    """Of `L` tokens of width `d`, keys of width `k`, `v` outputs; weights of size `1/√d`, so logits of size 1.

    Where rows come near a unit vector, autodiff of softmax loses the digits by which they differ from it: with a second
    weight of 1e-6, ten of sixteen. Larger logits would test autodiff's rounding and not the closed form.
    """
    W = {"query": draw(d, k), "key": draw(d, k), "value": draw(d, v)}
    return Attention(case, {name: w / d**0.5 for name, w in W.items()}, draw(L, d), draw(L, v), **made)


def attentions(draw: Draw, square: bool = False) -> Iterator[Attention]:
    """All shapes and edge cases; `square`: as many outputs as inputs, as the theorems are printed."""
    shapes = {"d_K < d_V": (4, 3, 2, 4), "d_K = d_V": (3, 3, 3, 3), "d_K > d_V": (3, 2, 4, 2)}
    for i in range(3):
        shapes[f"random shape {i}"] = (
            draw.integer(2, 5),
            draw.integer(2, 4),
            draw.integer(1, 4),
            draw.integer(1, 4),
        )
    for case, (L, d, k, v) in shapes.items():
        yield attention(draw, case, L, d, k, d if square else v)
    yield attention(draw, "L = 1", 1, 3, 2, 3 if square else 2, edge=True)
    yield _scaled(attention(draw, "uniform attention", 4, 3, 2, 3 if square else 4, edge=True), key=0.0)
    yield large_logits(draw)
    yield one_hot(draw)


def large_logits(draw: Draw) -> Attention:
    """See `large`."""
    p = attention(draw, "large logits", 4, 3, 2, 3, edge=True)
    return _scaled(p, query=6 / float(autodiff.scores(p.W, p.X).abs().max()))


def one_hot(draw: Draw) -> Attention:
    """Logits so far apart that every row of the attention map is a unit vector to the last digit."""
    return _scaled(attention(draw, "one-hot attention", 4, 3, 2, 3, edge=True), query=1e8)


def _scaled(p: Attention, **factors: float) -> Attention:
    W = {name: factors.get(name, 1.0) * weight for name, weight in p.W.items()}
    return Attention(p.case, W, p.X, p.Y, p.edge)
