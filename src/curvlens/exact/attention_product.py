"""Products with the Hessian of attention without any matrix a token: `O(L² d)` a vector, as one pass forward and back.

The blocks' Kronecker sums cost `O(L d²)` a vector and memory; the derivative of forward and backward pass along a
direction needs neither, and gives both parts:

    forward   dq, dk, dv -> dT -> dA -> dF          (the Jacobian)
    outer     B dF -> back through the same Jacobian
    functional: what the backward pass of the fixed gradient g changes along the direction
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_head import Head
from curvlens.operator import Operator
from curvlens.structured import BlockOperator
from curvlens.structured.stacks import CHUNK

if TYPE_CHECKING:
    from curvlens.exact.attention_hessian import AttentionCurvature

Parts = dict[str, Tensor]


class AttentionOperator(BlockOperator):
    """A part of the Hessian: cells as Kronecker sums, products with all blocks at once by passes over the tokens."""

    def __init__(self, curvature: AttentionCurvature, outer: bool, functional: bool):
        layer, heads = curvature.layer, curvature.heads
        x, cells = heads[0].x, curvature.cells(outer, functional)
        super().__init__(cells, layer.blocks, symmetric=True, dtype=x.dtype, device=x.device)
        self.curvature, self.layer, self.heads, self.loss = curvature, layer, heads, curvature.loss
        self.outer, self.functional = outer, functional

    def __add__(self, other: Operator) -> Operator:
        if not isinstance(other, AttentionOperator) or other.curvature is not self.curvature:
            return super().__add__(other)
        if (self.outer and other.outer) or (self.functional and other.functional):
            return super().__add__(other)
        return AttentionOperator(
            self.curvature, self.outer or other.outer, self.functional or other.functional
        )

    def apply(self, stack: Tensor) -> Tensor:
        longest = max(A.numel() for A in self.heads[0].A)
        step = max(1, CHUNK // max(1, longest, self.heads[0].x.numel()))
        if len(stack) <= step:
            return self._apply(stack)
        return torch.cat([self._apply(part) for part in stack.split(step)])

    def _apply(self, stack: Tensor) -> Tensor:
        joint, parts = None, {}
        if self._alike and self.functional:
            joint = stack.unflatten(1, (3, *self.domain[0].shape))
        else:
            parts = self._by_kind(stack, self.domain)
        passes = [_Pass(self.layer, head, parts, joint) for head in self.heads]
        gradient = None
        if self.outer:
            moved = passes[0].output()
            for other in passes[1:]:
                moved = moved + other.output()
            if "out.bias" in parts:
                moved = moved + parts["out.bias"][:, None]
            gradient = self._through_loss(moved)
        if joint is not None:
            return passes[0].back_jointly(gradient).flatten(1)
        found = [each.back(gradient, self.functional) for each in passes]
        if gradient is not None and "out.bias" in parts:
            found[0]["out.bias"] = gradient.sum(1)
        return self._assembled(found, stack)

    @cached_property
    def _alike(self) -> bool:
        """One head whose query, key and value matrices, and nothing else, have one shape: all take one product."""
        shapes = {block.shape for block in self.domain}
        names = self.domain.names == self.codomain.names == ("query", "key", "value")
        return names and len(shapes) == 1 and len(self.heads) == 1 and not self.layer.stacked

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
    """What one head needs of a group of sequences for any direction: `[L, ·]` of one sequence, `[b, L, ·]` of more."""

    values: Tensor
    keys: Tensor  # s x W_K
    queries: Tensor  # s x W_Q
    gradient: Tensor  # W_O g
    weights: Tensor  # third_weights


def fixed(head: Head) -> list[Fixed]:
    """One a group; kept with the head, since every product needs them."""
    if head.fixed is None:
        s, split = head.layer.scale, head.groups.split
        keys = s * (head.keys[:, : head.layer.d] if head.single else head.keys)
        groups = zip(split(head.values), split(keys), split(head.q), split(head.g_value), strict=True)
        head.fixed = []
        for group, weights in zip(groups, head.third_weights, strict=True):
            v, k, q, g = (x[0] if len(x) == 1 else x for x in group)
            head.fixed.append(Fixed(v, k, q, g, weights))
    return head.fixed


class _Pass:
    """One head along `K` directions; tangents are `[K, n, ·]`, those of groups `[K, L, ·]` or `[K, b, L, ·]`.

    Where a sum over tokens can come before a direction it does: `A X dW = M1 dW`, `Xᵀ (∂A/∂T)ᵀu X dW = Β dW`.
    """

    def __init__(self, layer: SelfAttention, head: Head, parts: Parts, joint: Tensor | None):
        self.layer, self.head, self.parts = layer, head, parts
        self.fixed = fixed(head)
        self.kinds = ("query_key", "value") if head.single else ("query", "key", "value")
        if joint is None:
            self.along = {kind: self._direction(kind) for kind in self.kinds}
            moved = {kind: head.x @ along for kind, along in self.along.items()}
        else:
            self.along = dict(zip(self.kinds, joint.unbind(1), strict=True))
            moved = dict(zip(self.kinds, (head.x @ joint).unbind(1), strict=True))
        self.dv = self._grouped(moved["value"])
        self.dq = self._grouped(moved["query_key" if head.single else "query"])
        self.dk = None if head.single else self._grouped(moved["key"])
        self.dT = [self._scores(i, part) for i, part in enumerate(self.fixed)]
        self.dA = [rows.push(dT) for rows, dT in zip(head.rows, self.dT, strict=True)]

    def _part(self, kind: str) -> Tensor:
        """The direction of this head's weight `[K, d, k]`, a view."""
        return view_of(self.layer, self.parts[kind], kind, self.head.index, bias=False)

    def _direction(self, kind: str) -> Tensor:
        """The same with that of the bias as its last row, as the tokens have a constant entry."""
        part = self._part(kind)
        if not self.layer.augmented:
            return part
        name = f"{kind}.bias"
        if name not in self.parts:
            return torch.nn.functional.pad(part, (0, 0, 0, 1))
        bias = view_of(self.layer, self.parts[name], kind, self.head.index, bias=True)
        return torch.cat([part, bias[:, None]], dim=1)

    def _grouped(self, rows: Tensor) -> list[Tensor]:
        """`[K, n, m]` as `[K, L, m]` for every group, with several sequences `[K, b, L, m]`."""
        sizes = [x.shape[:2] for x, _ in self.head.groups.parts]
        pieces = rows.split([b * L for b, L in sizes], dim=1) if len(sizes) > 1 else [rows]
        return [
            piece if size[0] == 1 else piece.unflatten(1, size)
            for piece, size in zip(pieces, sizes, strict=True)
        ]

    def _scores(self, i: int, part: Fixed) -> Tensor:
        dT = self.dq[i] @ part.keys.mT
        return dT if self.dk is None else _add_product(dT, part.queries, self.dk[i].mT)

    @cached_property
    def dmixed(self) -> Tensor:
        """The direction of `A X W_V`, `[K, n, v]`."""
        moved = _stacked([dA @ part.values for dA, part in zip(self.dA, self.fixed, strict=True)])
        return _add_product(moved, self.head.M1, self.along["value"])

    def output(self) -> Tensor:
        """`dF` of this head, `[K, n, o]`."""
        head = self.head
        moved = self.dmixed if head.W_O is None else self.dmixed @ head.W_O
        return moved + head.mixed @ self._part("out") if "out" in self.layer.weights else moved

    def back(self, gradient: Tensor | None, functional: bool) -> Parts:
        """This head's part of the product for each kind of weight, and for `kind.bias`."""
        head, layer = self.head, self.layer
        dg = self._received(gradient, functional)
        rows = self._rows(dg, functional)
        found = {}
        for kind in self.kinds:
            whole = head.x.T @ rows[kind] if kind in rows else torch.zeros_like(self.along[kind])
            self._finish(kind, whole, dg, functional)
            found[kind] = whole[:, : layer.d]
            if f"{kind}.bias" in self.parts:
                found[f"{kind}.bias"] = whole[:, layer.d]
        if "out" in layer.weights:
            found["out"] = head.g.new_zeros(()) if gradient is None else head.mixed.T @ gradient
            if functional:
                found["out"] = found["out"] + self.dmixed.mT @ head.g
        return found

    def back_jointly(self, gradient: Tensor | None) -> Tensor:
        """The product with query, key and value of one shape, `[K, 3, d, k]`, the functional part included."""
        dg = self._received(gradient, True)
        rows = self._rows(dg, True)
        found = self.head.x.T @ torch.stack([rows[kind] for kind in self.kinds], dim=1)
        for kind, part in zip(self.kinds, found.unbind(1), strict=True):
            self._finish(kind, part, dg, True)
        return found

    def _received(self, gradient: Tensor | None, functional: bool) -> Tensor | None:
        """What the mixed values receive, `[K, n, v]`, as the fixed gradient aside from `dF` and `dW_O`."""
        dg = None
        if gradient is not None:
            dg = gradient if self.head.W_O is None else gradient @ self.head.W_O.T
        if functional and "out" in self.layer.weights:
            moved = self.head.g @ self._part("out").mT
            dg = moved if dg is None else dg + moved
        return dg

    def _finish(self, kind: str, found: Tensor, dg: Tensor | None, functional: bool) -> None:
        """Add to `xᵀ rows` what needs no pass over the tokens."""
        if kind == "value" and dg is not None:
            _add_product(found, self.head.M1.T, dg)
        elif kind != "value" and functional and self.dk is not None:
            B = self.layer.scale * self.head.B
            across = (B, self.along["key"]) if kind == "query" else (B.T, self.along["query"])
            _add_product(found, *across)

    def _rows(self, dg: Tensor | None, functional: bool) -> Parts:
        """What the rows of queries, keys and, by the functional part, values receive, `[K, n, ·]` each."""
        dgs = [None] * len(self.fixed) if dg is None else self._grouped(dg)
        groups = [self._group(i, part, dgs[i], functional) for i, part in enumerate(self.fixed)]
        return {kind: _stacked([group[kind] for group in groups]) for kind in groups[0]}

    def _group(self, i: int, part: Fixed, dg: Tensor | None, functional: bool) -> Parts:
        rows, query = self.head.rows[i], "query_key" if self.head.single else "query"
        if functional:
            du = part.gradient @ self.dv[i].mT
            du = du if dg is None else _add_product(du, dg, part.values.mT)
            dS = rows.back_and_turn(du, self.dT[i], part.weights)
        else:
            assert dg is not None
            dS = rows.back(dg @ part.values.mT)
        received = {query: dS @ part.keys}
        if self.dk is not None:
            received["key"] = dS.mT @ part.queries
        if functional:
            received["value"] = self.dA[i].mT @ part.gradient
        return received


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`to += left right`, in place."""
    if to.dim() != 3:
        return to.add_(left @ right)
    size = len(to)
    left = left if left.dim() == 3 else left.expand(size, *left.shape)
    right = right if right.dim() == 3 else right.expand(size, *right.shape)
    return to.baddbmm_(left, right)


def _stacked(groups: list[Tensor]) -> Tensor:
    """`[K, L, m]` or `[K, b, L, m]` of every group as `[K, n, m]`."""
    rows = [x if x.dim() == 3 else x.flatten(1, 2) for x in groups]
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def view_of(layer: SelfAttention, stack: Tensor, kind: str, h: int, bias: bool) -> Tensor:
    """The part of a block `[K, ...]` that query head `h` uses, a view."""
    group = layer.group(kind, h)
    if layer.stacked:
        return stack[:, group]
    if layer.heads == 1:
        return stack
    dim = 1 if kind == "out" or bias else 2
    return stack.unflatten(dim, (layer.groups[kind], -1)).select(dim, group)
