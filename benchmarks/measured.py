"""What the benchmarks of the estimates count and check: products where they are made, results by the true operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from curvlens.estimate import BlockMap, probes
from curvlens.operator import Operator

Row = tuple[
    str, int, Callable[[], str]
]  # who, products, and what came out, asked for after the clock has stopped


class Counted(Operator):
    """An operator that counts its products, those of its blocks included."""

    def __init__(self, a: Operator, count: list[int] | None = None):
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric)
        self.a = a
        self.count = [0] if count is None else count

    def apply(self, stack: Tensor) -> Tensor:
        self.count[0] += len(stack)
        return self.a.apply(stack)

    def _block(self, rows, columns):  # type: ignore[no-untyped-def]
        return Counted(self.a.block(rows, columns), self.count)

    def _adjoint(self) -> Operator:
        return Counted(self.a.T, self.count)


def arpack(H: Counted) -> tuple[Tensor, Tensor]:
    """SciPy's ten pairs, vectors as rows, from the vector that `curvlens.eigsh` starts from."""
    start = probes(H.domain, [0], kind="gaussian", dtype=H.dtype)[0].numpy()
    values, columns = eigsh(H.to_scipy(), k=10, which="LM", tol=1e-3, v0=start)
    return torch.from_numpy(values), torch.from_numpy(columns.T.copy()).to(H.device, H.dtype)


def checked(H: Operator, values: Tensor, vectors: Tensor) -> str:
    """How good pairs are, by products of the true operator that are not their cost."""
    rows = vectors / vectors.norm(dim=1, keepdim=True)
    values = values.to(rows)
    residuals = (H.apply(rows) - values[:, None] * rows).norm(dim=1) / values.abs()
    top = ", ".join(f"{value:.5g}" for value in sorted(values.tolist(), key=abs, reverse=True)[:3])
    good = int((residuals <= 1e-3).sum())
    return f"{good} of {len(values)} to 1e-3, worst residual {residuals.max().item():.1e}; {top}"


def worst(found: BlockMap) -> str:
    error = (found.stderr / found.value).max().item()
    return (
        f"{found.value.numel()} blocks, worst relative error {error:.1%}, {found.samples} probes or more each"
    )
