import copy
import math

import pytest
import torch
from torch.nn import functional as F

import curvlens as cl
from curvlens import digits
from curvlens.training.curvature_aware import CurvatureAware
from curvlens.training.stability import stability
from models import MODELS
from training.minima import IDS, net

KINDS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def setting(kind="adamw", **options):
    model = net().double()
    held = digits.batches(2, size=5, seed=9)
    land = cl.Landscape(model, [held[0], tuple(part[:2] for part in held[1])])
    return model, CurvatureAware(KINDS[kind](model.parameters()), land, **options)


def train(model, optimizer, steps, start=0):
    data = digits.batches(start + steps, size=6, seed=1)[start:]
    for ids, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_before_it_has_measured_it_is_the_wrapped_optimizer_bit_for_bit():
    model, aware = setting(every=100)
    plain = copy.deepcopy(model)
    assert same(train(model, aware, 5), train(plain, KINDS["adamw"](plain.parameters()), 5))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop", "adagrad"])
def test_it_is_the_wrapped_optimizer_with_a_rate_of_its_own_for_every_block(kind):
    """Beside the same optimizer with one parameter group a parameter and the factors in their rates."""
    model, aware = setting(kind, every=1)
    train(model, aware, 5)  # factors stand
    assert len(set(aware.factors.values())) > 5
    aware.every = 10**6
    state = copy.deepcopy(aware.optimizer.state_dict()["state"])
    twin = copy.deepcopy(model)
    reference = KINDS[kind](twin.parameters())
    scales = aware.land.blocks.to_parameters(aware.factor())
    group = reference.param_groups[0]
    reference.param_groups[:] = []
    for name, p in twin.named_parameters():
        assert len(scales[name].unique()) == 1
        reference.add_param_group({**group, "params": [p], "lr": group["lr"] * scales[name].unique().item()})
    for index, p in enumerate(twin.parameters()):
        reference.state[p] = state[index]
    train(model, aware, 4, start=5)
    train(twin, reference, 4, start=5)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        if not name.endswith("b_K"):  # its gradient is zero but for rounding, which Adam makes large
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_fused_parameter_holds_several_factors():
    """GPT-2's query, key and value lie in one tensor, and each moves by its own factor."""
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model, batch)
    aware = CurvatureAware(torch.optim.SGD(model.parameters(), lr=0.1), land, every=10**6)
    for _ in range(3):
        aware.measure()
    before, gradient = land.blocks.from_parameters(land.parameters()), land.gradient()
    for name, g in land.blocks.to_parameters(gradient).items():
        model.get_parameter(name).grad = g.clone()
    aware.step()
    moved = land.blocks.split(land.blocks.from_parameters(land.parameters()) - before)
    factors = aware.factors
    assert factors["layer.0.attn.query"] != factors["layer.0.attn.value"]
    for name, g in land.blocks.split(gradient).items():
        torch.testing.assert_close(moved[name], -0.1 * factors[name] * g, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn targets", "product"])
def test_the_curvature_is_the_mean_diagonal_as_the_optimizer_sees_it(drawn):
    """Within four standard errors, which follow from the dense matrix."""
    model, aware = setting("adamw", every=10**6)
    train(model, aware, 3)
    state, blocks = aware.optimizer.state, aware.land.blocks
    P = {
        name: (1 - 0.9**3) * ((state[p]["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
        for name, p in model.named_parameters()
    }
    S = blocks.from_parameters(P).rsqrt()
    G = S[:, None] * cl.gauss_newton(aware.land).dense() * S
    if not drawn:

        def sample(*_):
            raise NotImplementedError

        aware.land.loss.sample = sample
    count, found = 60, dict.fromkeys(blocks.names, 0.0)
    for aware.measurements in range(count):
        for name, value in aware._curvatures().items():
            found[name] += value / count
    for name, span in blocks.ranges.items():
        own, rows = G[span, span], G[span]
        trace = own.trace().item()
        # of the square of a nearly Gaussian gradient; of a probe also what lies beside the block, but no diagonal
        square = 2 * own.square().sum().item()
        if not drawn:
            square += (
                rows.square().sum().item()
                - own.square().sum().item()
                - 2 * own.diagonal().square().sum().item()
            )
        error = math.sqrt(square / count)
        assert abs(found[name] * (span.stop - span.start) - trace) < 4 * error + 1e-9, name
    assert math.sqrt(2 * G.square().sum().item() / count) < 0.2 * G.trace().item()  # the test can tell


def test_factors_follow_from_the_curvature():
    _, aware = setting(every=10, power=0.5, limit=3.0)
    names = aware.land.blocks.names
    sizes = [aware.land.blocks[n].size for n in names]
    aware.curvature = dict.fromkeys(names, 2.0)
    aware.measured = dict.fromkeys(names, 3)
    assert aware.factors == pytest.approx(dict.fromkeys(names, 1.0))
    aware.curvature[names[0]] = 2.0 * 4
    lower, others = aware.factors[names[0]], aware.factors[names[1]]
    assert others / lower == pytest.approx(2)
    logs = [size * math.log(aware.factors[n]) for n, size in zip(names, sizes, strict=True)]
    assert sum(logs) == pytest.approx(0, abs=1e-9)
    aware.curvature[names[0]] = 1e9
    assert aware.factors[names[0]] == pytest.approx(1 / 3)
    aware.curvature[names[0]] = -1.0  # a mean that is not positive says: flat
    assert aware.factors[names[0]] == 3.0
    aware.measured[names[0]] = 2
    assert aware.factors[names[0]] == 1.0


def test_a_wild_measurement_moves_the_mean_little():
    _, aware = setting(every=10, limit=4.0, memory=0.9)
    name = aware.land.blocks.names[0]
    for _ in range(50):
        aware._take_in(name, 1.0)
    aware._take_in(name, 1e30)
    assert aware.curvature[name] == pytest.approx(1.3, rel=0.01)  # a tenth of 4, and nine of 1
    aware._take_in(name, -1e30)
    assert 1.1 < aware.curvature[name] < 1.3


def test_what_is_not_finite_is_dropped():
    model, aware = setting(every=10**6)
    with torch.no_grad():
        model.token.weight[0, 0] = math.nan
    aware.measure()
    assert (aware.failed, aware.curvature, aware.factors["embed.token"]) == (1, {}, 1.0)


def test_the_budget_is_kept_by_the_clock():
    """A training step takes 1 s, a measurement 1.5 s, and 5 % may be spent: at every moment at most that."""
    clock = Clock()
    model, aware = setting(clock=clock, share=0.05)
    step, measured = aware.optimizer.step, aware._curvatures

    def slow_step(closure=None):
        clock.now += 0.5
        return step(closure)

    def slow_measurement():
        clock.now += 1.5
        return measured()

    aware.optimizer.step, aware._curvatures = slow_step, slow_measurement
    for t in range(400):
        clock.now += 0.5  # forward and backward
        if t % 40 == 0:
            train(model, aware, 1)
        else:
            aware.step()
        assert aware.spent <= 0.05 * (aware.spent + aware.trained) + 1e-9
    assert aware.spent == 1.5 * aware.measurements
    assert aware.measurements == 13  # the n-th when training has taken 28.5 n + 1.5 s
    assert "4.7% of the time" in repr(aware)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_saved_and_restored_it_goes_on_bit_for_bit(kind, tmp_path):
    model, aware = setting(kind, every=2)
    train(model, aware, 9)
    torch.save({"model": model.state_dict(), "optimizer": aware.state_dict()}, tmp_path / "c.pt")
    kept = torch.load(tmp_path / "c.pt")  # plain numbers and tensors alone
    whole = train(model, aware, 5, start=9)
    again, resumed = setting(kind, every=2)
    again.load_state_dict(kept["model"])
    resumed.load_state_dict(kept["optimizer"])
    assert resumed.param_groups is resumed.optimizer.param_groups
    assert same(train(again, resumed, 5, start=9), whole)
    assert resumed.state_dict()["curvature_aware"]["measured"] == aware.measured


def test_a_state_of_the_wrapped_optimizer_alone_is_taken():
    model, aware = setting("adamw", every=100)
    train(model, aware, 3)
    other, plain = setting("adamw", every=100)
    plain.load_state_dict(copy.deepcopy(aware.optimizer.state_dict()))
    assert plain.steps == 0
    other.load_state_dict(model.state_dict())
    assert same(train(model, aware, 2, start=3), train(other, plain, 2, start=3))


def test_schedulers_groups_and_closures():
    model, aware = setting("sgd", every=3)
    assert isinstance(aware, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(aware, lambda t: 0.5**t)
    extra = torch.nn.Parameter(torch.ones(2).double())
    aware.add_param_group({"params": [extra], "lr": 1.0})
    assert aware.param_groups is aware.optimizer.param_groups
    assert len(aware.param_groups) == 2
    train(model, aware, 2)
    scheduler.base_lrs.append(1.0)
    scheduler.lr_lambdas.append(lambda t: 1.0)
    scheduler.step()
    assert aware.optimizer.param_groups[0]["lr"] == 0.025

    def closure():
        aware.zero_grad()
        loss = model(IDS).square().mean() + extra.sum()
        loss.backward()
        return loss

    for _ in range(12):
        assert aware.step(closure).item() > 0 or extra.sum() < 0
    # what the landscape does not know moves as the wrapped optimizer says: one, at rest, then nesterov momentum
    assert aware.measurements >= 4
    twin = torch.nn.Parameter(torch.ones(2).double())
    reference = torch.optim.SGD([twin], lr=1.0, momentum=0.9, nesterov=True)
    for _ in range(12):
        twin.grad = torch.ones_like(twin)
        reference.step()
    torch.testing.assert_close(extra.detach(), twin.detach(), rtol=1e-12, atol=0)
    aware.zero_grad()
    assert extra.grad is None


def test_a_gradient_scaler_skips_its_step():
    model, aware = setting("adamw", every=2)
    model.float()
    aware.land = aware.land.renewed()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    kept = [p.detach().clone() for p in model.parameters()]
    for poison in (True, False):
        aware.zero_grad()
        scaler.scale(model(IDS).square().mean()).backward()
        if poison:
            next(model.parameters()).grad[0, 0] = math.inf
        scaler.step(aware)
        scaler.update()
        moved = [p.detach().clone() for p in model.parameters()]
        assert same(kept, moved) == poison
    assert aware.steps == 1


def test_frozen_tied_and_thawed():
    model, aware = setting("adamw", every=1)
    assert aware.land.blocks["embed.token"].aliases  # tied: one block under two names
    model.position.weight.requires_grad_(False)
    before = model.position.weight.clone()
    train(model, aware, 5)
    assert torch.equal(model.position.weight, before)
    assert "embed.position" not in aware.factors
    model.position.weight.requires_grad_(True)
    train(model, aware, 5, start=5)
    assert not torch.equal(model.position.weight, before)
    assert "embed.position" in aware.factors


def test_stability_sees_the_factors():
    model, aware = setting("sgd", every=1)
    train(model, aware, 6)
    found = stability(aware.land, aware, tol=1e-8)
    dense = cl.hessian(aware.land).dense()
    scale = (aware.factor() * 0.05 * (1 + 2 * 0.9) / (2 + 2 * 0.9)).sqrt()
    top = torch.linalg.eigvalsh(scale[:, None] * dense * scale)[-1].item()
    assert found.value == pytest.approx(top, rel=1e-6)
    assert "CurvatureAware(SGD)" in repr(found)


def test_words_and_wrong_input():
    model, aware = setting("adamw", every=1)
    train(model, aware, 5)
    assert "CurvatureAware(AdamW): 4 measurements in 5 steps" in repr(aware)
    assert "embed.token" in repr(aware)
    clone = copy.deepcopy(aware)
    assert clone.factors == aware.factors
    land = aware.land
    with pytest.raises(TypeError, match="in proportion to its rate, got LBFGS"):
        CurvatureAware(torch.optim.LBFGS(model.parameters()), land)
    with pytest.raises(TypeError, match="expected a torch optimizer, got str"):
        CurvatureAware("adamw", land)
    with pytest.raises(ValueError, match="expected an optimizer of the landscape's model"):
        CurvatureAware(torch.optim.SGD(net().parameters(), lr=1), land)
    for wrong in ({"share": 0}, {"every": 0}, {"power": 2}, {"limit": 1}, {"memory": 1}):
        with pytest.raises(
            ValueError, match=f"expected a .*{next(iter(wrong)).replace('every', 'measurement every')}"
        ):
            CurvatureAware(torch.optim.SGD(model.parameters(), lr=1), land, **wrong)
