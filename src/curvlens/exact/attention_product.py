"""Products with the Hessian of attention without any matrix a token: `O(L² d)` a vector, as one pass forward and back.

The blocks' Kronecker sums cost `O(L d²)` a vector and memory; the derivative of forward and backward pass along a
direction needs neither, and gives both parts:

    forward   dq, dk, dv -> dT -> dA -> dF          (the Jacobian)
    outer     B dF -> back through the same Jacobian
    functional: what the backward pass of the fixed gradient g changes along the direction
"""

from __future__ import annotations

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
        # zeros only where a block may get nothing; each head adds to the blocks that it uses
        out = stack.new_zeros(len(stack), self.codomain.size)
        parts, results = self._by_kind(stack, self.domain), self._by_kind(out, self.codomain)
        passes = [_Pass(self.layer, head, parts) for head in self.heads]
        gradient = None
        if self.outer:
            moved = passes[0].output()
            for other in passes[1:]:
                moved = moved + other.output()
            if "out.bias" in parts:
                moved = moved + parts["out.bias"][:, None]
            gradient = self._through_loss(moved)
            if "out.bias" in results:
                results["out.bias"] += gradient.sum(1)
        for each in passes:
            each.back(gradient, self.functional, results)
        return out

    def _through_loss(self, moved: Tensor) -> Tensor:
        """`B_i dF_i`, `[K, n, o]`."""
        B = self.loss.hessian
        if B.dim() == 1:
            return B[:, None] * moved
        return (B @ moved[..., None])[..., 0]

    def _by_kind(self, stack: Tensor, blocks: Blocks) -> Parts:
        return {block.name: stack[:, blocks.ranges[block.name]].unflatten(1, block.shape) for block in blocks}


