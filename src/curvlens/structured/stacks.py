"""Stacks of matrices, one a token: the factors of a Kronecker sum, as they are or as products of thin ones."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor


class Full:
    """A stack `[n, m, p]` of matrices."""

    def __init__(self, t: Tensor):
        self.t = t
        self.n, self.m, self.p = t.shape
        self.dtype, self.device = t.dtype, t.device

    @property
    def T(self) -> Full:
        return Full(self.t.mT)

    def full(self) -> Tensor:
        return self.t

    def part(self, rows: slice | Tensor, columns: slice | Tensor) -> Full:
        return Full(self.t[:, rows][:, :, columns])

    def tokens(self, where: slice) -> Full:
        return Full(self.t[where])

    def scaled(self, factor: float) -> Full:
        return Full(self.t * factor)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """`[n, R, C]`: entry `(rows[i, j], columns[i, j])`, the index tensors broadcasting to `[R, C]`."""
        return self.t[:, rows, columns]

    def diagonals(self) -> Tensor:
        return self.t.diagonal(dim1=1, dim2=2)

    def apply(self, vectors: Tensor) -> Tensor:
        """`M_i s_j` for every pair, `[n, n', m]`, from vectors `[n', p]`."""
        return torch.matmul(vectors, self.t.mT)

    def act(self, V: Tensor) -> Tensor:
        """`M_i V_ki`, `[K, n, m, q]`, from `[K, n or 1, p, q]`."""
        return torch.matmul(self.t, V)


class LowRank:
    """A stack of products `l_i r_iᵀ`, from `l: [n, m, rank]` and `r: [n, p, rank]`, or `[n, m]`, `[n, p]`."""

    def __init__(self, left: Tensor, right: Tensor):
        self.left = left if left.dim() == 3 else left[..., None]
        self.right = right if right.dim() == 3 else right[..., None]
        self.n, self.m, self.rank = self.left.shape
        self.p = self.right.shape[1]
        self.dtype, self.device = left.dtype, left.device

    @property
    def T(self) -> LowRank:
        return LowRank(self.right, self.left)

    def full(self) -> Tensor:
        if self.rank == 1:
            return self.left * self.right.mT
        return self.left @ self.right.mT

    def part(self, rows: slice | Tensor, columns: slice | Tensor) -> LowRank:
        return LowRank(self.left[:, rows], self.right[:, columns])

    def tokens(self, where: slice) -> LowRank:
        return LowRank(self.left[where], self.right[where])

    def scaled(self, factor: float) -> LowRank:
        return LowRank(self.left * factor, self.right)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = torch.broadcast_tensors(rows, columns)
        return (self.left[:, rows] * self.right[:, columns]).sum(-1)

    def diagonals(self) -> Tensor:
        size = min(self.m, self.p)
        return (self.left[:, :size] * self.right[:, :size]).sum(-1)

    def apply(self, vectors: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(vectors, self.right), self.left.mT)

    def act(self, V: Tensor) -> Tensor:
        return torch.matmul(self.left, torch.matmul(self.right.mT, V))


Stack: TypeAlias = "Full | LowRank"


def stack_of(factor: Stack | Tensor | tuple[Tensor, Tensor]) -> Stack:
    """A factor as given: a stack, `[n, m, p]`, one matrix `[m, p]`, or a pair whose products are meant."""
    if isinstance(factor, (Full, LowRank)):
        return factor
    if isinstance(factor, tuple):
        return LowRank(*factor)
    return Full(factor if factor.dim() == 3 else factor[None])


def is_rank_one(stack: Stack) -> bool:
    return isinstance(stack, LowRank) and stack.rank == 1


CHUNK = 2**24  # numbers in a temporary: 128 MiB in float64


def gram(a: Stack, b: Stack) -> Tensor:
    """The inner products `⟨a_i, b_j⟩`, `[n, n']`, from thin factors where that is cheaper."""
    if isinstance(a, LowRank) and isinstance(b, LowRank) and _thin_cost(a, b) <= _full_cost(a, b):
        if a.rank == b.rank == 1:
            left = a.left[..., 0] @ b.left[..., 0].T
            same = a.left is a.right and b.left is b.right
            return left * (left if same else a.right[..., 0] @ b.right[..., 0].T)
        return (_pairs(a.left, b.left) * _pairs(a.right, b.right)).sum((1, 3))
    if isinstance(a, Full) and isinstance(b, Full) and not (a.t.is_contiguous() or b.t.is_contiguous()):
        a, b = a.T, b.T  # both transposed: the inner products are the same, and nothing need be copied
    step = max(1, CHUNK // (max(a.n, b.n) * a.p))
    if step >= a.m:
        if a is b:
            flat = a.full().flatten(1)
            return flat @ flat.T
        return a.full().flatten(1) @ b.full().flatten(1).T
    total = torch.zeros(a.n, b.n, dtype=a.dtype, device=a.device)
    for start in range(0, a.m, step):
        rows, all_columns = slice(start, start + step), slice(None)
        total += a.part(rows, all_columns).full().flatten(1) @ b.part(rows, all_columns).full().flatten(1).T
    return total


def gram_cost(a: Stack, b: Stack) -> int:
    """Multiplications in `gram(a, b)`."""
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return min(_thin_cost(a, b), _full_cost(a, b))
    return _full_cost(a, b)


def _thin_cost(a: LowRank, b: LowRank) -> int:
    return a.n * b.n * a.rank * b.rank * (a.m + a.p)


def _full_cost(a: Stack, b: Stack) -> int:
    return a.n * b.n * a.m * a.p


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """`[n, rank, n', rank']`: all inner products of columns."""
    return torch.tensordot(a, b, dims=([1], [1]))
