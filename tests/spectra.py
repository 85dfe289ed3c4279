"""Operators whose spectrum is prescribed, and one that dies at a prescribed product."""

import torch

from curvlens.operator import Operator
from curvlens.structured import Dense


class Killed(BaseException):
    """Stands for a kill: nothing in the estimators may catch it."""


class Mortal(Operator):
    """An operator that dies at its `last`-th call."""

    def __init__(self, a, last):
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric)
        self.a, self.last, self.calls = a, last, 0

    def apply(self, stack):
        self.calls += 1
        if self.calls == self.last:
            raise Killed
        return self.a.apply(stack)

    def _block(self, rows, columns):
        part = Mortal(self.a.block(rows, columns), None)
        part.apply = lambda stack: self._part(part.a, stack)
        return part

    def _part(self, a, stack):
        self.calls += 1
        if self.calls == self.last:
            raise Killed
        return a.apply(stack)


def from_spectrum(eigenvalues, seed=0, shapes=None):
    values = torch.as_tensor(list(eigenvalues), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(
        torch.randn(len(values), len(values), dtype=torch.float64, generator=generator)
    )
    matrix = (basis * values) @ basis.T
    matrix = (matrix + matrix.T) / 2
    return Dense(matrix) if shapes is None else Dense.over(matrix, shapes)


SPECTRA = {
    "indefinite": [(-1) ** i * (1 + i % 3) / (1 + i) ** 1.5 for i in range(40)],
    "flat": torch.linspace(-1, 2, 40).tolist(),
    "rank-deficient": [2 ** (-i / 3) * (-1) ** (i % 3) if i < 20 else 0 for i in range(40)],
    "semidefinite": [1 / (1 + i) ** 2 for i in range(40)],
    "semidefinite of rank 20": [2 ** (-i / 3) if i < 20 else 0 for i in range(40)],
}
