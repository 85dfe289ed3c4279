import json

import pytest
import torch

import curvlens as cl
from curvlens.estimate.probes import probes
from curvlens.scaling import criteria
from curvlens.scaling.difference import differences, shares
from curvlens.scaling.samples import Samples
from tests.scaling.lands import one_by_one, quadratic, ragged

SETTINGS = {"draws": 8, "dims": 2, "sigmas": (1e-3, 1e-2, 1e-1, 1.0)}


@pytest.fixture(scope="module")
def known():
    land, ids, labels = ragged()
    return land, Samples(land), one_by_one(land, ids, labels)


@pytest.fixture(scope="module")
def result(known):
    return cl.landscape_convergence(known[0], None, sigma=0.02, **SETTINGS)


def by_matrices(losses, weights, gradients, hessians, sigma):
    """Δ₂ in closed form from the dense matrices of all samples."""
    c = differences(gradients.T, weights)
    B = differences(hessians.permute(1, 2, 0), weights)
    a, trace = differences(losses, weights), B.diagonal().sum(1)
    return (
        (a + sigma**2 / 2 * trace).square()
        + sigma**2 * c.square().sum(0)
        + sigma**4 / 2 * B.square().sum((0, 1))
    )


@pytest.mark.parametrize("sigma", [1e-3, 0.3, 3.0])
def test_the_closed_form_in_a_subspace_is_exact(known, sigma):
    land, samples, (losses, weights, gradients, hessians) = known
    basis, _ = torch.linalg.qr(torch.randn(land.blocks.size, 3, dtype=torch.float64))
    found = criteria.in_subspace(losses, *samples.within(basis), weights, sigma)
    inside = by_matrices(losses, weights, gradients @ basis, basis.T @ hessians @ basis, sigma)
    torch.testing.assert_close(found, inside, rtol=1e-10, atol=1e-14)


def test_the_error_of_the_closed_form_covers_the_dense_matrices(known):
    land, samples, (losses, weights, gradients, hessians) = known
    sigma, hits, seeds = 0.5, 0.0, 100
    squares = criteria.gradient_differences(samples.gradients(), weights)
    expected = differences(gradients.T, weights).square().sum(0)
    torch.testing.assert_close(squares.steps, expected, rtol=1e-10, atol=1e-14)
    assert squares.largest == pytest.approx(gradients.norm(dim=1).max().item())
    truth = by_matrices(losses, weights, gradients, hessians, sigma)
    for seed in range(seeds):
        v = probes(land.blocks, range(12), seed, "gaussian", torch.float64)
        forms = torch.einsum("mp,ipq,mq->mi", v, hessians, v)
        value, error = criteria.in_full_space(losses, squares.steps, forms, weights, sigma)
        hits += ((value - truth).abs() <= error).double().mean().item()
    # one standard error: 68 %; skewed squares of 12 probes, and six numbers a seed that go together
    assert 0.55 <= hits / seeds <= 0.8


def test_sampling_meets_the_closed_form_where_the_loss_is_a_polynomial():
    """At a large σ; within five of the errors of both, at every k."""
    land = quadratic()
    found = cl.landscape_convergence(land, None, sigma=0.7, draws=400, dims=3, sigmas=(0.1, 1.0))
    for criterion in (found.delta2, found.delta2_top, found.delta2_random):
        error = (criterion.sampled_stderr.square() + criterion.quadratic_stderr.square()).sqrt()
        assert ((criterion.sampled - criterion.quadratic).abs() < 5 * error).all(), criterion.name
        assert (error < 0.5 * criterion.quadratic).all()
    assert max(*found.taylor.full, *found.taylor.top) < 1e-10  # it has no other terms
    assert found.taylor.radius(found.taylor.full) is None
    # the terms of the spread, by their own sampling: the mean square over draws of the samples' spread
    at = found.sigma
    model = found.terms.value + found.terms.slope * at**2 + found.terms.curvature * at**4
    sampled = found.moved.var(dim=1)
    assert abs(sampled.mean() - model) < 5 * sampled.std() / 400**0.5


