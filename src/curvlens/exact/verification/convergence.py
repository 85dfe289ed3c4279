"""Paper B, Theorem 7: the loss landscape settles as samples are added."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.claims import Bound, Check, Equal, claim
from curvlens.exact.verification.problems import Draw, attention
from curvlens.exact.verification.transformer import norm


@claim("B", "Theorem 7", "|L_{k+1} − L_k| ≤ (2ℒ + M ‖w − w*‖²)/(k + 1), and its identity")
def theorem_7(draw: Draw) -> Iterator[Check]:
    """Attention in its value weights, on samples that share a minimum `w*` with a loss of their own there.

    The losses are quadratic in `w`, so that `M`, the largest norm of their Hessians, holds everywhere.
    """
    samples, L, d = 6, 6, 2
    heads = [attention(draw, "", L, d, 2, d) for _ in range(samples)]
    best, mixed, targets = draw(d, d), [], []
    for p in heads:
        M1 = autodiff.softmax(autodiff.scores(p.W, p.X)) @ p.X
        residual = draw(L, d)
        residual = residual - M1 @ torch.linalg.lstsq(M1, residual).solution  # the minimum stays where it is
        mixed.append(M1)
        targets.append(M1 @ best + residual)

    def losses(w: Tensor) -> Tensor:
        made = [
            autodiff.mse(autodiff.attention({**p.W, "value": w}, p.X), Y)
            for p, Y in zip(heads, targets, strict=True)
        ]
        return torch.stack(made)

    def means(w: Tensor) -> Tensor:
        return losses(w).cumsum(0) / torch.arange(1, samples + 1)

    def hessians() -> list[Tensor]:
        made = []
        for p, Y in zip(heads, targets, strict=True):
            layer = exact.SelfAttention(p.W["query"], p.W["key"], best)
            made.append(exact.hessian(layer, p.X, Y).total.block("value").dense())
        return made

    steps = torch.arange(1, samples, dtype=torch.float64)
    yield Equal(
        "all samples have one minimum",
        lambda: torch.stack(hessians()),
        lambda: autodiff.second(lambda v: losses(v.view(d, d)), best.flatten()),
    )
    for distance in (0.0, 0.1, 1.0, 10.0):
        w = best + distance * draw(d, d)
        yield Equal(
            f"identity, at {distance}",
            lambda: (losses(w)[1:] - means(w)[:-1]) / (steps + 1),
            lambda: means(w)[1:] - means(w)[:-1],
        )

        def bound() -> Tensor:
            M, ceiling = max(float(norm(H)) for H in hessians()), float(losses(best).max())
            return (2 * ceiling + M * float((w - best).square().sum())) / (steps + 1)

        yield Bound(f"bound, at {distance}", bound, lambda: means(w).diff().abs())
