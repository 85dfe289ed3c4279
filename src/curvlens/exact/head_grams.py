"""Inner products of the functional blocks of heads by Gram matrices over tokens: no matrix of a block, nothing of
size d² a token.

Without rotations, and with the rows `i` of all sequences, the blocks are (Theorem 3.2 of
Ormaniec, Dangel, Singh, 2025, with the key blocks)

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

from curvlens.exact.head_rows import TILE, Rows, Sequence, before, below, both_sides

QUERY_BLOCKS = ("QQ", "QK", "VQ")  # one for each query head
KEY_BLOCKS = ("KK", "VK")  # one for each key and value head, summed over the query heads that share it
BLOCKS = ("QQ", "KK", "QK", "VQ", "VK")
CACHED = 2**19


@dataclass(frozen=True)
class Gram:
    """Gram matrices of one kind of key vectors `Y` (key inputs, or keys) of rows `a` and `b`.

    `keys[j, j'] = y_j·y_j'`, and with `M = A Y`, `H = D Y`:
    `MM[i, i'] = M_i·M_i'`, `My[i, j'] = M_i·y_j'`, `yM[j, i']`.
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
    def over_tokens(cls, a: Rows, b: Rows, keys: Tensor) -> Gram:
        """From the Gram matrix of the vectors alone, whatever their width."""
        My, Hy = below(a.A, keys, a.reach), below(a.D, keys, a.reach)
        HM = below(b.A, Hy.T, b.reach).T
        if a is b:
            MM, HH = both_sides(My, a.A, a.reach), both_sides(Hy, a.D, a.reach)
            return cls(keys, My, Hy, My.T, Hy.T, MM, HM.T, HM, HH)
        MM, MH, HH = (below(rows, B.T, b.reach).T for rows, B in ((b.A, My), (b.D, My), (b.D, Hy)))
        yM, yH = (below(rows, keys.T, b.reach).T for rows in (b.A, b.D))
        return cls(keys, My, Hy, yM, yH, MM, MH, HM, HH)

    @classmethod
    def of_keys(cls, a: Rows, b: Rows) -> Gram:
        """From the keys, which are narrow."""
        HM = a.H @ b.M.T
        My, Hy, MM, HH = a.M @ b.k.T, a.H @ b.k.T, a.M @ b.M.T, a.H @ b.H.T
        keys = a.k @ b.k.T
        if a is b:
            return cls(keys, My, Hy, My.T, Hy.T, MM, HM.T, HM, HH)
        return cls(keys, My, Hy, a.k @ b.M.T, a.k @ b.H.T, MM, a.M @ b.H.T, HM, HH)


@dataclass(frozen=True)
class Shared:
    """Gram matrices of two sequences that all heads of a layer share."""

    x: Tensor  # X X'ᵀ
    y: Tensor  # Y Y'ᵀ, about the means
    xx: Tensor  # their squares
    yy: Tensor
    xy: Tensor | None  # X Yᵀ of a sequence with itself

    @classmethod
    def of(cls, a: Sequence, b: Sequence) -> Shared:
        x, y = a.x @ b.x.T, a.centred @ b.centred.T
        return cls(x, y, x.square(), y.square(), a.x @ a.centred.T if a is b else None)


def inner(a: Rows, b: Rows, shared: Shared, y: Gram) -> dict[str, Tensor]:
    """`⟨block of a, block of b⟩` of every block (of QQ, QK, VQ only where both are rows of the same query head)."""
    queries, gradients = a.q @ b.q.T, a.g @ b.g.T
    s = a.s * b.s
    found = {
        "VK": s * second(a, b, gradients * queries, shared.yy, y, y),
        "KK": s * s * third(a, b, queries.square(), shared.yy, y, y),
    }
    if a.head != b.head:
        return found
    k = Gram.of_keys(a, b)
    yk = shared.y * k.keys
    found["QQ"] = s * s * third(a, b, shared.xx, k.keys.square(), k, k)
    found["VQ"] = s * second(a, b, gradients.mul_(shared.x), yk, y, k)
    crossed = s * s * third(a, b, queries.mul_(shared.x), yk, y, k)
    # with h = Yᵀ D and the second term s (Σ_i x_i h_iᵀ) ⊗ I
    TH = dot(shared.x, below(a.t, y.yH, a.reach))
    HT = TH if a is b else dot(shared.x.T, below(b.t, y.Hy.T, b.reach))
    found["QK"] = crossed + s * (a.s * TH + b.s * HT + a.k.shape[1] * dot(shared.x, y.HH))
    return found


