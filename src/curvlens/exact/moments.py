"""Attention moments (paper A, Definition 3.1): each row of an attention map is a distribution over the tokens."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from curvlens.exact.attention_map import WeightedMoments
from curvlens.operator import free_memory


class Moments:
    """First moment and second and third central moments of the tokens under each row of an attention map.

    `first` `[L, d]`, `second` `[L, d, d]`, `third` `[L, d, d, d]`, each made when asked for; `contracted(w)` gives the
    third moment with one vector a row, `Σ_j A_ij (c_j·w_i) c_j c_jᵀ` `[L, d, d]`, without the third moment itself.
    """

    def __init__(self, A: Tensor, X: Tensor):
        if A.dim() != 2 or A.shape[0] != A.shape[1] or X.dim() != 2 or len(X) != len(A):
            raise ValueError(
                f"expected an attention map [L, L] and tokens [L, d], got {list(A.shape)}, {list(X.shape)}"
            )
        rows = A.sum(1)
        # a row is a distribution up to its own rounding, or empty where a token may attend to nothing
        slack = 1e3 * torch.finfo(A.dtype).eps
        if bool((A < 0).any()) or not bool((((rows - 1).abs() < slack) | (rows == 0)).all()):
            raise ValueError(
                "expected rows that are distributions, as of softmax attention, got sums from "
                f"{float(rows.min()):.3g} to {float(rows.max()):.3g}"
            )
        self.A, self.X = A, X
        self._rows = WeightedMoments(A[None], A[None], centred=True)

    @cached_property
    def first(self) -> Tensor:
        return self.A @ self.X

    @cached_property
    def second(self) -> Tensor:
        return self._rows.second(self.X[None], self.X[None])[0]

    @cached_property
    def third(self) -> Tensor:
        L, d = self.X.shape
        need, free = L * d**3 * self.X.dtype.itemsize, free_memory(self.X.device)
        if need > free:
            raise MemoryError(
                f"the third moments of {L} rows of width {d} take {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB "
                "are free; use contracted(w), as the Hessian does"
            )
        rows = []
        for weights, mean in zip(self.A, self.first, strict=True):
            centred = self.X - mean
            pairs = (centred[:, :, None] * centred[:, None, :]).flatten(1)
            rows.append(((weights[:, None] * centred).T @ pairs).view(d, d, d))
        return torch.stack(rows)

    def contracted(self, w: Tensor) -> Tensor:
        """`M3_i[w_i]`, `[L, d, d]`, for vectors `w` `[L, d]`."""
        weights = self._rows.third_weights((w @ self.X.T)[None])
        return self._rows.third(self.X[None], self.X[None], weights)[0]


def moments(A: Tensor, X: Tensor) -> Moments:
    """First, second and third attention moments of the map `A` `[L, L]` over the tokens `X` `[L, d]`.

    >>> import torch
    >>> m = moments(torch.eye(3), torch.randn(3, 2))  # every token attends to itself alone
    >>> float(m.second.abs().max()), float(m.third.abs().max())
    (0.0, 0.0)
    """
    return Moments(A, X)
