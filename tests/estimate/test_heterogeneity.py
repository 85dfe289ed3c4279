import math

import pytest
import torch

from curvlens.estimate import block_densities, heterogeneity
from curvlens.estimate.density import Support
from curvlens.estimate.heterogeneity import divergence
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

SHAPES = {"query": (2, 3), "key": (7,), "norm": (5,)}
SPECTRUM = [3 * math.cos(i) * (0.9**i) + 0.5 for i in range(18)]
SUPPORT = Support(-6, 6, bins=40, relative_width=0.05)


def exact_masses(H):
    rows = []
    for name in SHAPES:
        values = torch.linalg.eigvalsh(H.block(name).matrix)
        rows.append(SUPPORT.masses(values, torch.full_like(values, 1 / len(values))))
    return torch.stack(rows)


def test_divergence_of_known_masses():
    p, q = torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5]], dtype=torch.float64)
    assert divergence(p, p) == 0
    assert divergence(p, q).item() == pytest.approx(math.log(2), rel=1e-15)
    r = torch.tensor([0.5, 0.5, 0], dtype=torch.float64)
    m = (p + r) / 2
    expected = (math.log(1 / m[0]) + 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])) / 2
    assert divergence(p, r).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("measure", ["divergence", "distance"])
def test_a_block_is_like_itself_and_the_matrix_symmetric(measure):
    H = from_spectrum(SPECTRUM, shapes=SHAPES)
    result = heterogeneity(H, measure)
    assert torch.equal(result.value.diagonal(), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(result.value, result.value.T)
    assert (result.value >= 0).all()
    ceiling = math.log(2) if measure == "divergence" else math.sqrt(math.log(2))
    assert (result.value <= ceiling).all()
    assert measure in result.what
    assert "asinh" in result.what
    assert result["query", "key"].value == result.value[0, 1]


@pytest.mark.parametrize("measure", ["divergence", "distance"])
def test_errors_cover_the_truth(measure, calibrated):
    H = from_spectrum(SPECTRUM, shapes=SHAPES)
    exact = exact_masses(H)
    truth = torch.stack([divergence(row, exact) for row in exact])
    truth = truth.sqrt() if measure == "distance" else truth
    above = torch.triu(torch.ones(3, 3), 1).bool()

    def one(seed):
        found = heterogeneity(H, measure, SUPPORT, samples=8, seed=seed, chunk=8)

        class Result:
            value, stderr = found.value[above], found.stderr[above]

        return Result

    calibrated(one, truth[above])


@pytest.mark.parametrize("measure", ["norm", "trace"])
def test_errors_of_ratios_cover_the_truth(measure, calibrated):
    H = from_spectrum([abs(x) + 0.5 for x in SPECTRUM], shapes=SHAPES)
    power = 1 if measure == "trace" else 2
    means = torch.stack([torch.linalg.eigvalsh(H.block(n).matrix).pow(power).mean() for n in SHAPES])
    means = means.sqrt() if measure == "norm" else means
    off = ~torch.eye(3).bool()

    def one(seed):
        found = heterogeneity(H, measure, steps=4, seed=seed, chunk=8)

        class Result:
            value, stderr = found.value[off], found.stderr[off]

        return Result

    calibrated(one, (means[:, None] / means)[off])


def test_scaled_copies_have_known_ratios():
    matrix = from_spectrum(SPECTRA["flat"]).matrix
    H = Dense.over(torch.block_diag(matrix, 3 * matrix), {"a": (40,), "b": (40,)})
    top = heterogeneity(H, "top", samples=2)
    assert top["b", "a"].value == pytest.approx(3, rel=1e-12)
    assert top["a", "a"].value == 1


def test_densities_that_exist_cost_nothing():
    H = from_spectrum(SPECTRUM, shapes=SHAPES)
    parts = block_densities(H, samples=3, steps=6)
    for measure in ("divergence", "norm", "trace", "top"):
        assert heterogeneity(parts, measure).products == parts["key"].products


def test_an_exhausted_budget_is_no_exception():
    H = from_spectrum(SPECTRUM, shapes=SHAPES)
    result = heterogeneity(H, max_products=3)
    assert not result.converged
    assert result.value.isnan().all()


def test_an_unknown_measure_is_refused():
    with pytest.raises(ValueError, match="expected a measure of divergence"):
        heterogeneity(Dense(torch.eye(3)), "likeness")
