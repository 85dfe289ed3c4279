"""The vector algebra of the estimators: all that they reduce over the entries of a vector.

A stack is `[K, n]`, one vector a row. Where vectors are spread over processes, these are the functions that
sum over the shards; the small results are the same everywhere. Small results are float64 on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Blocks

PIECE = (
    1 << 14
)  # entries that are summed in the vectors' dtype: long float32 sums lose digits, 2e-4 at 4.5 million

KEPT = 0.7  # of a length: a projection that leaves less is repeated


def _pieces(a: Tensor) -> list[Tensor]:
    """A stack as views `[q, K, PIECE]` and `[1, K, rest]`."""
    whole = a.shape[1] // PIECE * PIECE
    return [a[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1), a[:, whole:][None]]


def gram(a: Tensor, b: Tensor) -> Tensor:
    """All inner products `[Ka, Kb]` of two stacks, float64 on the CPU; summed in float64 over pieces."""
    parts = [(x @ y.mT).double().sum(0) for x, y in zip(_pieces(a), _pieces(b), strict=True)]
    return (parts[0] + parts[1]).cpu()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner products `[K]` of the rows of two stacks, float64 on the CPU."""
    return (
        torch.stack([gram(x[None], y[None])[0, 0] for x, y in zip(a, b, strict=True)]) if len(a) else _none()
    )


def norm(a: Tensor) -> Tensor:
    """The Euclidean norms `[K]` of the rows, float64 on the CPU."""
    parts = [torch.linalg.vector_norm(x, dim=-1).double().square().sum(0) for x in _pieces(a)]
    return (parts[0] + parts[1]).sqrt().cpu()


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.float64)


def combine(coefficients: Tensor, a: Tensor) -> Tensor:
    """Linear combinations `coefficients @ a` of the rows of a stack: `[J, K] x [K, n] -> [J, n]`."""
    return coefficients.to(a.device, a.dtype) @ a


def combine_in_place(coefficients: Tensor, a: Tensor, width: int = 1 << 20) -> None:
    """The first J rows of `a` become `coefficients @ a`, a range of entries at a time: no second stack."""
    coefficients = coefficients.to(a.device, a.dtype)
    for start in range(0, a.shape[1], width):
        part = a[:, start : start + width]
        part[: len(coefficients)] = coefficients @ part


def subtract(a: Tensor, coefficients: Tensor, basis: Tensor) -> None:
    """`a -= coefficients @ basis`, in place."""
    a.addmm_(coefficients.to(a.device, a.dtype), basis, alpha=-1)


def block_dots(a: Tensor, b: Tensor, blocks: Blocks) -> Tensor:
    """The inner products of the rows, block by block: `[K, B]`, float64 on the CPU."""
    spans = blocks.ranges.values()
    return torch.stack([dot(a[:, span], b[:, span]) for span in spans], dim=1)


def project_out(a: Tensor, basis: Tensor, passes: int = 2) -> Tensor:
    """Make the rows of `a` orthogonal to those of an orthonormal basis, in place; the coefficients `[Ka, Kb]`.

    Gram-Schmidt done twice is orthogonal to rounding (Giraud et al. 2005).
    """
    total = torch.zeros(len(a), len(basis), dtype=torch.float64)
    for _ in range(passes if len(basis) else 0):
        coefficients = gram(a, basis)
        subtract(a, coefficients, basis)
        total += coefficients
    return total


def extend(basis: Tensor, a: Tensor, tolerance: float) -> tuple[Tensor, Tensor, list[int]]:
    """Orthonormalise the rows of `a` against a basis and among themselves, one at a time.

    Returns the new rows `Q`, the coefficients `R` with `a = R [basis; Q]`, and which rows of `a` were new: a row
    that loses all but `tolerance` of its length lies in the span already. Projection is repeated while it takes
    much of the length (Daniel, Gragg, Kaufman, Stewart 1976): one that takes little has lost no digits.
    """
    fresh = a.new_empty(a.shape)
    kept: list[int] = []
    coefficients = torch.zeros(len(a), len(basis) + len(a), dtype=torch.float64)
    for i in range(len(a)):
        row = a[i : i + 1].clone()
        length = rest = norm(row).item()
        known = slice(len(basis), len(basis) + len(kept))
        for _ in range(3):
            coefficients[i, : len(basis)] += project_out(row, basis, passes=1)[0]
            coefficients[i, known] += project_out(row, fresh[: len(kept)], passes=1)[0]
            before, rest = rest, norm(row).item()
            if rest > KEPT * before or rest <= tolerance * length:
                break
        if rest <= tolerance * length or rest == 0 or length == 0:
            continue
        coefficients[i, len(basis) + len(kept)] = rest
        fresh[len(kept)] = row[0] / rest
        kept.append(i)
    return fresh[: len(kept)], coefficients[:, : len(basis) + len(kept)], kept
