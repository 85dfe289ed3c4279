import math

import pytest
import torch

import curvlens as cl
from curvlens.estimate.sharpness import stable_curvature
from curvlens.training.stability import stability
from training.minima import at_minimum, flat, give_gradient, grow, place

SGD = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]


@pytest.mark.parametrize("settings", SGD, ids=["plain", "heavy ball", "nesterov"])
def test_gradient_descent_diverges_just_above_the_critical_rate_and_converges_just_below(settings):
    """On the true loss of a small Transformer, a step of 1e-5 away from its minimum; 3 % to either side."""
    model, land = at_minimum()
    found = stability(land, torch.optim.SGD(model.parameters(), lr=0.1, **settings))
    ends = []
    for factor in (0.97, 1.03):
        model, land = at_minimum()
        optimizer = torch.optim.SGD(model.parameters(), lr=factor * found.critical, **settings)
        far = grow(land, optimizer, 60, found.pairs.vectors[:, 0])
        ends.append(far[-1] / far[10])
    assert ends[0] < 1 < 3 < ends[1]


def adam_at_rest(model, land, kind=torch.optim.Adam, **settings):
    """An Adam that has come down from nearby, put back at the minimum as if after long training: no bias is left."""
    rest = flat(land)
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    grow(land, optimizer, 30, size=0.3)
    place(land, rest)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"] /= 1 - 0.999**30
        state["step"].fill_(1e5)
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_diverges_above_and_converges_below(kind):
    """Its preconditioner follows the gradients, so within 10 %, over steps too few for that."""
    ends = []
    for factor in (0.9, 1.1):
        model, land = at_minimum()
        optimizer = adam_at_rest(model, land, kind, weight_decay=0.0)
        found = stability(land, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = factor * found.critical
        far = grow(land, optimizer, 30, found.pairs.vectors[:, 0])
        ends.append(far[-1] / far[5])
    assert ends[0] < 1 < 3 < ends[1]


def grouped(model, kind, settings):
    """Two groups of unlike rate, momentum and decay."""
    parameters = list(model.parameters())
    return kind([{"params": parameters[::2], **settings[0]}, {"params": parameters[1::2], **settings[1]}])


CASES = {
    "rates": (torch.optim.SGD, ({"lr": 0.1}, {"lr": 0.01})),
    "momenta": (torch.optim.SGD, ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.05, "momentum": 0.95})),
    "nesterov": (
        torch.optim.SGD,
        ({"lr": 0.1, "momentum": 0.8, "nesterov": True}, {"lr": 0.1, "momentum": 0.3, "dampening": 0.2}),
    ),
    "decay": (torch.optim.SGD, ({"lr": 0.1, "weight_decay": 3.0}, {"lr": 0.1, "momentum": 0.9})),
    "one at rest": (torch.optim.SGD, ({"lr": 0.1}, {"lr": 0.0})),
    "adamw": (
        torch.optim.AdamW,
        (
            {"lr": 1e-3, "weight_decay": 2.0, "betas": (0.9, 1 - 1e-9), "eps": 0.1},
            {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.7, 1 - 1e-9), "eps": 0.3},
        ),
    ),
    "adam": (
        torch.optim.Adam,
        (
            {"lr": 1e-3, "weight_decay": 5.0, "betas": (0.9, 1 - 1e-9), "eps": 0.1},
            {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 1 - 1e-9), "eps": 0.2},
        ),
    ),
    "rmsprop": (
        torch.optim.RMSprop,
        (
            {"lr": 1e-3, "alpha": 1 - 1e-12, "eps": 0.1},
            {"lr": 2e-3, "alpha": 1 - 1e-12, "eps": 0.1, "momentum": 0.6},
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_itself_on_a_quadratic(case):
    """Torch's own on ½ θᵀHθ with P held fast: it grows 0.2 % above the stated rate, and not 0.2 % below."""
    kind, settings = CASES[case]

    def growth(factor):
        generator = torch.Generator().manual_seed(3)
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n).double()) for n in (4, 3, 5, 2))
        root = torch.randn(14, 14, generator=generator).double()
        H = root @ root.T
        parameters = dict(model.named_parameters())
        blocks = cl.Blocks(
            cl.blocks.Block(name, tuple(p.shape), cl.blocks.Slice.of(name, p.shape))
            for name, p in parameters.items()
        )
        optimizer = grouped(model, kind, settings)
        for p in model:  # squares of gradients as after long training: they no longer change
            square = torch.rand(p.shape, generator=generator).double()
            if kind is torch.optim.RMSprop:
                optimizer.state[p] = {
                    "step": torch.tensor(1.0),
                    "square_avg": square,
                    "momentum_buffer": 0 * square,
                }
            elif kind is not torch.optim.SGD:
                step = torch.tensor(1e11)  # no bias left to correct
                optimizer.state[p] = {"step": step, "exp_avg": 0 * square, "exp_avg_sq": square}
        D, decay, _ = stable_curvature(cl.structured.Dense(H, blocks), optimizer, parameters)
        S = D.rsqrt()
        critical = 1 / torch.linalg.eigvalsh(S[:, None] * (H + torch.diag(decay)) * S).max().item()
        for group in optimizer.param_groups:
            group["lr"] *= critical * factor
        with torch.no_grad():
            for p in model:
                p.copy_(1e-100 * torch.randn(p.shape, generator=generator).double())
        lengths = []
        for _ in range(4000):
            theta = torch.cat([p.detach() for p in model])
            lengths.append(theta.norm().item())
            for p, g in zip(model, (H @ theta).split([len(p) for p in model]), strict=True):
                p.grad = g.clone()
            optimizer.step()
        moving = [math.log(max(*lengths[i : i + 50], 1e-300)) for i in (2000, 3900)]
        return moving[1] - moving[0]

    assert growth(1.002) > 0.5
    # a direction that never decays keeps its length: with a rate of zero, and where there is no decay to speak of
    assert growth(0.998) < 1e-6


