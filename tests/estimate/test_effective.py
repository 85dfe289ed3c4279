import pytest
import torch

from curvlens.estimate import eigsh
from curvlens.estimate.density import density
from curvlens.estimate.effective import condition, effective_dimension, effective_rank, negative_fraction
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum


@pytest.fixture
def eigenvalues(operator):
    return torch.linalg.eigvalsh(operator.matrix)


def test_the_error_of_the_effective_dimension_covers_the_truth(operator, eigenvalues, calibrated):
    truth = (eigenvalues.abs() / (eigenvalues.abs() + 0.1)).sum()
    calibrated(lambda seed: effective_dimension(operator, 0.1, seed=seed, chunk=8), truth)


def test_the_error_of_the_effective_rank_covers_the_truth(operator, eigenvalues, calibrated):
    p = eigenvalues.abs() / eigenvalues.abs().sum()
    truth = torch.exp(-torch.special.xlogy(p, p).sum())
    calibrated(lambda seed: effective_rank(operator, seed=seed, chunk=8), truth)


@pytest.mark.parametrize("name", ["indefinite", "flat", "rank-deficient"])
@pytest.mark.parametrize("by", ["curvature", "count"])
def test_the_error_of_the_negative_fraction_covers_the_truth(name, by, calibrated):
    H = from_spectrum(SPECTRA[name])
    values = torch.linalg.eigvalsh(H.matrix)
    negative = values < -1e-6 * values.abs().max()
    weights = values.abs() if by == "curvature" else torch.ones(40, dtype=torch.float64)
    truth = weights[negative].sum() / weights.sum()
    calibrated(lambda seed: negative_fraction(H, by, seed=seed, chunk=8), truth)


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
