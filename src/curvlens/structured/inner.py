"""Inner products of two Kronecker sums over tokens, without either matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlens.structured.stacks import CHUNK, LowRank, Stack, gram, gram_cost, is_rank_one

if TYPE_CHECKING:
    from curvlens.structured.terms import Term


def inner(s: Term, t: Term) -> tuple[Tensor, Tensor]:
    """`⟨S, T⟩` and the sum of the absolute values of the products over pairs of tokens.

    Both plain or both crossed: `Σ_ij ⟨a_i, a'_j⟩⟨b_i, b'_j⟩`. One of each kind: see `_mixed`.
    """
    if s.crossed == t.crossed:
        products = gram(s.a, t.a) * gram(s.b, t.b)
        return products.sum(), products.abs().sum()
    return _mixed(t, s) if s.crossed else _mixed(s, t)


def inner_cost(s: Term, t: Term) -> float:
    """Multiplications in `inner(s, t)`."""
    if s.crossed == t.crossed:
        return gram_cost(s.a, t.a) + gram_cost(s.b, t.b)
    s, t = (t, s) if s.crossed else (s, t)
    pairs = s.a.n * t.a.n
    if _shared(s, t) is not None:
        m, r, p, q = s.a.m, s.b.m, s.a.p, s.b.p
        return pairs * 2 * max(m, r, p, q) ** 2
    if 1 in (s.a.n, t.a.n):
        return pairs * (s.a.m * s.a.p * s.b.p + s.b.m * s.a.p * s.b.p)
    return float("inf")


def _mixed(s: Term, t: Term) -> tuple[Tensor, Tensor]:
    """Plain against crossed: `Σ_ij Σ a_i[m,p] b_i[r,q] a'_j[m,q] b'_j[r,p]`.

    If each side has a factor of rank one, these two share one of the four indices. Its vectors give a Gram matrix,
    and their partners meet the other side's matrices: `Σ_ij (x_i·x'_j) ⟨M_i y'_j, M'_jᵀ y_i⟩`, `O(n² d²)`.
    """
    shared = _shared(s, t)
    if shared is None:
        return _mixed_by_matrices(s, t)
    x, y, M, x2, y2, M2 = shared
    weights = x @ x2.T  # [n, n']
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    size = torch.zeros((), dtype=x.dtype, device=x.device)
    step = max(1, CHUNK // (t.a.n * M.m))
    for start in range(0, s.a.n, step):
        where = slice(start, start + step)
        here = M.tokens(where).apply(y2)  # [n, n', index that both matrices have]
        there = M2.apply(y[where]).transpose(0, 1)
        products = weights[where] * (here * there).sum(-1)
        total += products.sum()
        size += products.abs().sum()
    return total, size


def _shared(s: Term, t: Term) -> tuple[Tensor, Tensor, Stack, Tensor, Tensor, Stack] | None:
    """`(x, y, M, x', y', M')` with the matrices turned so that `y'` meets the columns of `M` and `y` those of `M'`."""
    if is_rank_one(s.a):  # plain: vectors over m and p, matrix over (r, q)
        m, p = _vectors(s.a)
        if is_rank_one(t.b):  # crossed: vectors over r and p, matrix over (m, q)
            r, p2 = _vectors(t.b)
            return p, m, s.b.T, p2, r, t.a.T
        if is_rank_one(t.a):  # crossed: vectors over m and q, matrix over (r, p)
            m2, q = _vectors(t.a)
            return m, p, s.b, m2, q, t.b
    elif is_rank_one(s.b):  # plain: vectors over r and q, matrix over (m, p)
        r, q = _vectors(s.b)
        if is_rank_one(t.a):
            m2, q2 = _vectors(t.a)
            return q, r, s.a.T, q2, m2, t.b.T
        if is_rank_one(t.b):
            r2, p = _vectors(t.b)
            return r, q, s.a, r2, p, t.a
    return None


def _vectors(stack: Stack) -> tuple[Tensor, Tensor]:
    assert isinstance(stack, LowRank)
    return stack.left[..., 0], stack.right[..., 0]


def _mixed_by_matrices(s: Term, t: Term) -> tuple[Tensor, Tensor]:
    """`Σ_ij ⟨a_iᵀ a'_j, b'_jᵀ b_i⟩`, one token of the shorter sum at a time; `s` plain, `t` crossed."""
    total = torch.zeros((), dtype=s.a.dtype, device=s.a.device)
    size = torch.zeros((), dtype=s.a.dtype, device=s.a.device)
    if s.a.n <= t.a.n:
        for a, b in zip(s.a.full(), s.b.full(), strict=True):
            products = _single(a, b, t.a, t.b)
            total, size = total + products.sum(), size + products.abs().sum()
    else:
        for a, b in zip(t.a.full(), t.b.full(), strict=True):
            products = _single(a, b, s.a, s.b)
            total, size = total + products.sum(), size + products.abs().sum()
    return total, size


def _single(a: Tensor, b: Tensor, a2: Stack, b2: Stack) -> Tensor:
    """`⟨aᵀ a'_j, b'_jᵀ b⟩` of one pair with each of the other kind; the formula is the same either way round."""
    if is_rank_one(a2):  # a' = u zᵀ: (aᵀ u)ᵀ b'ᵀ (b z)
        u, z = _vectors(a2)
        return (b2.T.act((z @ b.T)[None, ..., None])[0, ..., 0] * (u @ a)).sum(1)
    if is_rank_one(b2):  # b' = g xᵀ: (a x)ᵀ a' (bᵀ g)
        g, x = _vectors(b2)
        return (a2.act((g @ b)[None, ..., None])[0, ..., 0] * (x @ a.T)).sum(1)
    return (a2.T.act(a[None, None])[0].mT * b2.T.act(b[None, None])[0]).sum((1, 2))