class _Pass:
    """One head along `K` directions; tangents are `[K, n, ·]`."""

    def __init__(self, layer: SelfAttention, head: Head, parts: Parts):
        self.layer, self.head = layer, head
        self.x = head.x[:, : layer.d]
        self.s = layer.scale
        self.tangents = {kind: self._tangent(kind, parts) for kind in layer.weights}
        self.dv = self._along("value")
        if head.single:
            self.dq, self.dk = self.s * self._along("query_key"), None
        else:
            self.dq, self.dk = self.s * self._along("query"), self._along("key")
        self.keys = head.keys[:, : layer.d] if head.single else head.keys
        self.dT = [self._scores(i) for i in range(len(head.rows))]
        self.dA = [rows.push(dT) for rows, dT in zip(head.rows, self.dT, strict=True)]

    def _view(self, stack: Tensor, kind: str, bias: bool) -> Tensor:
        """This head's part of a block `[K, ...]`, a view."""
        layer, h = self.layer, self.head.index
        group = layer.group(kind, h)
        if layer.stacked:
            return stack[:, group]
        if layer.heads == 1:
            return stack
        if kind == "out":
            return stack.unflatten(1, (layer.heads, -1))[:, h]
        if bias:
            return stack.unflatten(1, (layer.groups[kind], -1))[:, group]
        return stack.unflatten(2, (layer.groups[kind], -1))[:, :, group]

    def _tangent(self, kind: str, parts: Parts) -> tuple[Tensor, Tensor | None]:
        weight = self._view(parts[kind], kind, False)
        name = f"{kind}.bias"
        bias = self._view(parts[name], kind, True) if name in parts and kind != "out" else None
        return weight, bias

    def _along(self, kind: str) -> Tensor:
        weight, bias = self.tangents[kind]
        moved = self.x @ weight
        return moved if bias is None else moved + bias[:, None]

    def _grouped(self, rows: Tensor, i: int) -> Tensor:
        """Rows `[K, n, m]` of group `i` as `[K, b, L, m]`; of tokens that do not move, `[n, m]` as `[b, L, m]`."""
        x = self.head.groups.parts[i][0]
        start = self.head.groups.starts[i]
        return rows.narrow(-2, start, x.shape[0] * x.shape[1]).unflatten(-2, x.shape[:2])

    def _scores(self, i: int) -> Tensor:
        keys = self._grouped(self.keys, i)
        dT = self._grouped(self.dq, i) @ keys.mT
        if self.dk is not None:
            dT = dT + self._grouped(self.head.q, i) @ self._grouped(self.dk, i).mT
        return dT

    def output(self) -> Tensor:
        """`dF` of this head, `[K, n, o]`."""
        head = self.head
        moved = []
        for i, (A, dA) in enumerate(zip(head.A, self.dA, strict=True)):
            values, dv = self._grouped(head.values, i), self._grouped(self.dv, i)
            moved.append((dA @ values + A @ dv).flatten(1, 2))
        self.dmixed = moved[0] if len(moved) == 1 else torch.cat(moved, 1)
        if "out" not in self.layer.weights:
            return self.dmixed if head.W_O is None else self.dmixed @ head.W_O
        assert head.W_O is not None
        return self.dmixed @ head.W_O + head.mixed @ self.tangents["out"][0]

    def back(self, gradient: Tensor | None, functional: bool, results: Parts) -> None:
        """Add this head's part of the product to the blocks: along `gradient` (outer), and along the moved pass."""
        head = self.head
        dg = None
        if gradient is not None:
            dg = gradient if head.W_O is None else gradient @ head.W_O.T
        if functional and "out" in self.layer.weights:
            moved = head.g @ self.tangents["out"][0].mT
            dg = moved if dg is None else dg + moved
        values, queries, keys = [], [], []
        for i in range(len(head.rows)):
            v, q, k = self._back_group(i, dg, functional)
            values.append(v.flatten(1, 2))
            queries.append(q.flatten(1, 2))
            keys.append(k.flatten(1, 2) if k is not None else q)
        self._collect("value", values, results)
        if head.single:
            self._collect("query_key", queries, results)
        else:
            self._collect("query", queries, results)
            self._collect("key", keys, results)
        if "out" in self.layer.weights:
            target = self._view(results["out"], "out", False)
            if gradient is not None:
                target += head.mixed.T @ gradient
            if functional:
                if gradient is None:
                    self.output()
                target += self.dmixed.mT @ head.g

    def _back_group(
        self, i: int, dg: Tensor | None, functional: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head, rows, dA, dT = self.head, self.head.rows[i], self.dA[i], self.dT[i]
        values, q, k = self._grouped(head.values, i), self._grouped(head.q, i), self._grouped(self.keys, i)
        du = None if dg is None else self._grouped(dg, i) @ values.mT
        if functional:
            moved = self._grouped(head.g_value, i) @ self._grouped(self.dv, i).mT
            du = moved if du is None else du + moved
        assert du is not None
        dS = rows.back(du)
        if functional:
            dS = dS + rows.turn(head.u[i], dT)
        back_v = None if dg is None else head.A[i].mT @ self._grouped(dg, i)
        if functional:
            moved = dA.mT @ self._grouped(head.g_value, i)
            back_v = moved if back_v is None else back_v + moved
        assert back_v is not None
        back_q = dS @ k
        back_k = None
        if self.dk is not None:
            back_k = dS.mT @ q
            if functional:
                S = head.pulled[i]
                back_q = back_q + S @ self._grouped(self.dk, i)
                back_k = back_k + S.mT @ self._grouped(self.dq, i)
        return back_v, self.s * back_q, back_k

    def _collect(self, kind: str, moved: list[Tensor], results: Parts) -> None:
        rows = moved[0] if len(moved) == 1 else torch.cat(moved, 1)
        target = self._view(results[kind], kind, False)
        target += self.x.T @ rows
        if f"{kind}.bias" in results:
            target = self._view(results[f"{kind}.bias"], kind, True)
            target += rows.sum(1)
