"""What the curvature of one attention head is made of: moments of its rows, projected where that is smaller."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_map import RowMoments, WeightedMoments
from curvlens.exact.result import Tokens
from curvlens.structured.stacks import CHUNK, Full, LowRank


class Groups:
    """The tokens in groups of sequences of one length, `[b, L, d]`, with a constant entry for biases."""

    def __init__(self, layer: SelfAttention, tokens: Tokens):
        x = tokens.stacked
        if layer.augmented:
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        self.stacked = x
        masks = layer.masks(tokens)
        if len(set(tokens.lengths)) == 1:
            mask = None if masks[0] is None else torch.stack([m for m in masks if m is not None])
            self.parts = [(x.unflatten(0, (-1, tokens.lengths[0])), mask)]
        else:
            sequences = x.split(tokens.lengths)
            self.parts = [
                (s[None], None if mask is None else mask[None])
                for s, mask in zip(sequences, masks, strict=True)
            ]

        sizes = [part.shape[0] * part.shape[1] for part, _ in self.parts]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def split(self, rows: Tensor) -> list[Tensor]:
        """Rows of all tokens in the groups' shapes."""
        if len(self.parts) == 1:
            return [rows.unflatten(0, self.parts[0][0].shape[:2])]
        return [r[None] for r in rows.split([x.shape[1] for x, _ in self.parts])]


def _mean(rows: RowMoments, A: Tensor, x: Tensor) -> Tensor:
    """`A x`, which centred moments have made."""
    return rows.mean(x) if isinstance(rows, WeightedMoments) and rows.centred else A @ x


def joined(parts: list[Tensor]) -> Tensor:
    """`[b, L, ...]` of every group as `[n, ...]`."""
    return parts[0].flatten(0, 1) if len(parts) == 1 else torch.cat([p.flatten(0, 1) for p in parts])