def test_the_margin_against_the_dense_matrix_with_groups_tied_weights_and_frozen_parameters():
    model, land = at_minimum()
    model.position.weight.requires_grad_(False)
    land = land.renewed()
    optimizer = grouped(
        model, torch.optim.AdamW, ({"lr": 1e-3, "weight_decay": 0.5}, {"lr": 4e-3, "betas": (0.8, 0.99)})
    )
    give_gradient(land.at(flat(land) + 0.1))
    optimizer.step()
    found = stability(land, optimizer, tol=1e-8)
    D, decay, rules = stable_curvature(cl.hessian(land), optimizer)
    S = D.rsqrt()
    dense = S[:, None] * (cl.hessian(land).dense() + torch.diag(decay)) * S
    values, vectors = torch.linalg.eigh(dense)
    assert found.value == pytest.approx(values[-1].item(), rel=1e-7)
    assert len(rules) == 2
    assert found.critical == pytest.approx(4e-3 / values[-1].item(), rel=1e-7)
    assert [group.critical for group in found.groups] == pytest.approx(
        [g.rate * found.factor for g in found.groups]
    )
    assert sum(group.share for group in found.groups) == pytest.approx(1, rel=1e-9)
    shares = {name: part.square().sum().item() for name, part in land.blocks.split(vectors[:, -1]).items()}
    assert found.blocks == pytest.approx(shares, abs=1e-4)
    assert "group" in repr(found)
    assert 0 < found.decay < 1


def test_parameters_that_the_optimizer_does_not_have_are_held_fast():
    model, land = at_minimum()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
    found = stability(land, optimizer, tol=1e-6)
    assert "token.weight" in found.left_out
    rows = [
        i
        for name, span in land.blocks.ranges.items()
        if name.startswith("layer")
        for i in range(span.start, span.stop)
    ]
    block = cl.hessian(land).dense()[rows][:, rows]
    assert found.value == pytest.approx(0.005 * torch.linalg.eigvalsh(block).max().item(), rel=1e-5)
    assert "held fast" in repr(found)


def test_words_and_wrong_input():
    model, land = at_minimum()
    found = stability(land, torch.optim.SGD(model.parameters(), lr=1e-6))
    assert found.stable
    assert "SGD is stable" in repr(found)
    assert 0 <= found.critical_error < 1e-2 * found.critical
    with pytest.raises(ValueError, match="expected an optimizer that has taken a step"):
        stability(land, torch.optim.Adam(model.parameters()))
    with pytest.raises(
        ValueError, match="expected the optimizer to have parameters of the landscape's model"
    ):
        stability(land, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1))
    with pytest.raises(ValueError, match="expected an optimizer that minimizes"):
        stability(land, torch.optim.SGD(model.parameters(), lr=1, maximize=True))
    with pytest.raises(TypeError, match="expected SGD, RMSprop, Adam or AdamW"):
        stability(land, torch.optim.Adagrad(model.parameters()))
