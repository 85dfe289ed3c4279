import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from curvlens.blocks import Block, Blocks, Slice
from curvlens.estimate.sharpness import preconditioner_scale, sharpness
from curvlens.structured import Dense


class Model(nn.Module):
    """Two parameters; a transposed one, so that blocks and parameters lie differently."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.float64))


@pytest.fixture
def setting():
    model = Model()
    blocks = Blocks(
        [
            Block("linear", (4, 3), Slice.of("weight", (3, 4), lambda w: w.T)),
            Block("shift", (5,), Slice.of("bias", (5,))),
        ]
    )
    matrix = torch.randn(17, 17, dtype=torch.float64)
    H = Dense(matrix + matrix.T, blocks)
    return model, H


def step(model, optimizer, steps=3):
    gradients = []
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients


def dense_value(H, P):
    S = P.rsqrt()
    return torch.linalg.eigvalsh(S[:, None] * H.matrix * S).max().item()


def flat(H, weight, bias):
    return H.domain.from_parameters({"weight": weight, "bias": bias})


def test_raw_sharpness_is_the_largest_eigenvalue(setting):
    _, H = setting
    result = sharpness(H, tol=1e-8)
    assert result.value == pytest.approx(torch.linalg.eigvalsh(H.matrix).max().item(), rel=1e-10)
    assert result.threshold is None
    assert result.ratio is None
    assert "raw" in repr(result)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam(setting, kind, amsgrad):
    model, H = setting
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3, amsgrad=amsgrad)
    gradients = step(model, optimizer)

    def P(i):  # the recursion itself
        v = top = torch.zeros_like(gradients[0][i])
        for g in gradients:
            v = 0.95 * v + 0.05 * g[i] ** 2
            top = torch.maximum(top, v)
        return (1 - 0.9**3) * (((top if amsgrad else v) / (1 - 0.95**3)).sqrt() + 1e-3)

    result = sharpness(H, optimizer, names=dict(model.named_parameters()), tol=1e-8)
    assert result.value == pytest.approx(dense_value(H, flat(H, P(0), P(1))), rel=1e-9)
    assert result.threshold == pytest.approx(38 / 0.01, rel=1e-12)
    assert result.ratio == pytest.approx(result.value * 0.01 / 38)
    assert "of the threshold" in repr(result)


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop(setting, centered):
    model, H = setting
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1, alpha=0.8, eps=1e-3, centered=centered)
    gradients = step(model, optimizer)

    def P(i):
        square = mean = torch.zeros_like(gradients[0][i])
        for g in gradients:
            square, mean = 0.8 * square + 0.2 * g[i] ** 2, 0.8 * mean + 0.2 * g[i]
        return (square - mean**2 if centered else square).sqrt() + 1e-3

    result = sharpness(H, optimizer, names=dict(model.named_parameters()), tol=1e-8)
    assert result.value == pytest.approx(dense_value(H, flat(H, P(0), P(1))), rel=1e-9)
    assert result.threshold == pytest.approx(20)


@pytest.mark.parametrize(
    ("settings", "lr", "threshold"),
    [
        ({}, 0.1, 20),
        ({"momentum": 0.9}, 0.1, 38),
        ({"momentum": 0.9, "dampening": 0.5}, 0.1, 76),
        ({"momentum": 0.5, "nesterov": True}, 0.1, 15),
    ],
)
def test_thresholds_of_sgd_are_where_a_quadratic_diverges(setting, settings, lr, threshold):
    model, H = setting
    result = sharpness(H, torch.optim.SGD(model.parameters(), lr=lr, **settings), names=names_of(model))
    assert result.threshold == pytest.approx(threshold)

    def diverges(curvature):
        x = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([x], lr=lr, **settings)
        for _ in range(2000):
            x.grad = curvature * x.detach()
            optimizer.step()
        return abs(x.item()) > 1

    assert diverges(1.02 * threshold)
    assert not diverges(0.98 * threshold)


def test_the_threshold_of_adam_is_where_a_quadratic_diverges():
    """Momentum of the exponential-average kind with P = 1: Adam after its preconditioner has settled."""

    def diverges(curvature, beta=0.9, lr=0.1):
        x, m = 1.0, 0.0
        for _ in range(3000):
            m = beta * m + (1 - beta) * curvature * x
            x -= lr * m
        return not abs(x) < 1

    assert diverges(1.01 * 380)
    assert not diverges(0.99 * 380)


def names_of(model):
    return dict(model.named_parameters())


def test_groups_with_their_own_learning_rates(setting):
    model, H = setting
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    result = sharpness(H, optimizer, names=names_of(model), tol=1e-8)
    rates = flat(H, torch.full((3, 4), 0.1).double(), torch.full((5,), 0.02).double())
    # the step is diag(rates) g: stable while the largest eigenvalue of diag(rates) H is below 2
    largest = torch.linalg.eigvals(rates[:, None] * H.matrix).real.max().item()
    assert result.ratio == pytest.approx(largest / 2, rel=1e-9)


def test_blocks_of_a_part_need_only_their_own_parameters(setting):
    model, H = setting
    optimizer = torch.optim.Adam([model.bias], lr=0.01)
    step(model, optimizer)
    part = H.block("shift")
    assert sharpness(part, optimizer, names=names_of(model)).converged
    with pytest.raises(ValueError, match="got none for 'weight'"):
        sharpness(H, optimizer, names=names_of(model))


def test_names_come_from_the_landscape(setting):
    model, H = setting
    H.landscape = SimpleNamespace(model=model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    with_landscape = sharpness(H, optimizer)
    assert with_landscape.value == sharpness(H, optimizer, names=names_of(model)).value


def test_what_cannot_be_preconditioned_is_refused(setting):
    model, H = setting
    names = names_of(model)
    with pytest.raises(ValueError, match="expected names="):
        sharpness(H, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="taken a step"):
        sharpness(H, torch.optim.Adam(model.parameters()), names=names)
    with pytest.raises(
        TypeError, match="expected SGD, RMSprop, Adam or AdamW as a preconditioner, got Adagrad"
    ):
        sharpness(H, torch.optim.Adagrad(model.parameters()), names=names)
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(TypeError, match=r"got Muon .its state holds no P|got Muon .it makes"):
            sharpness(H, torch.optim.Muon([model.weight]), names=names)
    groups = [{"params": [model.weight], "momentum": 0.5}, {"params": [model.bias], "momentum": 0.9}]
    with pytest.raises(ValueError, match="same momentum in all"):
        sharpness(H, torch.optim.SGD(groups, lr=0.1), names=names)


def test_no_budget_is_no_exception(setting):
    _model, H = setting
    result = sharpness(H, max_products=0)
    assert math.isnan(result.value)
    assert not result.converged


def test_the_scale_lies_as_the_blocks_do(setting):
    model, H = setting
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    scale, _, _ = preconditioner_scale(H, optimizer, names_of(model))
    v = optimizer.state[model.weight]["exp_avg_sq"]
    P = (1 - 0.9**3) * ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    torch.testing.assert_close(scale[:12].view(4, 3), P.T.rsqrt(), rtol=1e-12, atol=0)