def third(a: Rows, b: Rows, weights: Tensor, keys: Tensor, one: Gram, two: Gram) -> Tensor:
    """`Σ_ii' Ψ_ii' tr(E_i Γ₁ E_i' Γ₂ᵀ)` with `E = diag D − D Aᵀ − A Dᵀ`; `keys` is `Γ₁ ∘ Γ₂`."""
    ahead, total = _diagonals(a, b, a.D, b.D, weights, keys)
    total = total - _both(ahead, one.Hy, two.My, one.My, two.Hy)
    if a is b:
        total = total - _both(ahead, one.Hy, two.My, one.My, two.Hy)
    else:
        behind = before(weights.T, a.D, a.reach).T
        total = total - _both(behind, one.yH, two.yM, one.yM, two.yH)
    total = total + _both(weights, one.MM, two.HH, one.HH, two.MM)
    return total + _both(weights, one.MH, two.HM, one.HM, two.MH)


def second(a: Rows, b: Rows, weights: Tensor, keys: Tensor, one: Gram, two: Gram) -> Tensor:
    """`Σ_ii' Ψ_ii' tr(F_i Γ₁ F_i' Γ₂ᵀ)` with `F = diag A − A Aᵀ`."""
    ahead, total = _diagonals(a, b, a.A, b.A, weights, keys)
    around = dot(ahead, one.My, two.My)
    other = around if a is b else dot(before(weights.T, a.A, a.reach).T, one.yM, two.yM)
    return total - around - other + dot(weights, one.MM, two.MM)


def _both(weights: Tensor, p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """`⟨Ψ, p ∘ q + r ∘ s⟩`."""
    return 2 * dot(weights, p, q) if p is s and q is r else dot(weights, p, q) + dot(weights, r, s)


def _diagonals(
    a: Rows, b: Rows, left: Tensor, right: Tensor, weights: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """`Ψ D'` and `Σ_ii' Ψ_ii' tr(diag D_i Γ₁ diag D_i' Γ₂ᵀ) = ⟨Dᵀ Ψ D', Γ₁ ∘ Γ₂⟩`."""
    ahead = before(weights, right, b.reach)
    if a is not b:
        return ahead, dot(ahead, below(left, keys, a.reach))
    # Dᵀ Ψ D is symmetric: its lower half, and of that the rows that reach so far
    total = ahead.new_zeros((), dtype=torch.float64)
    for rows, stop, done in zip(range(0, len(left), TILE), a.reach, (0, *a.reach), strict=False):
        if stop == done:
            continue
        half = left[rows:, done:stop].T @ ahead[rows:, :stop]
        half[:, :done] *= 2
        total = total + dot(half, keys[done:stop, :stop])
    return ahead, total


def dot(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """`Σ a b c`, as many rows at a time as stay in the cache.

    Summed in double precision, since terms of both signs cancel.
    """
    total = a.new_zeros((), dtype=torch.float64)
    step = max(1, CACHED // max(a[0].numel(), 1))
    for rows in range(0, len(a), step):
        tile = slice(rows, rows + step)
        product = a[tile] * b[tile] if c is None else (a[tile] * b[tile]).mul_(c[tile])
        total += product.sum(-1).double().sum()
    return total


def traces(rows: Rows, shared: Shared, y: Gram) -> dict[str, Tensor]:
    """The traces of a head's blocks; that of a block between two matrices only if it is square.

    A trace of KK or VK is a share of that of the head's keys and values: their sum is over all that share them.
    """
    s, A, D, width = rows.s, rows.A, rows.D, rows.k.shape[1]
    norms, crossed = y.keys.diagonal(), shared.xy
    assert crossed is not None
    found = {
        "QQ": s * s * dot(shared.x.diagonal(), D @ _squares(rows.k) - 2 * (rows.H * rows.M).sum(1)),
        "KK": s * s * dot(_squares(rows.q), D @ norms - 2 * y.HM.diagonal()),
    }
    wide = rows.sequence.x.shape[1] == rows.sequence.y.shape[1]
    if wide:
        found["QK"] = s * s * dot(crossed, rows.t) + s * width * dot(crossed, D)
    if rows.g.shape[1] != width:
        return found
    found["VK"] = s * dot((rows.g * rows.q).sum(1), A @ norms - y.MM.diagonal())
    if wide:
        about = rows.g @ rows.k.T - (rows.g * rows.M).sum(1, keepdim=True)
        found["VQ"] = s * dot(crossed, A, about)
    return found


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1)
