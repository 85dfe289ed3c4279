from functools import lru_cache

import pytest
import torch

from curvlens.estimate import eigsh
from curvlens.estimate.density import density
from curvlens.estimate.effective import condition, effective_dimension, effective_rank, negative_fraction
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

SMALL = {
    "indefinite": [(-1) ** i * (1 + i % 3) / (1 + i) ** 1.5 for i in range(16)],
    "flat": torch.linspace(-1, 2, 16).tolist(),
    "rank-deficient": [2 ** (-i / 3) * (-1) ** (i % 3) if i < 9 else 0 for i in range(16)],
}


@lru_cache
def densities(name):
    """One a seed, for all of the quantities below."""
    H = from_spectrum(SMALL[name])
    return [density(H, seed=seed, chunk=8) for seed in range(300)]


def quantities(name):
    """What is estimated from a density, and the truth."""
    values = torch.tensor(SMALL[name], dtype=torch.float64)
    sizes = values.abs()
    negative = values < 0
    p = sizes / sizes.sum()
    return {
        "dimension": (lambda d: effective_dimension(d, 0.1), (sizes / (sizes + 0.1)).sum()),
        "rank": (effective_rank, torch.exp(-torch.special.xlogy(p, p).sum())),
        "curvature": (negative_fraction, sizes[negative].sum() / sizes.sum()),
        "count": (lambda d: negative_fraction(d, by="count"), negative.double().mean()),
    }


@pytest.mark.parametrize("quantity", list(quantities("flat")))
@pytest.mark.parametrize("name", list(SMALL))
def test_errors_cover_the_truth(name, quantity, calibrated):
    estimate, truth = quantities(name)[quantity]
    calibrated(lambda seed: estimate(densities(name)[seed]), truth)


def test_equal_eigenvalues_have_their_number_as_rank():
    H = from_spectrum([2.0] * 5 + [-2.0] * 4 + [0.0] * 3)
    found = density(H, samples=400, steps=3, chunk=400)
    rank = effective_rank(found)
    assert abs(rank.value - 9) < 4 * rank.stderr
    share = negative_fraction(found)
    assert abs(share.value - 4 / 9) < 4 * share.stderr
    # probes are random signs, so the counts of eigenvalues are estimates as well
    count = negative_fraction(found, by="count")
    assert abs(count.value - 4 / 12) < 4 * count.stderr


def test_a_density_serves_them_all_without_a_product():
    H = from_spectrum(SPECTRA["flat"])
    found = density(H, samples=3, steps=6)
    assert effective_dimension(found, 0.5).products == found.products
    with pytest.raises(TypeError, match="no settings beside a Density"):
        effective_rank(found, samples=3)


def test_condition_number_on_a_stated_subspace():
    H = from_spectrum([8, -4, 2, 1] + [0.1] * 20)
    found = condition(H, k=4, tol=1e-6)
    assert abs(found.value - 8) <= found.stderr
    assert found.stderr < 1e-4
    assert "4 eigenvectors (LM)" in repr(found)
    pairs = eigsh(H, k=2, tol=1e-8)
    given = condition(H, subspace=pairs.vectors @ torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    assert given.value == pytest.approx(2, rel=1e-10)
    assert given.products == 2
    assert "2 given vectors" in repr(given)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="positive damping"):
        effective_dimension(Dense(torch.eye(3)), 0)
    with pytest.raises(ValueError, match='"curvature" or "count"'):
        negative_fraction(Dense(torch.eye(3)), by="feeling")