def test_the_bound_is_never_violated(known, result):
    """At any distance, with the curvature at θ, where the losses are polynomials; and at θ for any."""
    _, _, (_, _, gradients, hessians) = known
    assert result.constants.curvature >= torch.linalg.matrix_norm(hessians, ord=2).max().item() * (1 - 1e-12)
    assert result.constants.gradient == pytest.approx(gradients.norm(dim=1).max().item())
    assert (result.changes.abs() <= result.bound()).all()
    land = quadratic()
    made = cl.landscape_convergence(land, None, **SETTINGS)
    samples = Samples(land)
    for distance in (0.01, 1.0, 100.0):
        for _ in range(20):
            step = torch.randn(land.blocks.size, dtype=torch.float64)
            moved = differences(samples.losses(distance * step / step.norm()), samples.weights)
            assert (moved.abs() <= made.bound(distance, common_minimum=True)).all()  # no loss is negative
    assert (made.bound(1.0, common_minimum=True) < made.bound(1.0)).all()


def test_without_gradients_the_theorem_s_bound_can_fail():
    """`ℓ = ±w` at w = 0: no loss and no curvature, yet the mean moves with the distance."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    x = torch.tensor([[1.0], [-1.0]]).double()
    land = cl.Landscape(model, (x, torch.zeros(2).double()), lambda out, _: out[:, 0])
    made = cl.landscape_convergence(land, None, draws=4, dims=1, sigmas=(0.1,))
    changed = differences(Samples(land).losses(torch.tensor([0.5], dtype=torch.float64)), made.weights)
    assert made.bound(0.5, common_minimum=True).item() == 0
    assert 0 < changed.abs().item() <= made.bound(0.5).item()


def test_the_order_of_data_and_batches(known, result):
    """Re-batched data gives the same result; the last mean is the landscape's."""
    land, _, (losses, weights, _, _) = known
    assert result.means[-1].item() == pytest.approx(land.value().item(), rel=1e-12)
    ids = torch.cat([ids for ids, _ in land.batches])
    labels = torch.cat([labels for _, labels in land.batches])
    again = cl.landscape_convergence(land.model, (ids, labels), "next-token", sigma=0.02, **SETTINGS)
    torch.testing.assert_close(again.delta2.quadratic, result.delta2.quadratic, rtol=1e-8, atol=0)
    torch.testing.assert_close(again.delta1.sampled, result.delta1.sampled, rtol=1e-8, atol=0)
    torch.testing.assert_close(result.bound(), 2 * losses.max() * shares(weights), rtol=1e-12, atol=0)


def test_the_taylor_polynomial_errs_at_its_order(result):
    small, larger = result.taylor.full[0], result.taylor.full[1]
    assert 60 < larger / small < 140  # ten times as far, a third-order term over a first-order increment: 100
    radius = result.taylor.radius(result.taylor.full)
    assert 1e-2 < radius < 1.0


def test_the_result_in_words_and_as_json(result, tmp_path):
    text = repr(result)
    assert "losses without a model" in text
    assert "random ones" in text
    made = json.loads(result.to_json(tmp_path / "c.json"))
    assert json.loads((tmp_path / "c.json").read_text()) == made
    assert made["samples"] == 7
    assert len(made["delta2"]["quadratic"]) == 6
    assert result.needed(1e-3).samples >= result.needed(1e-2).samples
    assert result.needed(1e-2, of="rest").samples > result.needed(1e-2).samples


def test_the_same_seed_gives_the_same_result_and_leaves_random_state_alone():
    land = quadratic()
    state = torch.random.get_rng_state()
    one, two = (cl.landscape_convergence(land, None, **SETTINGS).to_json() for _ in range(2))
    assert one == two
    assert torch.equal(state, torch.random.get_rng_state())


def test_wrong_input():
    land = quadratic()
    with pytest.raises(ValueError, match="expected a positive sigma, got 0"):
        cl.landscape_convergence(land, None, sigma=0)
    with pytest.raises(ValueError, match="expected at least 4 draws"):
        cl.landscape_convergence(land, None, draws=1)
    one = cl.Landscape(land.model, (torch.ones(1, 5).double(), torch.ones(1, 2).double()), loss="mse")
    with pytest.raises(ValueError, match="expected at least two samples with a scored token, got 1"):
        cl.landscape_convergence(one, None)
