"""Outer-product Hessians of layers in which every weight acts token by token, as sums of Kronecker products.

If a weight enters as `u_i W`, and the output of token `i` moves by `V_iᵀ` times that, its Jacobian is
`u_iᵀ ⊗ V_iᵀ`, and for a loss that acts token by token every block of the outer part is

    H_o(W, W') = Σ_i u_i u'_iᵀ ⊗ V_i B_i V'_iᵀ.

A bias is a weight whose `u_i` is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.result import TokenLoss
from curvlens.operator import Operator
from curvlens.structured import BlockOperator, KroneckerSum
from curvlens.structured.stacks import LowRank


class Site(NamedTuple):
    """Where a weight acts: the Jacobian of token `i` by it is `u_iᵀ ⊗ V_iᵀ`."""

    u: Tensor  # [n, a]
    V: Tensor  # [n, b, o], or [b, o] where it is the same for every token

    @classmethod
    def of_bias(cls, V: Tensor, tokens: Tensor) -> Site:
        return cls(tokens.new_ones(len(tokens), 1), V)


def outer(sites: dict[str, Site], blocks: Blocks, at: TokenLoss) -> BlockOperator:
    """The outer-product Hessian over the weights at these sites; a cell is made when asked for."""

    def cell(row: str, column: str) -> Operator:
        return _outer(sites[row], sites[column], at).over(blocks.select(row), blocks.select(column))

    g = at.gradient
    return BlockOperator(cell, blocks, symmetric=True, dtype=g.dtype, device=g.device)


def _outer(x: Site, y: Site, at: TokenLoss) -> KroneckerSum:
    B = at.hessian
    if B.dim() == 1 and x.V.dim() == y.V.dim() == 2:  # one Kronecker product: a moment of the tokens ⊗ V Vᵀ
        return KroneckerSum((B[:, None] * x.u).mT @ y.u, x.V @ y.V.mT)
    left = x.V @ B if B.dim() == 3 else B[:, None, None] * x.V
    right = y.V.expand(len(x.u), *y.V.shape[-2:])
    return KroneckerSum((x.u, y.u), LowRank(left, right))


def zero(blocks: Blocks, like: Tensor) -> BlockOperator:
    """The functional part of a layer that is linear in its weights."""
    return BlockOperator({}, blocks, symmetric=True, dtype=like.dtype, device=like.device)


def identity(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)
