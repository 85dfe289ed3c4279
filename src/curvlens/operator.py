"""Operator: a linear map between two spaces of blocks, known by its products.

A new operator defines its `codomain` (rows), `domain` (columns), `dtype`, `device`, `apply` for a stack of
vectors, and `_adjoint` unless it is symmetric. Everything else follows; what a structure knows better
(`block`, `dense`, `diagonal`) it overrides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.progress import Progress

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
ROOM = 2**26  # bytes that are there without asking, which would take longer than to form a small matrix

Vectors = TypeVar("Vectors", Tensor, Mapping[str, Tensor])


class Operator(ABC):
    """A linear map from vectors over `domain` to vectors over `codomain`."""

    def __init__(
        self,
        codomain: Blocks,
        domain: Blocks,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
    ):
        self.codomain, self.domain = codomain, domain
        self.dtype, self.device = dtype, torch.device(device)
        self.symmetric = symmetric

    @abstractmethod
    def apply(self, stack: Tensor) -> Tensor:
        """The products with a stack of vectors: `[K, columns] -> [K, rows]`."""

    def _adjoint(self) -> Operator:
        raise NotImplementedError(f"{type(self).__name__} defines no adjoint")

    # -- what follows

    @property
    def shape(self) -> tuple[int, int]:
        return self.codomain.size, self.domain.size

    @property
    def T(self) -> Operator:
        """The adjoint."""
        return self if self.symmetric else self._adjoint()

    def block(self, rows: str | Blocks, columns: str | Blocks | None = None) -> Operator:
        """The part with the given rows and columns: names, patterns or Blocks; one argument, its diagonal block.

        `H.block("layer.0.attn.query", "layer.0.attn.value")` maps changes of the value weights to changes of
        the gradient with respect to the query weights.
        """
        columns = rows if columns is None else columns
        rows = self.codomain.select(rows) if isinstance(rows, str) else rows
        columns = self.domain.select(columns) if isinstance(columns, str) else columns
        return self._block(rows, columns)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Restriction(self, rows, columns)

    def dense(self) -> Tensor:
        """The matrix `[rows, columns]`, by one product a column."""
        matrix = self._empty()
        for start, images in self._columns("dense matrix"):
            matrix[:, start : start + len(images)] = images.T
        return matrix

    def diagonal(self) -> Tensor:
        """The diagonal `[rows]`, exact, by one product a column; `cl.diagonal` estimates it from fewer."""
        self._require_square("diagonal")
        chunks = self._columns("diagonal")
        return torch.cat([images[:, start : start + len(images)].diagonal() for start, images in chunks])

    def trace(self) -> Tensor:
        """The trace, exact, by one product a column; `cl.trace` estimates it from fewer."""
        self._require_square("trace")
        chunks = self._columns("trace")
        parts = [images[:, start : start + len(images)].diagonal().double().sum() for start, images in chunks]
        return torch.stack(parts).sum().to(self.dtype)

    def frobenius(self) -> Tensor:
        """`‖A‖_F`, exact, by one product a column, without the matrix; `cl.frobenius` estimates it from fewer."""
        # in float64: one float32 sum of millions of squares loses digits
        parts = [images.double().norm() for _, images in self._columns("Frobenius norm")]
        return torch.stack(parts).norm().to(self.dtype)

    def _columns(self, what: str) -> Iterator[tuple[int, Tensor]]:
        """Images of the unit vectors, a chunk at a time: `(first column, [chunk, rows])`; a bar if it takes long."""
        columns = self.domain.size
        chunk = max(1, min(256, 2**27 // sum(self.shape)))  # at most a gigabyte of vectors at once
        with Progress(f"{what} of {self.shape[0]:,} x {columns:,}", columns) as progress:
            for start in range(0, columns, chunk):
                count = min(chunk, columns - start)
                unit = torch.zeros(count, columns, dtype=self.dtype, device=self.device)
                unit[torch.arange(count), torch.arange(start, start + count)] = 1
                yield start, self.apply(unit)
                progress.update(start + count)

    def _require_square(self, what: str) -> None:
        if self.codomain != self.domain:
            raise ValueError(f"expected the same rows and columns for a {what}, got shape {self.shape}")

    def _require_room(self, what: str) -> None:
        rows, columns = self.shape
        need = rows * columns * self.dtype.itemsize
        free = need if need < ROOM else free_memory(self.device)
        if need > free:
            raise MemoryError(
                f"{what} of {rows:,} x {columns:,} takes {need / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB "
                "are free; take a smaller block with .block(...), or products and estimates, which need no matrix"
            )

    def _empty(self) -> Tensor:
        """Room for the dense matrix."""
        self._require_room("the dense matrix")
        rows, columns = self.shape
        if (
            self.device.type == "cpu"
            and rows * columns * self.dtype.itemsize >= ROOM
            and self.dtype in IN_NUMPY
        ):
            # NumPy asks for huge pages: on Linux the first write to each small page takes longer than filling it
            return torch.from_numpy(np.empty(self.shape, dtype=IN_NUMPY[self.dtype]))
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __matmul__(self, other):  # type: ignore[no-untyped-def]
        """Products with a vector `[columns]`, vectors `[columns, K]`, `{name: tensor}`, or another operator.

        Names are those of blocks, of their heads, or of the model's parameters; names left out are zero. The result
        is of the same kind: a head comes back within its block.
        """
        if isinstance(other, Operator):
            return Product(self, other)
        if isinstance(other, Mapping):
            return self._apply_named(other)
        if not isinstance(other, Tensor):
            raise TypeError(
                f"expected a tensor, a dictionary of tensors or an Operator, got {type(other).__name__}"
            )
        if other.dim() not in (1, 2) or other.shape[0] != self.domain.size:
            raise ValueError(
                f"expected a vector [{self.domain.size}] or vectors [{self.domain.size}, K], "
                f"got {list(other.shape)}"
            )
        self._check(other)
        if other.dim() == 1:
            return self.apply(other[None])[0]
        return self.apply(other.T).T

    def _apply_named(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for tensor in parts.values():
            self._check(tensor)
        heads = self.domain.heads()
        if parts and all(name in self.domain or name in heads for name in parts):
            return self.codomain.split(self.apply(self.domain.join(parts)[None])[0])
        shapes = self.domain.parameters
        unknown = [name for name in parts if name not in shapes]
        if unknown or not parts:
            close = [near for name in unknown for near in self.domain.close_to(name)[:1] if near != name]
            raise KeyError(
                f"expected names of blocks ({self.domain.names[0]!r}, …) or of parameters "
                f"({', '.join(map(repr, list(shapes)[:1]))}, …), got {unknown or 'none'}"
                f"{f'; did you mean {close}?' if close else ''}"
            )
        some = next(iter(parts.values()))
        for name, tensor in parts.items():
            if tuple(tensor.shape) != tuple(shapes[name]):
                raise ValueError(
                    f"parameter {name!r}: expected shape {list(shapes[name])}, got {list(tensor.shape)}"
                )
        whole = {name: parts.get(name, some.new_zeros(())).expand(shape) for name, shape in shapes.items()}
        return self.codomain.to_parameters(self.apply(self.domain.from_parameters(whole)[None])[0])

    def _check(self, tensor: Tensor) -> None:
        if tensor.dtype != self.dtype or tensor.device != self.device:
            raise TypeError(
                f"expected {self.dtype} on {self.device}, as the operator is, got {tensor.dtype} on {tensor.device}; "
                "convert the vector with .to(...), or give the Landscape another dtype"
            )

    def __add__(self, other: Operator) -> Operator:
        return Sum(self, other) if isinstance(other, Operator) else NotImplemented

    def __sub__(self, other: Operator) -> Operator:
        return Sum(self, -1 * other) if isinstance(other, Operator) else NotImplemented

    def __mul__(self, factor: float) -> Operator:
        if isinstance(factor, Tensor) and factor.dim() == 0:
            factor = factor.item()
        return Scaled(factor, self) if isinstance(factor, (int, float)) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, factor: float) -> Operator:
        return self * (1 / factor)

    def __neg__(self) -> Operator:
        return -1 * self

    def to_scipy(self) -> LinearOperator:
        """The same map as a `scipy.sparse.linalg.LinearOperator`."""
        from scipy.sparse.linalg import LinearOperator

        def products(operator: Operator):  # type: ignore[no-untyped-def]
            def apply(x):  # type: ignore[no-untyped-def]
                columns = x.reshape(x.shape[0], -1)
                stack = torch.as_tensor(columns.T.copy(), dtype=operator.dtype, device=operator.device)
                return operator.apply(stack).T.cpu().numpy().reshape(-1, *x.shape[1:])

            return apply

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        forward, backward = products(self), products(self.T)
        return LinearOperator(
            self.shape, matvec=forward, matmat=forward, rmatvec=backward, rmatmat=backward, dtype=dtype
        )

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{type(self).__name__}[{rows:,} x {columns:,}], {self.dtype} on {self.device}"


class Sum(Operator):
    """`A + B`."""

    def __init__(self, a: Operator, b: Operator):
        _same_space(a.codomain, b.codomain, "rows")
        _same_space(a.domain, b.domain, "columns")
        _same_numbers(a, b)
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric and b.symmetric)
        self.a, self.b = a, b

    def apply(self, stack: Tensor) -> Tensor:
        return self.a.apply(stack) + self.b.apply(stack)

    def _adjoint(self) -> Operator:
        return Sum(self.a.T, self.b.T)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Sum(self.a.block(rows, columns), self.b.block(rows, columns))


class Scaled(Operator):
    """`c A` for a number `c`."""

    def __init__(self, factor: float, a: Operator):
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric)
        self.factor, self.a = factor, a

    def apply(self, stack: Tensor) -> Tensor:
        return self.factor * self.a.apply(stack)

    def _adjoint(self) -> Operator:
        return Scaled(self.factor, self.a.T)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Scaled(self.factor, self.a.block(rows, columns))


class Product(Operator):
    """`A B`: first `B`, then `A`."""

    def __init__(self, a: Operator, b: Operator, symmetric: bool = False):
        _same_space(a.domain, b.codomain, "the columns of the first and the rows of the second")
        _same_numbers(a, b)
        super().__init__(a.codomain, b.domain, a.dtype, a.device, symmetric)
        self.a, self.b = a, b

    def apply(self, stack: Tensor) -> Tensor:
        return self.a.apply(self.b.apply(stack))

    def _adjoint(self) -> Operator:
        return Product(self.b.T, self.a.T)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Product(self.a.block(rows, self.a.domain), self.b.block(self.b.codomain, columns))


class Restriction(Operator):
    """The part of an operator with the given rows and columns, by a full product: for operators that know no better."""

    def __init__(self, a: Operator, rows: Blocks, columns: Blocks):
        super().__init__(rows, columns, a.dtype, a.device, a.symmetric and rows == columns)
        self.a = a
        self._rows = a.codomain.positions(rows).to(a.device)
        self._columns_at = a.domain.positions(columns).to(a.device)

    def apply(self, stack: Tensor) -> Tensor:
        padded = stack.new_zeros(len(stack), self.a.domain.size)
        padded[:, self._columns_at] = stack
        return self.a.apply(padded)[:, self._rows]

    def _adjoint(self) -> Operator:
        return Restriction(self.a.T, self.domain, self.codomain)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Restriction(self.a, rows, columns)


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on the device."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 8 * 2**30  # no way to ask on this system: assume a small machine


def _same_space(a: Blocks, b: Blocks, what: str) -> None:
    if a.names != b.names or [x.shape for x in a] != [x.shape for x in b]:
        raise ValueError(f"expected the same blocks in {what}, got {a} and {b}")


def _same_numbers(a: Operator, b: Operator) -> None:
    if (a.dtype, a.device) != (b.dtype, b.device):
        raise TypeError(
            f"expected one dtype and device, got {a.dtype} on {a.device} and {b.dtype} on {b.device}"
        )