class Head:
    """The moments of one head; `n` tokens, `d` inputs (and the constant), `k` keys, `v` values, `o` outputs.

    The factor `s` of the scores is kept in the queries `q = s X W_Q` and in `K = s W_K`.
    """

    def __init__(self, layer: SelfAttention, h: int, groups: Groups):
        self.layer, self.index, self.groups = layer, h, groups
        self.x = groups.stacked
        W_V = layer.projection("value", h)
        assert W_V is not None
        self.W_V = W_V
        self.W_O = layer.head("out", h)
        self.single = "query_key" in layer.weights
        s = layer.scale
        if self.single:
            W = layer.projection("query_key", h)
            assert W is not None
            W = W if W.shape[1] == self.x.shape[1] else torch.nn.functional.pad(W, (0, 1))
            eye = torch.eye(self.x.shape[1], dtype=self.x.dtype, device=self.x.device)
            self.q, self.K = s * (self.x @ W), s * eye
            self.keys = self.x
        else:
            W_Q, W_K = layer.projection("query", h), layer.projection("key", h)
            assert W_Q is not None
            assert W_K is not None
            self.q, self.K = s * (self.x @ W_Q), s * W_K
            self.keys = self.x @ W_K
        self.fixed: Any = None  # what products keep, see attention_product
        self.A: list[Tensor] = []
        self.rows: list[RowMoments] = []
        for q, k, (_, mask) in zip(groups.split(self.q), groups.split(self.keys), groups.parts, strict=True):
            T = q @ k.mT
            A = layer.activation.attend(T, mask)
            self.A.append(A)
            self.rows.append(layer.activation.moments(T, A, mask))
        d = self.x.shape[1]
        self.expand = len(self.x) * d * d > CHUNK and isinstance(self.rows[0], WeightedMoments)

    def see(self, gradient: Tensor) -> None:
        """Take the gradient at the output, `g` `[n, o]`."""
        self.g = gradient
        self.g_value = gradient if self.W_O is None else gradient @ self.W_O.T  # W_O g_i, [n, v]

    def _over(self, moment: Callable[[RowMoments, int], Tensor]) -> Tensor:
        return joined([moment(rows, i) for i, rows in enumerate(self.rows)])

    def _x(self, i: int) -> Tensor:
        return self.groups.parts[i][0]

    # -- first moment and output

    @cached_property
    def M1(self) -> Tensor:
        """`Σ_j A_ij x_j`, `[n, d]`."""
        parts = zip(self.A, self.rows, self.groups.parts, strict=True)
        return joined([_mean(rows, A, x) for A, rows, (x, _) in parts])

    @cached_property
    def mixed(self) -> Tensor:
        """`M1 W_V`, `[n, v]`: what `W_O` sees."""
        return self.M1 @ self.W_V

    def output(self) -> Tensor:
        return self.mixed if self.W_O is None else self.mixed @ self.W_O

    @cached_property
    def values(self) -> Tensor:
        """`X W_V`, `[n, v]`."""
        return self.x @ self.W_V

    # -- second moment

    @cached_property
    def M2(self) -> Tensor:
        """`[n, d, d]`."""
        return self._over(lambda rows, i: rows.second(self._x(i), self._x(i)))

    @cached_property
    def N(self) -> Tensor:
        """`M2_i W_V`, `[n, d, v]`."""
        if not self.expand:
            return self.M2 @ self.W_V
        values = self.groups.split(self.values)
        return self._over(lambda rows, i: rows.second(self._x(i), values[i]))

    @cached_property
    def P(self) -> Tensor:
        """`Kᵀ N_i`, `[n, k, v]`."""
        return self.K.T @ self.N

    @cached_property
    def M2K(self) -> Tensor:
        """`M2_i K`, `[n, d, k]`."""
        if self.single:
            return self.layer.scale * self.M2
        if not self.expand:
            return self.M2 @ self.K
        keys = self.groups.split(self.x @ self.K)
        return self._over(lambda rows, i: rows.second(self._x(i), keys[i]))

    # -- third moment, contracted with w_i = W_V W_O g_i

    @cached_property
    def u(self) -> list[Tensor]:
        """`u_ij = x_j·w_i`, `[b, L, L]`."""
        values, gradients = self.groups.split(self.values), self.groups.split(self.g_value)
        return [g @ v.mT for g, v in zip(gradients, values, strict=True)]

    @cached_property
    def pulled(self) -> list[Tensor]:
        """`(∂A_i/∂T_i)ᵀ u_i`, the gradient with respect to the scores, `[b, L, L]`."""
        return [rows.back(u) for rows, u in zip(self.rows, self.u, strict=True)]

    @cached_property
    def third_weights(self) -> list[Tensor]:
        """The weights of the third moment; for softmax and elementwise maps `[b, L, L]`."""
        return [rows.third_weights(u) for rows, u in zip(self.rows, self.u, strict=True)]

    @cached_property
    def h(self) -> Tensor:
        """`M2_i w_i = N_i W_O g_i`, `[n, d]`."""
        if "N" in self.__dict__:
            return (self.N @ self.g_value[..., None])[..., 0]
        return self._over(lambda rows, i: rows.pull(self.u[i], self._x(i)))

    @cached_property
    def B(self) -> Tensor:
        """`Β = Σ_i X_i h_iᵀ`, `[d, d]` (Remark D.1)."""
        return self.x.T @ self.h

    @cached_property
    def M3(self) -> Tensor:
        """`M3_i[w_i]`, `[n, d, d]`."""
        return self._over(lambda rows, i: rows.third(self._x(i), self._x(i), self.third_weights[i]))

    @cached_property
    def KM3(self) -> Tensor:
        """`Kᵀ M3_i[w_i]`, `[n, k, d]`."""
        if not self.expand:
            return self.K.T @ self.M3
        keys = self.groups.split(self.x @ self.K)
        return self._over(lambda rows, i: rows.third(keys[i], self._x(i), self.third_weights[i]))

    @cached_property
    def KM3K(self) -> Tensor:
        """`Kᵀ M3_i[w_i] K`, `[n, k, k]`."""
        if not self.expand or "KM3" in self.__dict__:
            return self.KM3 @ self.K
        keys = self.groups.split(self.x @ self.K)
        return self._over(lambda rows, i: rows.third(keys[i], keys[i], self.third_weights[i]))

    # -- Σ_i M2_i ⊗ Z_i and Σ_i M3_i ⊗ Z_i with nothing of size d² a token: sums over keys

    def spread_second(self, left: Tensor, right: Tensor) -> list[tuple[LowRank, Full | LowRank]]:
        """`Σ_i M2_i ⊗ left_i right_iᵀ = Σ_j x_j x_jᵀ ⊗ (Σ_i α_ij left_i right_iᵀ) − Σ_i m_i m_iᵀ ⊗ left_i right_iᵀ`.

        For softmax, `α = A`, tokens are taken about the mean of their sequence and `m` is their first moment;
        for elementwise maps, `α = a'` and `m` is zero.
        """
        x, m = self._about_mean
        spread = self._spread([rows.first for rows in self._weighted], left, right)
        terms: list[tuple[LowRank, Full | LowRank]] = [(LowRank(x, x), Full(spread))]
        return terms if m is None else [*terms, (LowRank(-m, m), LowRank(left, right))]

    def spread_third(self, left: Tensor, right: Tensor) -> list[tuple[LowRank, Full | LowRank]]:
        """`Σ_i M3_i ⊗ left_i right_iᵀ`, with weights `β` that sum to zero in each row of softmax.

        `Σ_j x_j x_jᵀ ⊗ (Σ_i β_ij left_i right_iᵀ) − Σ_i (h_i m_iᵀ + m_i h_iᵀ) ⊗ left_i right_iᵀ`.
        """
        x, m = self._about_mean
        terms: list[tuple[LowRank, Full | LowRank]] = [
            (LowRank(x, x), Full(self._spread(self.third_weights, left, right)))
        ]
        if m is None:
            return terms
        around = LowRank(torch.stack([-self.h, -m], -1), torch.stack([m, self.h], -1))
        return [*terms, (around, LowRank(left, right))]

    @property
    def _weighted(self) -> list[WeightedMoments]:
        return [rows for rows in self.rows if isinstance(rows, WeightedMoments)]

    @cached_property
    def _about_mean(self) -> tuple[Tensor, Tensor | None]:
        """The tokens and their first moments about the mean of the sequence, which cancels from central moments."""
        if not self._weighted[0].centred:
            return self.x, None
        x = [x - x.mean(1, keepdim=True) for x, _ in self.groups.parts]
        return joined(x), joined([A @ part for A, part in zip(self.A, x, strict=True)])

    def _spread(self, weights: list[Tensor], left: Tensor, right: Tensor) -> Tensor:
        """`Σ_i weights_ij left_i right_iᵀ` for every key `j`, `[n, r, q]`."""
        lefts, rights = self.groups.split(left), self.groups.split(right)
        parts = []
        for weight, l, r in zip(weights, lefts, rights, strict=True):
            products = (l[..., :, None] * r[..., None, :]).flatten(2)
            parts.append((weight.mT @ products).unflatten(-1, (l.shape[-1], r.shape[-1])))
        return joined(parts)
