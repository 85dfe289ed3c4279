"""Operators whose spectrum is prescribed, and interruption at a prescribed product."""

import itertools

import pytest
import torch

from curvlens.estimate import run as running
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


@pytest.fixture
def spectrum():
    return from_spectrum


@pytest.fixture(params=list(SPECTRA))
def operator(request):
    return from_spectrum(SPECTRA[request.param])


@pytest.fixture(params=[name for name in SPECTRA if name.startswith("semi")])
def semidefinite(request):
    return from_spectrum(SPECTRA[request.param])


@pytest.fixture
def every_step_saved(monkeypatch):
    monkeypatch.setattr(running, "SAVE_INTERVAL", 0)


@pytest.fixture
def resumes_exactly(every_step_saved, tmp_path):
    """Kill `estimate(H, checkpoint=...)` at each of its calls in turn; each time, finish it and compare."""

    counter = itertools.count()

    def check(estimate, H, points=range(1, 1000)):
        whole = estimate(H)
        for point in points:
            path = tmp_path / f"state{next(counter)}"
            mortal = Mortal(H, point)
            try:
                estimate(mortal, checkpoint=path)
            except Killed:
                assert path.exists() or point <= 2
            else:
                assert point > 3
                return
            before = path.stat().st_size if path.exists() else 0
            finished = estimate(Mortal(H, None), checkpoint=path)
            for name, value in vars(whole).items():
                other = getattr(finished, name)
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value.nan_to_num(), other.nan_to_num()), (point, name)
                else:
                    assert value == other, (point, name, before)

    return check


def covers(estimate, truth, seeds=300):
    """How often `estimate(seed)` ± its error covers the truth."""
    hits = 0.0
    for seed in range(seeds):
        result = estimate(seed)
        error = torch.as_tensor(result.value, dtype=torch.float64) - truth
        hits += (error.abs() <= torch.as_tensor(result.stderr)).double().mean().item()
    return hits / seeds


@pytest.fixture
def calibrated():
    def check(estimate, truth):
        # one standard error: 68 %; with 300 seeds the share itself has a standard deviation of 2.7 %
        share = covers(estimate, truth)
        assert 0.60 <= share <= 0.76, share

    return check
