import copy
import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import curvlens as cl
from curvlens.training.predict import Step, predict_loss
from models import MODELS


@pytest.fixture(scope="module", params=["gpt2", "own_gpt"])
def land(request):
    model, batch = MODELS[request.param]()
    return cl.Landscape(model.double(), batch, dtype=torch.float64)


def direction(land, seed=0):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(land.blocks.size, dtype=torch.float64, generator=generator)
    return v / v.norm()


def test_the_terms_are_those_of_the_dense_hessian(land):
    v = 1e-2 * direction(land)
    made = predict_loss(land, v, radius=False)
    assert made.first == pytest.approx((land.gradient() @ v).item(), rel=1e-12)
    assert made.second == pytest.approx(0.5 * (v @ cl.hessian(land).dense() @ v).item(), rel=1e-9)
    assert made.predicted[1] == made.first + made.second
    assert made.curvature == pytest.approx(1e4 * 2 * made.second, rel=1e-12)


def test_the_true_change_is_that_of_a_moved_model(land):
    v = 0.1 * direction(land)
    made = predict_loss(land, v, radius=False)
    moved = copy.deepcopy(land.model)
    with torch.no_grad():
        for name, p in land.blocks.to_parameters(v).items():
            moved.get_parameter(name).add_(p)
    there = cl.Landscape(moved, land.batches, dtype=torch.float64).value().item()
    assert made.change == pytest.approx(there - land.value().item(), abs=1e-13)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_errors_shrink_at_their_order(land, seed):
    """Halving the step quarters the first error and makes an eighth of the second; what is left is the next order."""
    v = direction(land, seed)
    errors = [predict_loss(land, t * v, radius=False).errors for t in (4e-3, 2e-3, 1e-3)]
    for larger, smaller in pairwise(errors):
        assert math.log2(larger[0] / smaller[0]) == pytest.approx(2, abs=0.1)
        assert math.log2(larger[1] / smaller[1]) == pytest.approx(3, abs=0.1)


def test_the_radius_is_where_the_error_passes_the_tolerance(land):
    v = -0.05 * land.gradient()
    made = predict_loss(land, v, tolerance=0.05)
    for degree, radius in enumerate(made.radii):

        def share(t, degree=degree):
            again = predict_loss(land, t * v, radius=False)
            return again.errors[degree] / (abs(again.first) + abs(again.second))

        assert share(radius) > 0.05 > share(0.95 * radius)  # bisected to 2^(1/32), 2.2 %
    assert made.radii[1] > made.radii[0]


def test_a_quadratic_is_predicted_everywhere():
    model = torch.nn.Linear(3, 2).double()
    land = cl.Landscape(model, (torch.randn(5, 3).double(), torch.randn(5, 2).double()), loss="mse")
    v = -0.1 * land.gradient()
    made = predict_loss(land, v)
    assert made.errors[1] < 1e-14 < made.errors[0]
    assert made.radii[1] == math.inf
    assert "not up to 1024" in repr(made)
    # the multiple that the second degree calls best is an exact line search
    at = [predict_loss(land, t * made.best * v, radius=False).change for t in (0.99, 1.0, 1.01)]
    assert at[1] < min(at[0], at[2])


def test_names_of_blocks_and_of_parameters(land):
    v = direction(land)
    whole = predict_loss(land, v, radius=False).change
    assert predict_loss(land, land.blocks.to_parameters(v), radius=False).change == whole
    assert predict_loss(land, land.blocks.split(v), radius=False).change == whole
    name = land.blocks.names[0]
    alone = land.blocks.join({name: land.blocks.split(v)[name]})
    some = predict_loss(land, {name: land.blocks.split(v)[name]}, radius=False)
    assert some.change == predict_loss(land, alone, radius=False).change


def test_the_step_of_an_optimizer():
    """Recorded, and seen from before it; the model is left where the step led."""
    model, batch = MODELS["own_gpt"]()
    land = cl.Landscape(model.double(), batch, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    before, state = land.value().item(), copy.deepcopy(model.state_dict())
    with Step(land) as step:
        ids = batch if isinstance(batch, torch.Tensor) else batch[0]
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    after = copy.deepcopy(model.state_dict())
    made = predict_loss(land, step)
    assert made.loss == before
    assert made.change == pytest.approx(land.value().item() - before, abs=1e-14)
    assert all(torch.equal(model.state_dict()[name], p) for name, p in after.items())
    again = predict_loss(land, Step.between(land, state, after))
    assert again == made


def test_float32_says_its_rounding():
    model, batch = MODELS["own_gpt"]()
    land = cl.Landscape(model.float(), batch)
    exact = cl.Landscape(copy.deepcopy(model).double(), batch, dtype=torch.float64)
    v = 1e-3 * direction(exact)
    single, double = predict_loss(land, v, radius=False), predict_loss(exact, v, radius=False)
    assert 0 < abs(single.change - double.change) <= single.rounding


def test_wrong_input(land):
    with pytest.raises(
        ValueError, match="expected a finite step that moves the weights, got one of length 0"
    ):
        predict_loss(land, torch.zeros(land.blocks.size))
    with pytest.raises(ValueError, match=r"expected a step \[\d+\] over the blocks, got \[3\]"):
        predict_loss(land, torch.ones(3))
    with pytest.raises(KeyError, match="got 'nobody'"):
        predict_loss(land, {"nobody": torch.ones(3)})
    with pytest.raises(ValueError, match="expected a step that was taken"):
        predict_loss(land, Step(land))
    with pytest.raises(ValueError, match="expected a positive tolerance, got 0"):
        predict_loss(land, torch.ones(land.blocks.size), tolerance=0)
    with pytest.raises(KeyError, match="got none for"):
        Step.between(land, {}, {})
