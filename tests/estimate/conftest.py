"""Operators to estimate, and the two checks that every estimator undergoes."""

import itertools

import pytest
import torch

from curvlens.estimate import run as running
from spectra import SPECTRA, Killed, Mortal, from_spectrum


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
