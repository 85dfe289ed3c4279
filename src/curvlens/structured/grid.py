"""BlockOperator: a grid of operators over named blocks, one cell a pair of blocks or heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from curvlens.blocks import Block, Blocks
from curvlens.operator import Operator
from curvlens.structured.kronecker import KroneckerSum

Cell = Callable[[str, str], "Operator | None"]


class BlockOperator(Operator):
    """The operator with the given cells; a cell left out, or None, is zero.

    `cells` maps pairs `(row, column)` of names of blocks, or of heads of blocks that have heads, to operators, or
    makes them when first asked for. A symmetric operator needs the cells on and above the diagonal only, the
    others are their adjoints. Norms, traces and eigenvalues are exact where the cells know theirs.
    """

    def __init__(
        self,
        cells: Mapping[tuple[str, str], Operator] | Cell,
        codomain: Blocks,
        domain: Blocks | None = None,
        symmetric: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        domain = codomain if domain is None else domain
        if symmetric and codomain != domain:
            raise ValueError(
                f"expected the same rows and columns of a symmetric operator, got {codomain} and {domain}"
            )
        if isinstance(cells, Mapping):
            some = next(iter(cells.values()), None)
            dtype = dtype or (some.dtype if some else None)
            device = device or (some.device if some else "cpu")
            self._check_cells(cells, codomain, domain)
            made = dict(cells)
            self._make: Cell = lambda row, column: made.get((row, column))
        else:
            self._make = cells
        if dtype is None:
            raise ValueError("expected a dtype for cells that are made when asked for, or at least one cell")
        super().__init__(codomain, domain, dtype, device or "cpu", symmetric)
        self._made: dict[tuple[str, str], Operator | None] = {}

    @staticmethod
    def _check_cells(cells: Mapping[tuple[str, str], Operator], codomain: Blocks, domain: Blocks) -> None:
        rows, columns = _places(codomain), _places(domain)
        for (row, column), cell in cells.items():
            if row not in rows or column not in columns:
                raise KeyError(
                    f"expected cells named by {list(rows)} and {list(columns)}, got {(row, column)}"
                )
            shape = (rows[row].size, columns[column].size)
            if cell.shape != shape:
                raise ValueError(f"cell {(row, column)}: expected shape {shape}, got {cell.shape}")

    @cached_property
    def _places(self) -> tuple[dict[str, _Place], dict[str, _Place]]:
        rows = _places(self.codomain)
        return rows, rows if self.domain is self.codomain else _places(self.domain)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self._places[0])} if self.symmetric else {}

    # -- cells

    def cell(self, row: str, column: str) -> Operator | None:
        """The operator at a pair of blocks or heads, or None where it is zero."""
        if self._order and self._order.get(row, -1) > self._order.get(column, math.inf):
            mirrored = self.cell(column, row)
            return None if mirrored is None else mirrored.T
        if (row, column) not in self._made:
            self._made[row, column] = self._make(row, column)
        return self._made[row, column]

    def cells(self) -> Iterator[tuple[str, str, Operator]]:
        """All cells that are not zero."""
        for row in self._places[0]:
            for column in self._places[1]:
                cell = self.cell(row, column)
                if cell is not None:
                    yield row, column, cell

    def _own(self) -> Iterator[tuple[str, str, Operator, bool]]:
        """Cells on and above the diagonal of a symmetric operator, all of another; and whether each has a mirror."""
        for i, row in enumerate(self._places[0]):
            for j, column in enumerate(self._places[1]):
                if self.symmetric and j < i:
                    continue
                cell = self.cell(row, column)
                if cell is not None:
                    yield row, column, cell, self.symmetric and j > i

    # -- as an operator

    def apply(self, stack: Tensor) -> Tensor:
        out = stack.new_zeros(len(stack), self.codomain.size)
        rows, columns = self._places
        parts = {name: place.cut(stack).flatten(1) for name, place in columns.items()}
        for row, column, cell, mirrored in self._own():
            target = rows[row].cut(out)
            target += cell.apply(parts[column]).view(target.shape)
            if mirrored:
                target = rows[column].cut(out)
                target += cell.T.apply(parts[row]).view(target.shape)
        return out

    def _adjoint(self) -> BlockOperator:
        def cell(row: str, column: str) -> Operator | None:
            made = self.cell(column, row)
            return None if made is None else made.T

        return BlockOperator(cell, self.domain, self.codomain, dtype=self.dtype, device=self.device)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        own_rows, own_columns = _places(rows), _places(columns)
        known = all(name in self._places[0] for name in own_rows)
        known = known and all(name in self._places[1] for name in own_columns)
        if not known:
            return super()._block(rows, columns)
        if len(own_rows) == len(own_columns) == 1:
            cell = self.cell(next(iter(own_rows)), next(iter(own_columns)))
            if isinstance(cell, KroneckerSum):
                return cell.over(rows, columns)
            if cell is not None:
                return cell
        symmetric = self.symmetric and rows == columns
        return BlockOperator(self.cell, rows, columns, symmetric, self.dtype, self.device)

    def __add__(self, other: Operator) -> Operator:
        """Cell by cell, so that what the cells know of themselves is not lost."""
        same = isinstance(other, BlockOperator) and (self.codomain, self.domain) == (
            other.codomain,
            other.domain,
        )
        if not same:
            return super().__add__(other)
        assert isinstance(other, BlockOperator)

        def cell(row: str, column: str) -> Operator | None:
            a, b = self.cell(row, column), other.cell(row, column)
            return b if a is None else a if b is None else a + b

        symmetric = self.symmetric and other.symmetric
        return BlockOperator(cell, self.codomain, self.domain, symmetric, self.dtype, self.device)

    def __mul__(self, factor: float) -> Operator:
        if not isinstance(factor, (int, float)):
            return super().__mul__(factor)

        def cell(row: str, column: str) -> Operator | None:
            made = self.cell(row, column)
            return None if made is None else made * factor

        return BlockOperator(cell, self.codomain, self.domain, self.symmetric, self.dtype, self.device)

    __rmul__ = __mul__

    def __sub__(self, other: Operator) -> Operator:
        return self + (-1) * other if isinstance(other, Operator) else NotImplemented

    # -- the matrix

    def dense(self) -> Tensor:
        """The matrix; each cell is written straight to its place."""
        matrix = self._empty()
        self.write(matrix)
        return matrix

    def write(self, matrix: Tensor) -> None:
        """Write the matrix into `matrix` `[rows, columns]`."""
        rows, columns = self._places
        strips = {column: place.cut(matrix) for column, place in columns.items()}
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                if self.symmetric and j < i:
                    continue
                target = rows[row].cut(strips[column], 0)
                mirror = rows[column].cut(strips[row], 0) if self.symmetric and j > i else None
                _write(self.cell(row, column), target, mirror)

    def diagonal(self) -> Tensor:
        if self.codomain != self.domain:
            raise ValueError(f"expected the same rows and columns for a diagonal, got shape {self.shape}")
        out = torch.zeros(1, self.codomain.size, dtype=self.dtype, device=self.device)
        for name, place in self._places[0].items():
            cell = self.cell(name, name)
            if cell is not None:
                target = place.cut(out)
                target.copy_(cell.diagonal().view(target.shape))
        return out[0]

    # -- exact numbers

    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def frobenius(self) -> Tensor:
        """`‖H‖_F` from the norms of the cells."""
        norms = [torch.zeros((), dtype=self.dtype, device=self.device)]
        for _, _, cell, mirrored in self._own():
            norms += [frobenius(cell)] * (2 if mirrored else 1)
        whole = torch.stack(norms)
        largest = whole.max()  # squares of large norms would overflow
        return largest * (whole / largest).norm() if largest > 0 else largest

    def block_norms(self) -> Tensor:
        """`‖H_ab‖_F` of every pair of blocks, `[rows, columns]` in the order of the blocks."""
        rows, columns = list(self.codomain), list(self.domain)
        norms = torch.zeros(len(rows), len(columns), dtype=self.dtype, device=self.device)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                if self.symmetric and j < i:
                    norms[i, j] = norms[j, i]
                else:
                    norms[i, j] = frobenius(self._block(Blocks([row]), Blocks([column])))
        return norms

    def spectral_bound(self) -> Tensor:
        """An upper bound of the spectral norm: that of the matrix of the cells' bounds."""
        rows, columns = self._places
        bounds = torch.zeros(len(rows), len(columns), dtype=self.dtype, device=self.device)
        i, j = {name: k for k, name in enumerate(rows)}, {name: k for k, name in enumerate(columns)}
        for row, column, cell, mirrored in self._own():
            bounds[i[row], j[column]] = _spectral_bound(cell)
            if mirrored:
                bounds[i[column], j[row]] = bounds[i[row], j[column]]
        return torch.linalg.matrix_norm(bounds, ord=2)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending, where the structure gives them.

        Where no two cells share rows or columns: those of the cells on the diagonal, the pairs `± σ(C)` of
        `[[0, C], [Cᵀ, 0]]`, and zeros.
        """
        if not self.symmetric:
            raise ValueError("expected a symmetric operator for eigenvalues")
        own = list(self._own())
        used = [name for row, column, *_ in own for name in {row, column}]
        if len(set(used)) < len(used):
            raise ValueError(
                "expected cells that share no rows or columns for exact eigenvalues, as of a block-diagonal operator, "
                f"got {len(own)} cells that do; take torch.linalg.eigvalsh(H.dense()) or curvlens.eigsh(H)"
            )
        found = []
        for _, _, cell, mirrored in own:
            if mirrored:
                sigma = _spectrum(cell, "singular_values")
                found += [sigma, -sigma]
            else:
                found.append(_spectrum(cell, "eigenvalues"))
        found.append(torch.zeros(self.codomain.size, dtype=self.dtype, device=self.device))
        return torch.cat(found)[: self.codomain.size].sort().values


class _Place:
    """Where a cell's block lies in a flat vector of blocks."""

    def __init__(self, span: slice, block: Block, head: int | None):
        self.span, self.block, self.head = span, block, head
        whole = span.stop - span.start
        self.size = whole if head is None else whole // (block.heads or (1, 0))[0]

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The cell's part of one dimension of a tensor as two, `(m, r)`; a view."""
        shape = self.block.shape or (1,)
        part = tensor.narrow(dim, self.span.start, self.span.stop - self.span.start).unflatten(dim, shape)
        if self.head is not None:
            count, across = self.block.heads or (1, 0)
            part = part.unflatten(dim + across, (count, -1)).select(dim + across, self.head)
        if len(shape) == 1:
            return part.unsqueeze(dim)
        return part if len(shape) == 2 else part.flatten(dim, dim + len(shape) - 2)


