"""The terms of a Kronecker sum, one `Σ_i a_i ⊗ b_i` each: joined, cut, written as a matrix, multiplied."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.structured.stacks import CHUNK, Full, LowRank, Stack, is_rank_one


class Term(NamedTuple):
    """One sum over tokens: `KS(a, b)`, or `KS×(a, b)` if crossed."""

    a: Stack
    b: Stack
    crossed: bool

    @property
    def rows(self) -> tuple[int, int]:
        return self.a.m, self.b.m

    @property
    def columns(self) -> tuple[int, int]:
        return (self.b.p, self.a.p) if self.crossed else (self.a.p, self.b.p)

    @property
    def T(self) -> Term:
        if self.crossed:
            return Term(self.b.T, self.a.T, True)
        return Term(self.a.T, self.b.T, False)


def joined(terms: list[Term]) -> list[Term]:
    """Terms that share a factor become one with the sum of the others."""
    joined: list[Term] = []
    for term in terms:
        for i, other in enumerate(joined):
            if other.crossed == term.crossed and other.a is term.a and not _both_thin(other.b, term.b):
                joined[i] = Term(term.a, Full(other.b.full() + term.b.full()), term.crossed)
                break
            if other.crossed == term.crossed and other.b is term.b and not _both_thin(other.a, term.a):
                joined[i] = Term(Full(other.a.full() + term.a.full()), term.b, term.crossed)
                break
        else:
            joined.append(term)
    return joined


def _both_thin(a: Stack, b: Stack) -> bool:
    return isinstance(a, LowRank) and isinstance(b, LowRank)


def part_of(term: Term, rows: tuple[slice, slice], columns: tuple[slice, slice]) -> Term:
    p, q = columns[::-1] if term.crossed else columns
    return Term(term.a.part(rows[0], p), term.b.part(rows[1], q), term.crossed)


def write_terms(slab: Tensor, terms: list[Term]) -> None:
    """Write the matrix of a sum to a contiguous `slab` `[m, r, x, y]`.

    A factor of rank one, `u_i v_iᵀ`, has `v_i` multiplied into the other factor first, so that one matrix product with
    `u` lays every entry in place. Terms with the same `u` share that product.
    """
    m, r = slab.shape[:2]
    shared: dict[object, tuple[bool, Tensor, Tensor]] = {}
    others = []
    for term in terms:
        if term.a.n == 1 or not (is_rank_one(term.a) or is_rank_one(term.b)):
            others.append(term)
            continue
        over_m, u, factors = _spread(term)
        key = over_m, u.data_ptr(), u.shape, u.stride()
        if key in shared:
            shared[key][2].addcmul_(*factors)
        else:
            shared[key] = over_m, u, torch.mul(*factors).contiguous()
    for i, (over_m, u, spread) in enumerate(shared.values()):
        n, beta = len(u), int(i > 0)
        if over_m:
            slab.view(m, -1).addmm_(u.T, spread.view(n, -1), beta=beta)
        else:
            slab.view(m, r, -1).baddbmm_(u.T.expand(m, r, n), spread.view(m, n, -1), beta=beta)
    for i, term in enumerate(others):
        _write_plainly(slab, term, add=i > 0 or bool(shared))


def _spread(term: Term) -> tuple[bool, Tensor, tuple[Tensor, Tensor]]:
    """Whether `u` of the factor of rank one lies over `m` (or over `r`), `u`, and two tensors with the rest as product.

    The rest is `[n, r, x, y]` for `u` over `m`, `[m, n, x, y]` for `u` over `r`.
    """
    if is_rank_one(term.a):
        u, v = _vectors(term.a)
        matrix = term.b.full().contiguous()
        if term.crossed:
            return True, u, (matrix[..., None], v[:, None, None])
        return True, u, (matrix[:, :, None], v[:, None, :, None])
    u, v = _vectors(term.b)
    matrix = term.a.full().transpose(0, 1).contiguous()
    if term.crossed:
        return False, u, (matrix[:, :, None], v[:, :, None])
    return False, u, (matrix[..., None], v[:, None])


def _write_plainly(slab: Tensor, term: Term, add: bool) -> None:
    if term.a.n == 1 and not term.crossed:
        left, right = term.a.full()[0][:, None, :, None], term.b.full()[0][None, :, None, :]
        slab.addcmul_(left, right) if add else torch.mul(left, right, out=slab)
    else:
        slab.add_(product(term)) if add else slab.copy_(product(term))


def product(term: Term) -> Tensor:
    """The matrix of a term, `[m, r, x, y]`, as a view of one matrix product `[m p, n] x [n, r q]`."""
    a, b = term.a, term.b
    values = a.full().reshape(a.n, -1).T @ b.full().reshape(a.n, -1)
    values = values.view(a.m, a.p, b.m, b.p)
    return values.permute(0, 2, 3, 1) if term.crossed else values.transpose(1, 2)


def _vectors(stack: Stack) -> tuple[Tensor, Tensor]:
    assert isinstance(stack, LowRank)
    return stack.left[..., 0], stack.right[..., 0]


def add_product(out: Tensor, term: Term, V: Tensor) -> None:
    """Add `Σ_i a_i V b_iᵀ` (crossed: `Σ_i a_i Vᵀ b_iᵀ`) for a stack `V` `[K, p, q]` to `out` `[K, m, r]`."""
    V = V.mT if term.crossed else V
    a, b = term.a, term.b
    if is_rank_one(a):
        _rank_one_product(out, a, b, V)
    elif is_rank_one(b):
        _rank_one_product(out.mT, b, a, V.mT)
    else:
        step = max(1, CHUNK // max(1, len(V) * max(a.m, a.p) * b.m))
        for start in range(0, a.n, step):
            where = slice(start, start + step)
            middle = b.tokens(where).act(V.mT[:, None]).mT  # [K, n, p, r]
            out += a.tokens(where).act(middle).sum(1)


def _rank_one_product(out: Tensor, a: Stack, b: Stack, V: Tensor) -> None:
    assert isinstance(a, LowRank)
    left, right = a.left[..., 0], a.right[..., 0]
    step = max(1, CHUNK // max(1, a.n * max(b.p, b.m)))
    for start in range(0, len(V), step):
        vectors = torch.matmul(right, V[start : start + step])  # [K, n, q]
        images = b.act(vectors.transpose(0, 1).mT[None])[0].mT.transpose(
            0, 1
        )  # a product a token, for all vectors
        out[start : start + step] += torch.matmul(left.T, images)
