"""The linear MLP of any depth, exactly: `F = x W_1 W_2 … W_D`.

With the prefix `u_i = x W_1 … W_{i−1}` and the suffix `V_i = W_{i+1} … W_D` of each token, and
`M_ij = W_{i+1} … W_{j−1}` between two matrices,

    H_o(i, j) = Σ u_i u_jᵀ ⊗ V_i B V_jᵀ,          H_f(i, i) = 0,
    H_f(i, j) = (Σ u_i (V_j g)ᵀ) ×⊗ M_ij          for i < j, crossed.

For `B = c I` the first is a single Kronecker product, `u`'s second moment ⊗ `c V_i V_jᵀ`: §2 of
Ormaniec, Dangel, Singh (ICLR 2025), after Singh, Bachmann, Hofmann (2021).
"""

from __future__ import annotations

import itertools
from functools import reduce

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent, over_tokens
from curvlens.exact.result import LossAt, Result, Tokens, numbers
from curvlens.exact.tokenwise import Site, identity, outer
from curvlens.operator import Operator
from curvlens.structured import BlockOperator, KroneckerSum


class LinearMLP(Layer):
    """`F = x W_1 … W_D`, matrices `[inputs, outputs]`, over blocks "W1" … "WD"."""

    def __init__(self, matrices: list[Tensor]):
        if not matrices or any(matrix.dim() != 2 for matrix in matrices):
            raise ValueError(
                f"expected one matrix [inputs, outputs] or more, got shapes {[list(m.shape) for m in matrices]}"
            )
        for left, right in itertools.pairwise(matrices):
            if left.shape[1] != right.shape[0]:
                raise ValueError(
                    f"expected matrices that chain, got {[list(matrix.shape) for matrix in matrices]}"
                )
        self.weights = numbers({f"W{i}": matrix for i, matrix in enumerate(matrices, 1)})

    def at(self, tokens: Tokens) -> LinearMLPJet:
        return LinearMLPJet(self, tokens.stacked)

    def _hessian(self, tokens: Tokens, loss: LossAt, with_input: bool = False) -> Result:
        """Kronecker sums over tokens; with the block "input", products of the jet instead."""
        if with_input:
            return super()._hessian(tokens, loss, with_input)
        jet = self.at(tokens)
        at = loss(jet.output)
        return Result(outer(jet.sites(), self.blocks, at), jet.functional(self.blocks, at.gradient), at)


class LinearMLPJet(Jet):
    """Derivatives of a product of matrices, layer by layer: linear in each, so only mixed second ones."""

    def __init__(self, layer: LinearMLP, X: Tensor):
        self.names, self.matrices = list(layer.weights), list(layer.weights.values())
        self.prefixes = [X]
        for matrix in self.matrices:
            self.prefixes.append(self.prefixes[-1] @ matrix)
        self.output = self.prefixes.pop()

    def between(self, i: int, j: int) -> Tensor:
        """`M_ij = W_{i+1} … W_{j−1}`, counted from 0; the identity when `j = i + 1`."""
        matrix = self.matrices[i]
        return reduce(torch.matmul, self.matrices[i + 1 : j], identity(matrix.shape[1], matrix))

    def sites(self) -> dict[str, Site]:
        """Where each matrix acts: its prefix and its suffix."""
        depth = len(self.matrices)
        return {
            name: Site(prefix, self.between(i, depth))
            for i, (name, prefix) in enumerate(zip(self.names, self.prefixes, strict=True))
        }

    def functional(self, blocks: Blocks, g: Tensor) -> BlockOperator:
        """`Σ_m g_m ∂²F_m` over the matrices: nothing on the diagonal."""
        sites = self.sites()

        def cell(row: str, column: str) -> Operator | None:
            i, j = self.names.index(row), self.names.index(column)
            if i == j:
                return None
            if i > j:
                return cell(column, row).T  # type: ignore[union-attr]
            moment = sites[row].u.mT @ (g @ sites[column].V.mT)
            made = KroneckerSum(moment, self.between(i, j), crossed=True)
            return made.over(blocks.select(row), blocks.select(column))

        return BlockOperator(cell, blocks, symmetric=True, dtype=g.dtype, device=g.device)

    def tangents(self, tangent: Tangent) -> list[Tensor]:
        """The tangents of the prefixes, and of the output last."""
        moved = [tangent["input"]]
        for name, matrix, prefix in zip(self.names, self.matrices, self.prefixes, strict=True):
            moved.append(moved[-1] @ matrix + prefix @ tangent[name])
        return moved

    def push(self, tangent: Tangent) -> Tensor:
        return self.tangents(tangent)[-1]

    def pull(self, g: Tensor) -> Tangent:
        gradient = {}
        for name, matrix, prefix in self._backwards():
            gradient[name] = over_tokens(prefix, g)
            g = g @ matrix.mT
        return {**gradient, "input": g}

    def along(self, g: Tensor) -> Bend:
        upstream = [g]
        for matrix in reversed(self.matrices):
            upstream.append(upstream[-1] @ matrix.mT)

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            *prefixes, output = self.tangents(tangent)

            def back(turn: Tensor) -> Tangent:
                moved = {}
                for (name, matrix, prefix), dot, g in zip(
                    self._backwards(), reversed(prefixes), upstream[:-1], strict=True
                ):
                    moved[name] = over_tokens(prefix, turn) + over_tokens(dot, g)
                    turn = turn @ matrix.mT + g @ tangent[name].mT
                return {**moved, "input": turn}

            return output, back

        return bend

    def _backwards(self) -> list[tuple[str, Tensor, Tensor]]:
        return list(zip(self.names, self.matrices, self.prefixes, strict=True))[::-1]
