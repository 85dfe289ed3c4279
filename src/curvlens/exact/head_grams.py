"""Inner products of the functional blocks of heads by Gram matrices over tokens: no matrix of a block, nothing of
size d² a token.

Without rotations, and with the rows `i` of all sequences, the blocks are (Theorem 3.2 of Ormaniec, Dangel, Singh, 2025, with the key blocks)

    QQ = s² Σ_i x_i x_iᵀ ⊗ (Kᵀ E_i K)                   KK = s² Σ_i (Yᵀ E_i Y) ⊗ q_i q_iᵀ
    QK = s² Σ_i (x_i q_iᵀ crossed Kᵀ E_i Y) + s Σ_i x_i h_iᵀ ⊗ I,   h_i = Yᵀ D_i
    VQ = s Σ_i (Yᵀ F_i K crossed γ_i x_iᵀ)              VK = s Σ_i (Yᵀ F_i Y) ⊗ γ_i q_iᵀ

so that, with Gram matrices `Ξ = X X'ᵀ`, `Γ = Y Y'ᵀ`, … of two sets of rows, every inner product is of the form
`Σ_ii' Ψ_ii' tr(E_i Γ₁ E_i' Γ₂ᵀ)` or the same with `F`, and a norm is an inner product with itself. Each costs two
products of L × L matrices, half of it where attention is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.exact.head_rows import Rows, Sequence, before, below

QUERY_BLOCKS = ("QQ", "QK", "VQ")  # one for each query head
KEY_BLOCKS = ("KK", "VK")  # one for each key and value head, summed over the query heads that share it
BLOCKS = ("QQ", "KK", "QK", "VQ", "VK")


@dataclass(frozen=True)
class Gram:
    """Gram matrices of one kind of key vectors (key inputs, or keys) of rows `a` and `b`.

    `keys[j, j']`, and with `M = A Y`, `H = D Y`: `MM[i, i'] = M_i·M_i'`, `My[i, j'] = M_i·y_j'`, `yM[j, i']`.
    """

    keys: Tensor
    My: Tensor
    Hy: Tensor
    yM: Tensor
    yH: Tensor
    MM: Tensor
    MH: Tensor
    HM: Tensor
    HH: Tensor

    @classmethod
    def of(cls, a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor], keys: Tensor) -> Gram:
        """From `(Y, A Y, D Y)` of both, and the Gram matrix of the keys."""
        (ya, Ma, Ha), (yb, Mb, Hb) = a, b
        My, Hy, HM = Ma @ yb.T, Ha @ yb.T, Ha @ Mb.T
        MM, HH = Ma @ Mb.T, Ha @ Hb.T
        if Ma is Mb:
            return cls(keys, My, Hy, My.T, Hy.T, MM, HM.T, HM, HH)
        return cls(keys, My, Hy, ya @ Mb.T, ya @ Hb.T, MM, Ma @ Hb.T, HM, HH)


@dataclass(frozen=True)
class Shared:
    """Gram matrices of two sequences that all heads of a layer share."""

    x: Tensor  # X X'ᵀ
    y: Tensor  # Y Y'ᵀ, about the means

    @classmethod
    def of(cls, a: Sequence, b: Sequence) -> Shared:
        return cls(a.x @ b.x.T, a.centred @ b.centred.T)


def inner(a: Rows, b: Rows, shared: Shared) -> dict[str, Tensor]:
    """`⟨block of a, block of b⟩` of every block (of QQ, QK, VQ only where both are rows of the same query head)."""
    y = Gram.of((a.y, a.M, a.H), (b.y, b.M, b.H), shared.y)
    queries, gradients = a.q @ b.q.T, a.g @ b.g.T
    s = a.s * b.s
    yy = shared.y.square()
    found = {
        "KK": s * s * third(a, b, queries.square(), yy, y, y),
        "VK": s * second(a, b, gradients * queries, yy, y, y),
    }
    if a.head != b.head:
        return found
    k = Gram.of((a.k, a.Mk, a.Hk), (b.k, b.Mk, b.Hk), a.k @ b.k.T)
    yk = shared.y * k.keys
    found["QQ"] = s * s * third(a, b, shared.x.square(), k.keys.square(), k, k)
    found["VQ"] = s * second(a, b, gradients * shared.x, yk, y, k)
    crossed = s * s * third(a, b, shared.x * queries, yk, y, k)
    TH = dot(shared.x, a.T @ b.H.T)
    HT = TH if a is b else dot(shared.x, a.H @ b.T.T)
    width = a.k.shape[1]
    found["QK"] = crossed + s * (a.s * TH + b.s * HT) + s * width * dot(shared.x, y.HH)
    return found


def third(a: Rows, b: Rows, weights: Tensor, keys: Tensor, one: Gram, two: Gram) -> Tensor:
    """`Σ_ii' Ψ_ii' tr(E_i Γ₁ E_i' Γ₂ᵀ)` with `E = diag D − D Aᵀ − A Dᵀ`; `keys` is `Γ₁ ∘ Γ₂`."""
    ahead, total = _diagonals(a, b, a.D, b.D, weights, keys)
    around = dot(ahead, one.Hy * two.My + one.My * two.Hy)
    other = around if a is b else dot(_across(a, a.D, weights), one.yH * two.yM + one.yM * two.yH)
    low = one.MH * two.HM + one.HM * two.MH + one.MM * two.HH + one.HH * two.MM
    return total - around - other + dot(weights, low)


def second(a: Rows, b: Rows, weights: Tensor, keys: Tensor, one: Gram, two: Gram) -> Tensor:
    """`Σ_ii' Ψ_ii' tr(F_i Γ₁ F_i' Γ₂ᵀ)` with `F = diag A − A Aᵀ`."""
    ahead, total = _diagonals(a, b, a.A, b.A, weights, keys)
    around = dot(ahead, one.My * two.My)
    other = around if a is b else dot(_across(a, a.A, weights), one.yM * two.yM)
    return total - around - other + dot(weights, one.MM * two.MM)


def _diagonals(
    a: Rows, b: Rows, left: Tensor, right: Tensor, weights: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """`Ψ D'` and `Σ_ii' Ψ_ii' tr(diag D_i Γ₁ diag D_i' Γ₂ᵀ) = ⟨Dᵀ Ψ D', Γ₁ ∘ Γ₂⟩`."""
    ahead = before(weights, right, b.reach)
    return ahead, dot(ahead, below(left, keys, a.reach))


def _across(a: Rows, left: Tensor, weights: Tensor) -> Tensor:
    """`Dᵀ Ψ`."""
    return before(weights.T, left, a.reach).T


def dot(a: Tensor, b: Tensor) -> Tensor:
    """`⟨a, b⟩` in double precision: terms of both signs cancel."""
    return torch.linalg.vecdot(a, b).double().sum()


def traces(rows: Rows) -> dict[str, Tensor]:
    """The traces of a head's blocks; that of a block between two matrices is given where these have one shape.

    A trace of KK or VK is a share of that of the head's keys and values: their sum is over all that share them.
    """
    s, x, y, A, D = rows.s, rows.x, rows.y, rows.A, rows.D
    found = {
        "QQ": s * s * dot(_squares(x), D @ _squares(rows.k) - 2 * (rows.Hk * rows.Mk).sum(1)),
        "KK": s * s * dot(_squares(rows.q), D @ _squares(y) - 2 * (rows.H * rows.M).sum(1)),
    }
    if rows.sequence.x.shape[1] == y.shape[1]:
        found["QK"] = s * s * dot(x, rows.T) + s * rows.k.shape[1] * dot(x, rows.H)
    if rows.v.shape[1] != rows.k.shape[1]:
        return found
    found["VK"] = s * dot((rows.g * rows.q).sum(1), A @ _squares(y) - _squares(rows.M))
    if "QK" in found:
        about = rows.g @ rows.k.T - (rows.g * rows.Mk).sum(1, keepdim=True)
        found["VQ"] = s * dot(x, below(about.mul_(A), y, rows.reach))
    return found


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1)
