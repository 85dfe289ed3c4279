import pytest
import torch

from curvlens.estimate.diagonal import diagonal
from curvlens.estimate.probes import probes
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum


def test_the_errors_of_the_entries_cover_the_truth(operator, calibrated):
    calibrated(lambda seed: diagonal(operator, samples=10, seed=seed), operator.diagonal())


def naive(H, omega, i, others):
    Q, _ = torch.linalg.qr(H.apply(omega[others]).T)
    P = Q @ Q.T
    return (P @ H.matrix).diagonal() + omega[i] * (H.matrix @ omega[i] - P @ (H.matrix @ omega[i]))


def test_value_and_error_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(1)
    H = Dense(torch.randn(14, 14, dtype=torch.float64, generator=generator))  # not symmetric
    m = 5
    omega = probes(H.domain, range(m), seed=2)
    values = torch.stack([naive(H, omega, i, [j for j in range(m) if j != i]) for i in range(m)])
    covariance = torch.zeros(14, dtype=torch.float64)
    for i in range(m):
        for j in set(range(m)) - {i}:
            others = [k for k in range(m) if k not in (i, j)]
            change = values[i] - naive(H, omega, i, others)
            covariance += change * (values[j] - naive(H, omega, j, others)) / (m * (m - 1))
    result = diagonal(H, samples=m, seed=2)
    torch.testing.assert_close(result.value, values.mean(0), rtol=1e-10, atol=1e-12)
    factor = 1.141626629090954  # Student, four degrees of freedom
    own = values.var(0) / m
    error = (
        factor * (own + torch.maximum(covariance, -own / 4)).sqrt()
    )  # the covariance takes away a quarter at most
    torch.testing.assert_close(result.stderr, error, rtol=1e-9, atol=1e-12)
    assert result.products == 2 * m


def test_a_complete_range_gives_the_exact_diagonal():
    H = from_spectrum([3, 2, -1] + [0] * 30)
    result = diagonal(H, samples=8)
    torch.testing.assert_close(result.value, H.diagonal(), rtol=0, atol=1e-12)
    assert result.stderr.max() < 1e-11
    assert result.converged


def test_a_tolerance_is_met_and_a_budget_is_kept():
    H = from_spectrum(SPECTRA["semidefinite"])
    result = diagonal(H, samples=3, tol=0.01)
    assert result.converged
    assert result.stderr.norm() <= 0.01 * result.value.norm()
    poor = diagonal(H, max_products=5)
    assert (poor.samples, poor.products, poor.converged) == (2, 4, False)
    assert diagonal(H, max_products=0).value.isnan().all()
    assert "40 values" in repr(result)


def test_killed_runs_end_with_the_same_digits(resumes_exactly):
    H = from_spectrum(SPECTRA["flat"])
    resumes_exactly(lambda H, **budget: diagonal(H, samples=7, chunk=2, **budget), H)


def test_a_rectangle_is_refused():
    with pytest.raises(ValueError, match="same rows and columns"):
        diagonal(Dense(torch.zeros(2, 3)))
