"""Operators with structure: exact norm, trace and diagonal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.operator import Operator


class Dense(Operator):
    """A matrix as an operator: `Dense(A)`, over one block called "all" unless told otherwise."""

    def __init__(self, matrix: Tensor, codomain: Blocks | None = None, domain: Blocks | None = None):
        if matrix.dim() != 2:
            raise ValueError(f"expected a matrix, got shape {list(matrix.shape)}")
        rows, columns = matrix.shape
        codomain = codomain or Blocks.of({"all": (rows,)})
        domain = domain or (codomain if rows == columns else Blocks.of({"all": (columns,)}))
        if (codomain.size, domain.size) != (rows, columns):
            raise ValueError(
                f"expected a matrix {[codomain.size, domain.size]} for these blocks, got {[rows, columns]}"
            )
        symmetric = rows == columns and codomain == domain and torch.equal(matrix, matrix.T)
        super().__init__(codomain, domain, matrix.dtype, matrix.device, symmetric)
        self.matrix = matrix

    @classmethod
    def over(cls, matrix: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Dense:
        """A square matrix over named blocks: `Dense.over(A, {"query": (16, 8), "key": (16, 8)})`."""
        return cls(matrix, Blocks.of(shapes))

    def apply(self, stack: Tensor) -> Tensor:
        return stack @ self.matrix.T

    def _adjoint(self) -> Dense:
        return Dense(self.matrix.T, self.domain, self.codomain)

    def _block(self, rows: Blocks, columns: Blocks) -> Dense:
        i = self.codomain.positions(rows).to(self.device)
        j = self.domain.positions(columns).to(self.device)
        return Dense(self.matrix[i][:, j], rows, columns)

    def dense(self) -> Tensor:
        return self.matrix

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def trace(self) -> Tensor:
        return self.matrix.trace()

    def frobenius(self) -> Tensor:
        return self.matrix.norm()
