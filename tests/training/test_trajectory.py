import math

import pytest
import torch

import curvlens as cl
from curvlens.training.stability import stability
from curvlens.training.trajectory import Descent, eigen_modes, gradient_descent, krylov_modes, recovered
from models import MODELS
from training.minima import at_minimum, flat, place


@pytest.fixture(scope="module")
def land():
    model, batch = MODELS["own_gpt"]()
    return cl.Landscape(model, batch)


def by_matrix(H, gradient, descent, steps):
    """The quadratic followed step by step with the dense matrix, by torch's own SGD."""
    x = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([x], lr=descent.rate, momentum=descent.momentum, nesterov=descent.nesterov)
    found = []
    for _ in range(steps + 1):
        found.append((gradient @ x + 0.5 * x @ H @ x).item())
        x.grad = (gradient + H @ x).detach()
        optimizer.step()
    return torch.tensor(found, dtype=torch.float64)


WAYS = [Descent(0.02), Descent(0.02, 0.9), Descent(0.02, 0.9, nesterov=True)]


@pytest.mark.parametrize("descent", WAYS, ids=["plain", "heavy ball", "nesterov"])
def test_modes_follow_the_quadratic(land, descent):
    H, g = cl.hessian(land), land.gradient()
    dense = by_matrix(H.dense(), g, descent, 40)
    scale = dense.abs().max().item()
    whole = eigen_modes(H, g, len(g)).losses(descent, 40)
    torch.testing.assert_close(whole, dense, rtol=0, atol=1e-11 * scale)
    few = krylov_modes(H, g, 12)
    assert few.exact == 12
    losses = few.losses(descent, 40)
    # exact while the polynomial's degree is below that of the quadrature, not after
    torch.testing.assert_close(losses[:13], dense[:13], rtol=0, atol=1e-11 * scale)
    assert (losses[13:] - dense[13:]).abs().max() > 1e-11 * scale


def test_some_eigenvectors_and_the_rest(land):
    """The rest's mean curvature is right to second order in its rate: steps along flat directions."""
    H, g = cl.hessian(land), land.gradient()
    descent = Descent(2e-3)
    dense = by_matrix(H.dense(), g, descent, 10)
    found = eigen_modes(H, g, 20).losses(descent, 10)
    assert found[1].item() == pytest.approx(dense[1].item(), rel=1e-6)  # first and second degree are complete
    assert (found - dense).abs().max() < 1e-3 * dense.abs().max()


@pytest.mark.parametrize("by", ["lanczos", "eigen"])
def test_beside_the_truth_near_a_minimum(by):
    """There the quadratic is the loss: a small way off, all steps are predicted to the last per mille."""
    model, land = at_minimum()
    rest = flat(land)
    direction = torch.randn(rest.shape, dtype=rest.dtype, generator=torch.Generator().manual_seed(0))
    place(land, rest + 1e-4 * direction / direction.norm())
    rate = 0.8 * stability(land, torch.optim.SGD(model.parameters(), lr=0.1)).critical
    kept = flat(land)
    made = gradient_descent(land, rate, 40, by=by, k=40)
    change = made.true[0] - made.true
    assert made.horizon(0.01) == 40
    assert (made.errors[1:] / change[1:]).max() < 1e-2
    assert torch.equal(flat(land), kept)
    assert "predicted to 10% for 40 steps" in repr(made)
    # the curvature that the steps show is that of the dense matrix, from below
    top = torch.linalg.eigvalsh(cl.hessian(land).dense())[-1].item()
    assert made.sharpness == pytest.approx(top, rel=1e-3)
    assert made.recovered.largest <= top * (1 + 1e-6)
    assert made.recovered.largest == pytest.approx(top, rel=0.05)
    assert top - made.recovered.largest <= made.recovered.residual


def test_an_optimizer_with_decay_and_a_run_that_diverges(land):
    optimizer = torch.optim.SGD(land.model.parameters(), lr=0.01, momentum=0.5, weight_decay=0.1)
    made = gradient_descent(land, optimizer, 6)
    weights = flat(land)
    assert made.true[0].item() == pytest.approx(
        (land.value() + 0.05 * weights.square().sum()).item(), rel=1e-12
    )
    assert made.horizon() >= 1
    wild = gradient_descent(land, 1e6, 8)
    assert wild.horizon() < 8
    assert not (wild.true[1:] <= wild.true[0]).all()


def test_curvature_of_a_quadratic_from_its_path():
    """Twenty steps in five dimensions show the whole matrix."""
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    H = root @ root.T + torch.eye(5).double()
    values = torch.linalg.eigvalsh(H)
    x = torch.ones(5).double()
    places = [x]
    for _ in range(20):
        x = x - 0.9 / values[-1] * H @ x
        places.append(x)
    places = torch.stack(places)
    made = recovered(places, places @ H)
    # directions that the steps took a thousandth as much as another are left out, which the residual tells
    assert made.largest == pytest.approx(values[-1].item(), rel=1e-3)
    assert 0 <= values[-1].item() - made.largest <= made.residual < 1
    assert all(values[0] - 1e-9 <= v <= values[-1] + 1e-9 for v in made.along)
    steps = places.diff(dim=0)
    torch.testing.assert_close(made.along, ((steps @ H) * steps).sum(1) / steps.square().sum(1))


def test_wrong_input(land):
    with pytest.raises(TypeError, match="expected SGD or a rate, got Adam"):
        gradient_descent(land, torch.optim.Adam(land.model.parameters()))
    with pytest.raises(ValueError, match="expected a positive rate and at least one step, got -1"):
        gradient_descent(land, -1, 5)
    with pytest.raises(ValueError, match="expected by to be one of lanczos, eigen"):
        gradient_descent(land, 0.1, by="magic")
    with pytest.raises(ValueError, match="expected steps that move"):
        recovered(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="expected SGD without dampening"):
        Descent.of(torch.optim.SGD(land.model.parameters(), lr=1, momentum=0.9, dampening=0.1))
    assert math.isinf(
        krylov_modes(cl.structured.Dense(torch.eye(3).double()), torch.ones(3).double(), 3).exact
    )
