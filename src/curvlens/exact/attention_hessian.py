"""The Hessian of self-attention, all blocks and heads: Theorems 3.1 and 3.2 of paper A, with the key blocks it omits.

Each block is a sum of Kronecker products over tokens. With `X` tokens, `q` queries, `N = M2 W_V`, `P = W_Kᵀ N`,
`w = W_V g`, `h = M2 w`, `s = 1/√d_K` (index of the token dropped), and KS×, the crossed sum, of `structured.kronecker`:

    block | outer H_o                | functional H_f
    Q, Q  | s² KS(X Xᵀ, P B Pᵀ)      | s² KS(X Xᵀ, W_Kᵀ M3[w] W_K)
    K, K  | s² KS(N B Nᵀ, q qᵀ)      | s² KS(M3[w], q qᵀ)
    V, V  | KS(M1 M1ᵀ, B)            | 0
    Q, K  | s² KS×(X qᵀ, P B Nᵀ)     | s² KS×(X qᵀ, W_Kᵀ M3[w]) + s (Σ X hᵀ) ⊗ I
    V, Q  | s KS(M1 Xᵀ, B Pᵀ)        | s KS×(M2 W_K, g Xᵀ)
    V, K  | s KS×(M1 qᵀ, B Nᵀ)       | s KS(M2, g qᵀ)

An output matrix takes `B` to `W_O B W_Oᵀ` and `g` to `W_O g`; biases are a constant entry of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_head import Groups, Head
from curvlens.exact.attention_product import AttentionOperator
from curvlens.exact.result import LossAt, Result, TokenLoss, Tokens
from curvlens.structured import BlockOperator, KroneckerSum
from curvlens.structured.grid import Cell
from curvlens.structured.stacks import CHUNK, Full, LowRank, Stack
from curvlens.structured.terms import Term

KINDS = ("query_key", "query", "key", "value", "out")


class Jacobian(NamedTuple):
    """`∂F_i/∂W` of one head: a vector for one side of `W` and a matrix onto the head's values for the other.

    The vector stands at the rows of `W` (query, value, out), or at its columns (key).
    """

    head: int
    vector: Tensor  # [n, m], or [n, k] of a key
    matrix: Tensor | None  # [n, r, v], or [n, d, v] of a key; None: the identity
    out: Tensor | None  # [v, o]: from values to outputs; None: the identity
    is_key: bool


@dataclass(frozen=True)
class AttentionResult(Result):
    """The Hessian of an attention layer: its split at the output, and the one at the scores `T` (Remark D.1)."""

    curvature: AttentionCurvature

    @cached_property
    def t_functional(self) -> BlockOperator:
        """`s [[0, Β ⊗ I], [Βᵀ ⊗ I, 0]]` over query and key: what two matrices for one add. Eigenvalues in pairs."""
        return self._over_scores(self.curvature.score_functional)

    @cached_property
    def t_outer(self) -> BlockOperator:
        """`s² V_ᵀ U V_`: the query-key part of the Hessian without `t_functional`."""

        return self._over_scores(self.curvature.cells(outer=True, functional=True, at_scores=False))

    def _over_scores(self, cell: Cell) -> BlockOperator:
        blocks = self.outer.codomain
        kinds = ("query", "key", "query_key", "query.bias", "key.bias")
        chosen = Blocks(block for block in blocks if block.name in kinds)
        return BlockOperator(cell, chosen, symmetric=True, dtype=self.outer.dtype, device=self.outer.device)


def attention_hessian(layer: SelfAttention, tokens: Tokens, loss: LossAt) -> AttentionResult:
    """Forward pass, loss, and the two parts of the Hessian, whose blocks are made when first asked for."""
    groups = Groups(layer, tokens)
    heads = [Head(layer, h, groups) for h in range(layer.heads)]
    F = heads[0].output()
    for head in heads[1:]:
        F = F + head.output()
    if "out" in layer.biases:
        F = F + layer.biases["out"]
    _check_finite(F, heads)
    at = loss(F)
    for head in heads:
        head.see(at.gradient)
    curvature = AttentionCurvature(layer, heads, at)

    outer = AttentionOperator(curvature, outer=True, functional=False)
    functional = AttentionOperator(curvature, outer=False, functional=True)
    return AttentionResult(outer, functional, at, curvature)


def _check_finite(F: Tensor, heads: list[Head]) -> None:
    if F.sum().isfinite() or F.isfinite().all():  # the sum is quick, but may overflow
        return
    row = int((~F.isfinite()).any(1).nonzero()[0])
    largest = max(float(part.abs().max()) for head in heads for part in (head.x, head.q, head.keys))
    raise ValueError(
        f"expected finite outputs, got {F[row].tolist()[:3]} at token {row}, from tokens, queries and keys of up to "
        f"{largest:.1e} in {F.dtype}: scores are their products; scale the tokens or weights down"
    )


class AttentionCurvature:
    """The cells of both parts, one a pair of blocks or heads."""

    def __init__(self, layer: SelfAttention, heads: list[Head], loss: TokenLoss):
        self.layer, self.heads, self.loss = layer, heads, loss
        self.names = layer.cells
        self.blocks = {block.name: Blocks([block]) for block in layer.blocks.heads()}
        self._jacobians: dict[str, list[Jacobian]] = {}
        self._stacks: dict[tuple[object, ...], Stack] = {}
        self._products: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def cells(self, outer: bool, functional: bool, at_scores: bool = True) -> Cell:
        """The cells of one part or of both; see `functional` for `at_scores`."""

        def cell(row: str, column: str) -> KroneckerSum | None:
            terms = self.outer(row, column) if outer else []
            terms = terms + self.functional(row, column, at_scores) if functional else terms
            return self._cell(row, column, terms)

        return cell

    # -- outer-product part

    def outer(self, row: str, column: str) -> list[Term]:
        """`Σ_i J_iᵀ B_i J_i'`, over all pairs of heads that share the blocks."""
        for name in (row, column):
            if name not in self._jacobians:
                self._jacobians[name] = self._jacobians_of(name)
        return [self._outer_term(a, b) for a in self._jacobians[row] for b in self._jacobians[column]]

    def _jacobians_of(self, name: str) -> list[Jacobian]:
        kind, number, is_bias = self.names[name]
        if kind == "out":
            head = self.heads[number]
            vector = torch.ones_like(head.x[:, :1]) if is_bias else head.mixed
            return [Jacobian(number, vector, None, None, False)]
        part = self._rows(is_bias)
        made = []
        for head in self._heads_of(kind, number):
            if kind == "value":
                made.append(Jacobian(head.index, head.M1[:, part], None, head.W_O, False))
            elif kind == "key":
                made.append(Jacobian(head.index, head.q, head.N[:, part], head.W_O, True))
            else:
                made.append(
                    Jacobian(head.index, head.x[:, part], self._trimmed(kind, head.P), head.W_O, False)
                )
        return made

    def _trimmed(self, kind: str, P: Tensor) -> Tensor:
        """Without the constant entry, which the single matrix has in its rows (queries) only."""
        return P[:, : self.layer.d] if kind == "query_key" else P

    def _outer_term(self, a: Jacobian, b: Jacobian) -> Term:
        if a.is_key and not b.is_key:
            return self._outer_term(b, a).T
        if a.is_key:
            return Term(self._sandwich(a, b), self._pair(a.vector, b.vector), False)
        if b.is_key:
            return Term(self._pair(a.vector, b.vector), self._sandwich(a, b), True)
        if a.matrix is None and b.matrix is None and self.loss.hessian.dim() == 1:
            weighted = (self.loss.hessian[:, None] * a.vector).T @ b.vector
            return Term(Full(weighted[None]), Full(self._between(a, b)[None]), False)
        return Term(self._pair(a.vector, b.vector), self._sandwich(a, b), False)

    def _sandwich(self, a: Jacobian, b: Jacobian) -> Stack:
        """`matrix_a (out_a B outᵀ_b) matrixᵀ_b` of every token."""
        plain = a.out is None and b.out is None and self.loss.hessian.dim() == 1
        if plain and a.matrix is None and b.matrix is not None:
            return Full(self._weighted(b.matrix).mT)
        left = self._left(a, b)
        if b.matrix is None:
            return Full(left)
        if a.is_key and b.is_key and left.shape[0] * left.shape[1] * b.matrix.shape[1] > CHUNK:
            return LowRank(left, b.matrix)
        return Full(left @ b.matrix.mT)

    def _left(self, a: Jacobian, b: Jacobian) -> Tensor:
        """`matrix_a (out_a B outᵀ_b)`, `[n, r, v_b]`."""
        B = self.loss.hessian
        if B.dim() == 3:
            middle = B if a.out is None else a.out @ B
            middle = middle if b.out is None else middle @ b.out.T
            return middle if a.matrix is None else a.matrix @ middle
        if a.matrix is None:
            return B[:, None, None] * self._between(a, b)
        left = self._weighted(a.matrix)
        return left if a.out is None and b.out is None else left @ self._between(a, b)

    def _between(self, a: Jacobian, b: Jacobian) -> Tensor:
        """`out_a outᵀ_b`, `[v_a, v_b]`."""
        if a.out is not None and b.out is not None:
            return a.out @ b.out.T
        if a.out is not None:
            return a.out
        if b.out is not None:
            return b.out.T
        return torch.eye(self.loss.gradient.shape[1], dtype=a.vector.dtype, device=a.vector.device)

    # -- functional part

    def functional(self, row: str, column: str, at_scores: bool = True) -> list[Term]:
        """`Σ_i ∂²(g_i·F_i)`, zero between heads; without `at_scores`, less the part that `T` curves (Remark D.1)."""
        (kind, number, is_bias), (other, number2, is_bias2) = self.names[row], self.names[column]
        if KINDS.index(kind) > KINDS.index(other):
            return [term.T for term in self.functional(column, row, at_scores)]
        rows, columns = self._rows(is_bias), self._rows(is_bias2)
        if (is_bias and kind == "out") or (is_bias2 and other == "out"):
            return []  # the output is linear in its bias
        shared = [h for h in self._heads_of(kind, number) if h in self._heads_of(other, number2)]
        make = {
            ("query", "query"): self._query_query,
            ("query_key", "query_key"): self._query_query,
            ("key", "key"): self._key_key,
            ("query", "value"): self._query_value,
            ("query_key", "value"): self._query_value,
            ("key", "value"): self._key_value,
            ("query", "out"): self._query_out,
            ("query_key", "out"): self._query_out,
            ("key", "out"): self._key_out,
            ("value", "out"): self._value_out,
        }
        terms: list[Term] = []
        for head in shared:
            if (kind, other) == ("query", "key"):
                terms += self._query_key(head, rows, columns)
                terms += self._score_terms(head, rows, columns) if at_scores else []
            elif (kind, other) in make:
                terms += make[kind, other](head, rows, columns)
        return terms

    def score_functional(self, row: str, column: str) -> KroneckerSum | None:
        """The part of the functional Hessian that the product `W_Q W_Kᵀ` curves, one cell of `t_functional`."""
        (kind, number, is_bias), (other, number2, is_bias2) = self.names[row], self.names[column]
        if (kind, other) == ("key", "query"):
            mirrored = self.score_functional(column, row)
            return None if mirrored is None else self._over(mirrored.T, row, column)
        terms: list[Term] = []
        if (kind, other) == ("query", "key"):
            for head in self._heads_of(kind, number):
                if head in self._heads_of(other, number2):
                    terms += self._score_terms(head, self._rows(is_bias), self._rows(is_bias2))
        return self._cell(row, column, terms)

    def _query_query(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        if head.single:
            d = self.layer.d
            third = (self.layer.scale**2 * head.M3)[:, :d, :d]
        else:
            third = head.KM3K
        return [Term(self._pair(head.x[:, rows], head.x[:, columns]), Full(third), False)]

    def _key_key(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        queries = self._pair(head.q, head.q)
        if not head.expand:
            return [Term(Full(head.M3[:, rows, columns]), queries, False)]
        return [Term(a.part(rows, columns), b, False) for a, b in head.spread_third(head.q, head.q)]

    def _query_key(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        return [Term(self._pair(head.x[:, rows], head.q), Full(head.KM3[:, :, columns]), True)]

    def _score_terms(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        size = head.q.shape[1]
        identity = self.layer.scale * torch.eye(size, dtype=head.q.dtype, device=head.q.device)
        return [Term(Full(head.B[None, rows, columns]), Full(identity[None]), False)]

    def _query_value(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        second = self._single_columns(head, head.M2K[:, columns])
        return [Term(Full(second), LowRank(head.g_value, head.x[:, rows]), True).T]

    def _key_value(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        if not head.expand:
            return [Term(Full(head.M2[:, columns, rows]), LowRank(head.g_value, head.q), False).T]
        spread = head.spread_second(head.g_value, head.q)
        return [Term(a.part(columns, rows), b, False).T for a, b in spread]

    def _query_out(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        second = self._single_columns(head, head.P.mT)
        return [Term(Full(second), LowRank(head.g, head.x[:, rows]), True).T]

    def _key_out(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        return [Term(Full(head.N[:, rows].mT), LowRank(head.g, head.q), False).T]

    def _value_out(self, head: Head, rows: slice, columns: slice) -> list[Term]:
        identity = torch.eye(head.g_value.shape[1], dtype=head.x.dtype, device=head.x.device)
        first = head.g.T @ head.M1[:, rows]
        return [Term(Full(identity[None]), Full(first[None]), True).T]

    def _single_columns(self, head: Head, second: Tensor) -> Tensor:
        return second[..., : self.layer.d] if head.single else second

    # -- shared

    def _heads_of(self, kind: str, number: int) -> list[Head]:
        """The query heads that use head `number` of a weight."""
        return [head for head in self.heads if self.layer.group(kind, head.index) == number]

    def _rows(self, is_bias: bool) -> slice:
        """The entries of a token that a weight, or a bias, meets."""
        if not self.layer.augmented:
            return slice(None)
        return slice(self.layer.d, None) if is_bias else slice(0, self.layer.d)

    def _weighted(self, matrix: Tensor) -> Tensor:
        """`B_i matrix_i` for multiples of the identity, made once for all cells."""
        key = (matrix.data_ptr(), matrix.shape, matrix.stride())
        if key not in self._products:
            # the matrix is kept too, so that no other can take its address
            self._products[key] = matrix, self.loss.hessian[:, None, None] * matrix
        return self._products[key][1]

    def _pair(self, left: Tensor, right: Tensor) -> Stack:
        """The stack of products `left_i right_iᵀ`; the same object for the same vectors, so that sums are joined."""
        key = tuple((x.data_ptr(), x.shape, x.stride()) for x in (left, right))
        if key not in self._stacks:
            if left.data_ptr() == right.data_ptr() and left.shape == right.shape:
                right = left
            self._stacks[key] = LowRank(left, right)
        return self._stacks[key]

    def _cell(self, row: str, column: str, terms: list[Term]) -> KroneckerSum | None:
        if not terms:
            return None
        return KroneckerSum.of(terms, self.blocks[row], self.blocks[column])

    def _over(self, operator: object, row: str, column: str) -> KroneckerSum:
        assert isinstance(operator, KroneckerSum)
        return operator.over(self.blocks[row], self.blocks[column])
