"""Row-wise attention maps `A_i = a(T_i)` and what the Hessian asks of their derivatives.

Only three contractions of a row's derivatives ever appear, all with tokens on every side (MATH of `RowMoments`):
the second moment `M2_i = Σ_jl (∂A_ij/∂T_il) x_j x_lᵀ`, and the third contracted with a vector,
`M3_i[w] = Σ_lm (Σ_j u_ij ∂²A_ij/∂T_il∂T_im) x_l x_mᵀ` with `u_ij = x_j·w_i`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from curvlens.structured.stacks import CHUNK

Mask: TypeAlias = "Tensor | None"


@dataclass(frozen=True)
class RowMap:
    """Any map of a row of scores, by its derivatives. Masked scores arrive as −inf and must give zero weights.

    `value(T)`: `[..., L, L]`; `first(T)`: `[..., L, j, l] = ∂A_ij/∂T_il`;
    `second(T, u)`: `[..., L, l, m] = Σ_j u_ij ∂²A_ij/∂T_il∂T_im`.
    """

    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor, Tensor], Tensor]

    def attend(self, T: Tensor, mask: Mask) -> Tensor:
        return self.value(_masked(T, mask))

    def moments(self, T: Tensor, A: Tensor, mask: Mask) -> RowMoments:
        T = _masked(T, mask)
        return GeneralMoments(self.first(T), lambda u: self.second(T, u))


@dataclass(frozen=True)
class Elementwise:
    """A map of each score by itself, `A_ij = a(T_ij)`, by `a`, `a'` and `a''`; a masked weight is zero."""

    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]

    def attend(self, T: Tensor, mask: Mask) -> Tensor:
        return _kept(self.value(T), mask)

    def moments(self, T: Tensor, A: Tensor, mask: Mask) -> RowMoments:
        return WeightedMoments(_kept(self.first(T), mask), _kept(self.second(T), mask), centred=False)


class Softmax:
    """`A_ij = exp T_ij / Σ_l exp T_il` over the keys that are not masked; a row without keys attends to nothing."""

    def attend(self, T: Tensor, mask: Mask) -> Tensor:
        if mask is None:
            return T.softmax(-1)
        # a row of −inf alone would give 0/0: let it see all keys, and take its weights away afterwards
        seen = mask | ~mask.any(-1, keepdim=True)
        return _kept(T.masked_fill(~seen, float("-inf")).softmax(-1), mask)

    def moments(self, T: Tensor, A: Tensor, mask: Mask) -> RowMoments:
        return WeightedMoments(A, A, centred=True)


AttentionMap: TypeAlias = "Softmax | Elementwise | RowMap"

linear = Elementwise(lambda T: T, torch.ones_like, torch.zeros_like)


def _sigmoid_second(T: Tensor) -> Tensor:
    p = T.sigmoid()
    return p * (1 - p) * (1 - 2 * p)


sigmoid = Elementwise(torch.sigmoid, lambda T: T.sigmoid() * (1 - T.sigmoid()), _sigmoid_second)

NAMED: dict[str, AttentionMap] = {"softmax": Softmax(), "linear": linear, "sigmoid": sigmoid}


def _masked(T: Tensor, mask: Mask) -> Tensor:
    return T if mask is None else T.masked_fill(~mask, float("-inf"))


def _kept(A: Tensor, mask: Mask) -> Tensor:
    return A if mask is None else A.masked_fill(~mask, 0.0)


class WeightedMoments:
    """Moments of rows whose derivatives are weights on keys: softmax (about the mean), elementwise maps (about zero).

    Softmax: `M2_i = Σ_j A_ij c_j c_jᵀ`, `M3_i[w] = Σ_j A_ij (c_j·w) c_j c_jᵀ` with `c_j = x_j − Σ_l A_il x_l`.
    Elementwise: `M2_i = Σ_j a'(T_ij) x_j x_jᵀ`, `M3_i[w] = Σ_j a''(T_ij) (x_j·w) x_j x_jᵀ`.

    Both sides of a product are centred before they are multiplied: rows that attend to nearly one key keep digits.
    """

    def __init__(self, first: Tensor, second: Tensor, centred: bool):
        self.first, self.second_weights, self.centred = first, second, centred
        self._mean: tuple[Tensor, Tensor] | None = None

    def mean(self, x: Tensor) -> Tensor:
        """`Σ_j A_ij x_j`, `[b, L, m]`, about which centred moments are taken; kept for the last `x`."""
        if self._mean is None or self._mean[0] is not x:
            self._mean = x, self.first @ x
        return self._mean[1]

    def second(self, left: Tensor, right: Tensor) -> Tensor:
        """`leftᵀ (∂A_i/∂T_i) right`, `[b, L, m, p]`, from `[b, L, m]` and `[b, L, p]`."""
        return self._moment(self.first, left, right)

    def scores(self, u: Tensor) -> Tensor:
        """`u` about its mean in each row."""
        return u - (self.first * u).sum(-1, keepdim=True) if self.centred else u

    def pull(self, u: Tensor, x: Tensor) -> Tensor:
        """`xᵀ (∂A_i/∂T_i) u_i`, `[b, L, m]`."""
        weights = self.first * self.scores(u)
        pulled = weights @ x
        if self.centred:  # the weights sum to zero but for rounding
            pulled = pulled - weights.sum(-1, keepdim=True) * self.mean(x)
        return pulled

    def third_weights(self, u: Tensor) -> Tensor:
        return self.second_weights * self.scores(u)

    def third(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        """`Σ_j u_ij leftᵀ (∂²A_ij/∂T_i²) right`, `[b, L, m, p]`, with the `third_weights` of `u`."""
        return self._moment(weights, left, right)

    def push(self, dT: Tensor) -> Tensor:
        """`(∂A_i/∂T_i) dT_i`, `[..., b, L, L]`; its own transpose for these maps."""
        moved = self.first * dT
        if not self.centred:
            return moved
        return torch.addcmul(moved, self.first, moved.sum(-1, keepdim=True), value=-1)

    def back(self, u: Tensor) -> Tensor:
        """`(∂A_i/∂T_i)ᵀ u_i`."""
        return self.push(u)

    def back_and_turn(self, du: Tensor, dT: Tensor, weights: Tensor) -> Tensor:
        """`(∂A_i/∂T_i)ᵀ du_i + (Σ_j u_ij ∂²A_ij/∂T_i²) dT_i`, with the `third_weights` of `u`.

        Softmax, with weights `W = A ∘ (u − ū)`: `Z − A (1·Z) − W (A·dT)` for `Z = A ∘ du + W ∘ dT`.
        """
        moved = torch.addcmul(self.first * du, weights, dT)
        if not self.centred:
            return moved
        mean = torch.linalg.vecdot(self.first, dT)[..., None]
        moved = torch.addcmul(moved, self.first, moved.sum(-1, keepdim=True), value=-1)
        return moved.addcmul_(weights, mean, value=-1)

    def _moment(self, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
        b, L, _ = weights.shape
        if not self.centred:  # one matrix product: Σ_j weights_ij (left_j right_jᵀ)
            if L * left.shape[-1] * right.shape[-1] <= CHUNK:
                pairs = (left[..., :, None] * right[..., None, :]).flatten(2)
                return (weights @ pairs).unflatten(-1, (left.shape[-1], right.shape[-1]))
            return (weights[..., None] * left[:, None]).mT @ right[:, None]
        same = left is right
        mean_left = self.mean(left)
        mean_right = mean_left if same else self.mean(right)
        step = max(1, CHUNK // (b * L * max(left.shape[-1], right.shape[-1])))
        parts = []
        for start in range(0, L, step):
            rows = slice(start, start + step)
            x = left[:, None] - mean_left[:, rows, None]  # [b, rows, L, m]
            y = x if same else right[:, None] - mean_right[:, rows, None]
            parts.append((weights[:, rows, :, None] * x).mT @ y)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class GeneralMoments:
    """Moments of rows with any derivatives: `first` `[b, L, j, l]`, `second(u)` `[b, L, l, m]`."""

    centred = False

    def __init__(self, first: Tensor, second: Callable[[Tensor], Tensor]):
        self.first, self._second = first, second

    def second(self, left: Tensor, right: Tensor) -> Tensor:
        return left.mT[:, None] @ self.first @ right[:, None]

    def pull(self, u: Tensor, x: Tensor) -> Tensor:
        return self.back(u) @ x

    def third(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        return left.mT[:, None] @ weights @ right[:, None]

    def push(self, dT: Tensor) -> Tensor:
        return (self.first @ dT[..., None])[..., 0]

    def back(self, u: Tensor) -> Tensor:
        return (u[..., None, :] @ self.first)[..., 0, :]

    def third_weights(self, u: Tensor) -> Tensor:
        """`Σ_j u_ij ∂²A_ij/∂T_i²`, `[b, L, L, L]`."""
        return self._second(u)

    def back_and_turn(self, du: Tensor, dT: Tensor, weights: Tensor) -> Tensor:
        return self.back(du) + (weights @ dT[..., None])[..., 0]


RowMoments: TypeAlias = "WeightedMoments | GeneralMoments"
