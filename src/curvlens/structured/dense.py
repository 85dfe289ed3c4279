"""A matrix, or its diagonal, as an operator."""

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

    def spectral_bound(self) -> Tensor:
        """The spectral norm itself."""
        return torch.linalg.matrix_norm(self.matrix, ord=2)

    def singular_values(self) -> Tensor:
        """All singular values, descending."""
        return torch.linalg.svdvals(self.matrix)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending."""
        if not self.symmetric:
            raise ValueError(f"expected a symmetric matrix for eigenvalues, got one that is not: {self}")
        return torch.linalg.eigvalsh(self.matrix)


class Diagonal(Operator):
    """A diagonal matrix, by its entries `[size]`."""

    def __init__(self, entries: Tensor, blocks: Blocks | None = None):
        if entries.dim() != 1:
            raise ValueError(
                f"expected the entries of a diagonal as a vector, got shape {list(entries.shape)}"
            )
        blocks = blocks or Blocks.of({"all": (len(entries),)})
        if blocks.size != len(entries):
            raise ValueError(f"expected {blocks.size} entries for these blocks, got {len(entries)}")
        super().__init__(blocks, blocks, entries.dtype, entries.device, symmetric=True)
        self.entries = entries

    def apply(self, stack: Tensor) -> Tensor:
        return stack * self.entries

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        if rows != columns:
            return super()._block(rows, columns)
        return Diagonal(self.entries[self.codomain.positions(rows).to(self.device)], rows)

    def dense(self) -> Tensor:
        self._require_room("the dense matrix")
        return torch.diag(self.entries)

    def diagonal(self) -> Tensor:
        return self.entries

    def trace(self) -> Tensor:
        return self.entries.sum()

    def frobenius(self) -> Tensor:
        return self.entries.norm()

    def spectral_bound(self) -> Tensor:
        """The spectral norm itself."""
        return self.entries.abs().max()

    def eigenvalues(self) -> Tensor:
        return self.entries.sort().values