def _places(blocks: Blocks) -> dict[str, _Place]:
    """The place of every cell: of each head of a block that has heads, of the whole block otherwise."""
    places = {}
    for block in blocks:
        span, heads = blocks.ranges[block.name], block.split_heads()
        for i, head in enumerate(heads):
            places[head.name] = _Place(span, block, None if block.heads is None else i)
    return places


def _write(cell: Operator | None, target: Tensor, mirror: Tensor | None) -> None:
    """Write a cell into its place `[m, r, p, q]` and its adjoint into the place across the diagonal."""
    if isinstance(cell, KroneckerSum):
        shape = (*cell.rows, *cell.columns)
        cell.write(target.view(shape), None if mirror is None else mirror.view(shape[2:] + shape[:2]))
        return
    if cell is None:
        target.zero_()
    else:
        target.copy_(cell.dense().view(target.shape))
    if mirror is not None:
        mirror.copy_(target.permute(2, 3, 0, 1))


def frobenius(cell: Operator) -> Tensor:
    """`‖A‖_F` as the operator knows it, or of its dense matrix."""
    if hasattr(cell, "frobenius"):
        return cell.frobenius()
    return cell.dense().norm()


def _spectrum(cell: Operator, name: str) -> Tensor:
    """The eigenvalues or singular values of a cell, from its structure."""
    if not hasattr(cell, name):
        raise ValueError(
            f"expected cells that know their {name.replace('_', ' ')}, got {cell}; take "
            "torch.linalg.eigvalsh(H.dense())"
        )
    return getattr(cell, name)()


def _spectral_bound(cell: Operator) -> Tensor:
    if hasattr(cell, "spectral_bound"):
        return cell.spectral_bound()
    return frobenius(cell)
