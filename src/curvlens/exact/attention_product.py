"""Products with the Hessian of attention without any matrix a token: `O(L² d)` a vector, as one pass forward and back.

The blocks' Kronecker sums cost `O(L d²)` a vector and memory; the derivative of forward and backward pass along a
direction needs neither, and gives both parts:

    forward   dq, dk, dv -> dT -> dA -> dF          (the Jacobian)
    outer     B dF -> back through the same Jacobian
    functional: what the backward pass of the fixed gradient g changes along the direction
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_head import Head
from curvlens.exact.result import TokenLoss
from curvlens.operator import Operator
from curvlens.structured import BlockOperator
from curvlens.structured.grid import Cell
from curvlens.structured.stacks import CHUNK

Parts = dict[str, Tensor]


class AttentionOperator(BlockOperator):
    """A part of the Hessian: cells as Kronecker sums, products with all blocks at once by passes over the tokens."""

    def __init__(
        self,
        cells: Cell,
        layer: SelfAttention,
        heads: list[Head],
        loss: TokenLoss,
        outer: bool,
        functional: bool,
    ):
        x = heads[0].x
        super().__init__(cells, layer.blocks, symmetric=True, dtype=x.dtype, device=x.device)
        self.layer, self.heads, self.loss = layer, heads, loss
        self.outer, self.functional = outer, functional

    def __add__(self, other: Operator) -> Operator:
        made = super().__add__(other)
        parts = isinstance(other, AttentionOperator) and other.heads is self.heads
        if not parts or not isinstance(made, BlockOperator):
            return made
        assert isinstance(other, AttentionOperator)
        if (self.outer and other.outer) or (self.functional and other.functional):
            return made
        outer, functional = self.outer or other.outer, self.functional or other.functional
        return AttentionOperator(made.cell, self.layer, self.heads, self.loss, outer, functional)

    def apply(self, stack: Tensor) -> Tensor:
        longest = max(A.numel() for A in self.heads[0].A)
        step = max(1, CHUNK // max(1, longest, self.heads[0].x.numel()))
        if len(stack) <= step:
            return self._apply(stack)
        return torch.cat([self._apply(part) for part in stack.split(step)])

    def _apply(self, stack: Tensor) -> Tensor:
        parts = self._by_kind(stack, self.domain)
        passes = [_Pass(self.layer, head, parts) for head in self.heads]
        gradient = None
        if self.outer:
            moved = passes[0].output()
            for other in passes[1:]:
                moved = moved + other.output()
            if "out.bias" in parts:
                moved = moved + parts["out.bias"][:, None]
            gradient = self._through_loss(moved)
        found = [each.back(gradient, self.functional) for each in passes]
        if gradient is not None and "out.bias" in parts:
            found[0]["out.bias"] = gradient.sum(1)
        return self._assembled(found, stack)

    def _assembled(self, found: list[Parts], stack: Tensor) -> Tensor:
        """The product `[K, rows]` from what every head adds to the blocks that it uses."""
        names = self.codomain.names
        if len(found) == 1 and not self.layer.stacked and all(name in found[0] for name in names):
            return torch.cat([found[0][name].flatten(1) for name in names], dim=1)
        out = stack.new_zeros(len(stack), self.codomain.size)
        results = self._by_kind(out, self.codomain)
        for head, parts in zip(self.heads, found, strict=True):
            for name, part in parts.items():
                kind, target = name.removesuffix(".bias"), results[name]
                if name != "out.bias":  # which belongs to no head
                    target = view_of(self.layer, target, kind, head.index, bias=kind != name)
                target += part
        return out

    def _through_loss(self, moved: Tensor) -> Tensor:
        """`B_i dF_i`, `[K, n, o]`."""
        B = self.loss.hessian
        if B.dim() == 1:
            return B[:, None] * moved
        return (B @ moved[..., None])[..., 0]

    def _by_kind(self, stack: Tensor, blocks: Blocks) -> Parts:
        return {block.name: stack[:, blocks.ranges[block.name]].unflatten(1, block.shape) for block in blocks}


class Fixed(NamedTuple):
    """What one head needs of a group of sequences for any direction, `[b, L, ·]`."""

    values: Tensor
    keys: Tensor  # s x W_K
    queries: Tensor  # s x W_Q
    gradient: Tensor  # W_O g
    scores: Tensor  # the gradient of the scores, times s
    weights: Tensor  # third_weights


def fixed(head: Head) -> list[Fixed]:
    """One a group; kept with the head, since every product needs them."""
    if head.fixed is None:
        s, split = head.layer.scale, head.groups.split
        keys = s * (head.keys[:, : head.layer.d] if head.single else head.keys)
        rows = zip(head.rows, head.u, head.pulled, strict=True)
        parts = zip(split(head.values), split(keys), split(head.q), split(head.g_value), rows, strict=True)
        head.fixed = [
            Fixed(v, k, q, g, s * pulled, moments.third_weights(u))
            for v, k, q, g, (moments, u, pulled) in parts
        ]
    return head.fixed


class _Pass:
    """One head along `K` directions; tangents are `[K, n, ·]`, those of groups `[K, b, L, ·]`."""

    def __init__(self, layer: SelfAttention, head: Head, parts: Parts):
        self.layer, self.head, self.parts = layer, head, parts
        self.fixed = fixed(head)
        self.x = head.x[:, : layer.d] if layer.augmented else head.x
        self.dv = self._grouped(self._along("value"))
        self.dq = self._grouped(self._along("query_key" if head.single else "query"))
        self.dk = None if head.single else self._grouped(self._along("key"))
        self.dT = [self._scores(i, part) for i, part in enumerate(self.fixed)]
        self.dA = [rows.push(dT) for rows, dT in zip(head.rows, self.dT, strict=True)]

    def _part(self, kind: str) -> Tensor:
        """The direction of this head's weight `[K, d, k]`, a view."""
        return view_of(self.layer, self.parts[kind], kind, self.head.index, bias=False)

    def _along(self, kind: str) -> Tensor:
        moved = self.x @ self._part(kind)
        name = f"{kind}.bias"
        if name in self.parts:
            moved = moved + view_of(self.layer, self.parts[name], kind, self.head.index, bias=True)[:, None]
        return moved

    def _grouped(self, rows: Tensor) -> list[Tensor]:
        """`[K, n, m]` as `[K, b, L, m]` for every group."""
        sizes = [x.shape[:2] for x, _ in self.head.groups.parts]
        if len(sizes) == 1:
            return [rows.unflatten(1, sizes[0])]
        pieces = rows.split([b * L for b, L in sizes], dim=1)
        return [piece.unflatten(1, size) for piece, size in zip(pieces, sizes, strict=True)]

    def _scores(self, i: int, part: Fixed) -> Tensor:
        dT = self.dq[i] @ part.keys.mT
        return dT if self.dk is None else dT.add_(part.queries @ self.dk[i].mT)

    @cached_property
    def dmixed(self) -> Tensor:
        """The direction of `A X W_V`, `[K, n, v]`."""
        moved = [
            (dA @ part.values).add_(A @ dv)
            for A, dA, part, dv in zip(self.head.A, self.dA, self.fixed, self.dv, strict=True)
        ]
        return _stacked(moved)

    def output(self) -> Tensor:
        """`dF` of this head, `[K, n, o]`."""
        head = self.head
        moved = self.dmixed if head.W_O is None else self.dmixed @ head.W_O
        return moved + head.mixed @ self._part("out") if "out" in self.layer.weights else moved

    def back(self, gradient: Tensor | None, functional: bool) -> Parts:
        """This head's part of the product for each kind of weight, and for `kind.bias` the sums over tokens."""
        head, layer = self.head, self.layer
        dg = None
        if gradient is not None:
            dg = gradient if head.W_O is None else gradient @ head.W_O.T
        if functional and "out" in layer.weights:
            moved = head.g @ self._part("out").mT
            dg = moved if dg is None else dg + moved
        dgs = None if dg is None else self._grouped(dg)
        groups = [
            self._back(i, part, None if dgs is None else dgs[i], functional)
            for i, part in enumerate(self.fixed)
        ]
        kinds = ("value", "query_key") if head.single else ("value", "query", "key")
        found = {}
        for kind, received in zip(kinds, zip(*groups, strict=True), strict=True):
            rows = _stacked(list(received))
            found[kind] = self.x.T @ rows
            if f"{kind}.bias" in self.parts:
                found[f"{kind}.bias"] = rows.sum(1)
        if "out" in layer.weights:
            found["out"] = head.g.new_zeros(()) if gradient is None else head.mixed.T @ gradient
            if functional:
                found["out"] = found["out"] + self.dmixed.mT @ head.g
        return found

    def _back(self, i: int, part: Fixed, dg: Tensor | None, functional: bool) -> tuple[Tensor, ...]:
        """What the rows of values, queries and keys receive, `[K, b, L, ·]` each."""
        rows, A = self.head.rows[i], self.head.A[i]
        if not functional:
            assert dg is not None
            dS = rows.back(dg @ part.values.mT)
            received = A.mT @ dg, dS @ part.keys
            return received if self.dk is None else (*received, dS.mT @ part.queries)
        du = part.gradient @ self.dv[i].mT
        dv = self.dA[i].mT @ part.gradient
        if dg is not None:
            du.add_(dg @ part.values.mT)
            dv.add_(A.mT @ dg)
        dS = rows.back_and_turn(du, self.dT[i], part.weights)
        dq = dS @ part.keys
        if self.dk is None:
            return dv, dq
        dq.add_(part.scores @ self.dk[i])
        return dv, dq, (dS.mT @ part.queries).add_(part.scores.mT @ self.dq[i])


def _stacked(groups: list[Tensor]) -> Tensor:
    """`[K, b, L, m]` of every group as `[K, n, m]`."""
    return groups[0].flatten(1, 2) if len(groups) == 1 else torch.cat([x.flatten(1, 2) for x in groups], 1)


def view_of(layer: SelfAttention, stack: Tensor, kind: str, h: int, bias: bool) -> Tensor:
    """The part of a block `[K, ...]` that query head `h` uses, a view."""
    group = layer.group(kind, h)
    if layer.stacked:
        return stack[:, group]
    if layer.heads == 1:
        return stack
    dim = 1 if kind == "out" or bias else 2
    return stack.unflatten(dim, (layer.groups[kind], -1)).select(dim, group)
