import math

import pytest
import torch

from curvlens.blocks import Blocks
from curvlens.estimate.density import Support, block_densities, common_support, density
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

SHAPES = {"query": (4, 3), "key": (20,), "norm": (8,)}


def test_moments_are_exact_for_every_probe(operator):
    """Quadrature with m nodes is exact up to degree 2m - 1: `v^T H^p v` for the probe itself."""
    from curvlens.estimate.probes import probes

    result = density(operator, samples=3, steps=6, seed=4)
    v = probes(operator.domain, range(3), seed=4) / 40**0.5
    image = v
    for power in range(1, 12):
        image = operator.apply(image)
        exact = (v * image).sum(1)
        torch.testing.assert_close(
            (result.weights * result.nodes**power).sum(1), exact, rtol=1e-10, atol=1e-13
        )
    assert result.fault() < 1e-13


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_errors_of_moments_cover_the_truth(operator, power, calibrated):
    truth = torch.linalg.eigvalsh(operator.matrix).pow(power).mean()
    calibrated(lambda seed: density(operator, steps=4, seed=seed, chunk=8).moment(power), truth)


@pytest.mark.parametrize("symlog", [False, True])
def test_a_density_integrates_to_one(operator, symlog):
    result = density(operator, samples=3, steps=15)
    assert torch.equal(result.weights >= 0, torch.ones_like(result.weights, dtype=torch.bool))
    torch.testing.assert_close(result.weights.sum(1), torch.ones(3, dtype=torch.float64), rtol=1e-13, atol=0)
    curve = result.curve(symlog=symlog)
    step = curve.t[1] - curve.t[0]
    assert (curve.density.sum() * step).item() == pytest.approx(1, rel=1e-12)


def test_smoothing_keeps_mean_and_adds_the_width_to_the_variance():
    nodes = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    support = Support(-1, 2, bins=4000)
    masses, x = support.masses(nodes, weights), support.eigenvalues
    mean = (weights * nodes).sum()
    assert (masses * x).sum().item() == pytest.approx(mean.item(), abs=1e-8)
    variance = (weights * (nodes - mean) ** 2).sum() + support.width**2
    bin_width = (support.edges[1] - support.edges[0]).item()
    # bins add the variance of a uniform one (Sheppard)
    assert (masses * (x - mean) ** 2).sum().item() == pytest.approx(
        variance.item() + bin_width**2 / 12, rel=1e-7
    )


def test_the_density_is_that_of_the_exact_eigenvalues(calibrated):
    H = from_spectrum(torch.linspace(-1, 2, 20).tolist())
    eigenvalues = torch.linalg.eigvalsh(H.matrix)
    support = Support(-1, 2, bins=12, relative_width=0.05)
    exact = support.masses(eigenvalues, torch.full((20,), 1 / 20, dtype=torch.float64))
    step = (support.edges[1] - support.edges[0]).item()

    def one(seed):
        curve = density(H, seed=seed, chunk=8).curve(support)

        class Result:
            value, stderr = curve.density[2:-2] * step, curve.stderr[2:-2] * step

        return Result

    calibrated(one, exact[2:-2])


def test_a_symmetric_log_axis_resolves_small_eigenvalues():
    support = Support(-1.0, 10.0, threshold=1e-3)
    x = torch.tensor([-1.0, -1e-3, 0.0, 1e-3, 10.0], dtype=torch.float64)
    t = support.coordinate(x)
    torch.testing.assert_close(t[3] - t[2], t[2] - t[1])
    assert t[4] == pytest.approx(math.asinh(1e4))
    inverse = support.threshold * torch.sinh((support.edges[1:] + support.edges[:-1]) / 2)
    torch.testing.assert_close(support.eigenvalues, inverse)


def test_invariant_subspaces_end_a_recurrence():
    H = from_spectrum([2.0] * 6 + [-1.0] * 4)
    result = density(H, samples=4, steps=9)
    assert result.counts.tolist() == [2] * 4
    assert result.complete.all()
    for nodes, weights in zip(result.nodes, result.weights, strict=True):
        assert sorted(set(nodes.round(decimals=12).tolist())) == [-1, 2]
        assert weights[2:].sum() == 0
    zero = density(Dense(torch.zeros(5, 5, dtype=torch.float64)), samples=2)
    assert zero.nodes.abs().max() == 0
    assert zero.curve().density.isfinite().all()


def test_blocks_have_the_densities_of_their_own_operators():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    together = block_densities(H, samples=3, steps=7)
    assert list(together) == list(SHAPES)
    for name in SHAPES:
        alone = density(H.block(name), samples=3, steps=7)
        torch.testing.assert_close(together[name].nodes, alone.nodes, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(together[name].weights, alone.weights, rtol=1e-9, atol=1e-14)
    assert together["key"].products == 3 * (7 + 7 + 7)


def test_decoupled_blocks_share_their_products():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    apart = torch.block_diag(*[H.block(name).matrix for name in SHAPES])
    D = Dense(apart, Blocks.of(SHAPES))
    one_by_one = block_densities(D, samples=3, steps=10)
    shared = block_densities(D, samples=3, steps=10, decoupled=True)
    for name in SHAPES:
        # the last Ritz values of a nearly complete space carry the rounding of all others
        for power in range(1, 16):
            assert shared[name].moment(power).value == pytest.approx(
                one_by_one[name].moment(power).value, rel=1e-9
            )
    assert shared["key"].products == 3 * 10
    assert one_by_one["key"].products == 3 * (10 + 10 + 8)


def test_a_budget_gives_what_it_allows():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    few = density(H, samples=4, steps=10, chunk=1, max_products=25)
    assert (few.samples, few.products, few.converged, few.stopped) == (2, 25, False, "max_products")
    partial = density(H, samples=4, steps=10, chunk=2, max_products=13)
    assert (partial.samples, partial.counts.tolist(), partial.converged) == (2, [6, 6], False)
    assert partial.fault() < 1e-13
    nothing = density(H, max_products=0)
    assert nothing.samples == 0
    assert "no spectral density" in repr(nothing)
    blocks = block_densities(H, samples=2, steps=5, max_products=14)
    assert [d.samples for d in blocks.values()] == [2, 2, 0]


def test_killed_runs_end_with_the_same_digits(resumes_exactly):
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    resumes_exactly(lambda H, **budget: density(H, samples=4, steps=5, **budget), H)

    def joined(H, **budget):
        found = block_densities(H, samples=3, steps=4, **budget)

        class Result:
            pass

        result = Result()
        for name, part in found.items():
            setattr(result, name, torch.cat([part.tridiagonal.flatten(), part.measured.flatten()]))
        return result

    resumes_exactly(joined, H)


def test_a_common_support_holds_all_nodes():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    parts = block_densities(H, samples=2, steps=5)
    support = common_support(list(parts.values()), symlog=True)
    for part in parts.values():
        assert part.nodes.min() >= support.low
        assert part.nodes.max() <= support.high
    assert "spectral density of 12 eigenvalues" in repr(parts["query"])


def test_what_has_no_spectrum_is_refused():
    with pytest.raises(ValueError, match="expected a symmetric operator"):
        density(Dense(torch.triu(torch.ones(4, 4))))
    with pytest.raises(ValueError, match="at least one sample"):
        density(Dense(torch.eye(4)), samples=0)
