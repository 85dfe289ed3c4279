"""Findings of a training: each found where it is planted, none in healthy runs. Small real runs."""

import pytest
import torch

from training import runs


def sgd(net, lr, **more):
    return torch.optim.SGD(net.parameters(), lr=lr, **more)


def scaled(net, factor):
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() >= 2:
                p.mul_(factor)
    return net


def names(tracker):
    return [finding.id for finding in tracker.findings]


# -- healthy

HEALTHY = {
    "adamw, addition, pre-norm": lambda: runs.train(
        net := runs.model(), opt := runs.adamw(net, weight_decay=0.1), 80, schedule=runs.warm_up(opt, 20, 80), clip=1.0
    ),
    "adamw, addition, post-norm": lambda: runs.train(
        net := runs.model(norm="post"), opt := runs.adamw(net), 80, schedule=runs.warm_up(opt, 20, 80)
    ),
    "adamw, text, pre-norm": lambda: runs.train(
        net := runs.model("text"), opt := runs.adamw(net), 80, task="text", schedule=runs.warm_up(opt, 20, 80), clip=1.0
    ),
    "adamw, text, post-norm, deeper": lambda: runs.train(
        net := runs.model("text", norm="post", depth=3), opt := runs.adamw(net), 80, task="text",
        schedule=runs.warm_up(opt, 20, 80),
    ),
    "adam, constant rate": lambda: runs.train(
        net := runs.model("text", seed=1), torch.optim.Adam(net.parameters(), 2e-3), 80, task="text", seed=1
    ),
    "sgd": lambda: runs.train(net := runs.model("text"), sgd(net, 0.05), 80, task="text"),
    "sgd with momentum": lambda: runs.train(
        net := runs.model("text"), opt := sgd(net, 0.02, momentum=0.9), 80, task="text",
        schedule=runs.warm_up(opt, 20, 80),
    ),
    "sgd at the edge": lambda: runs.train(net := runs.model("text"), sgd(net, 0.1), 120, task="text"),
    "rmsprop": lambda: runs.train(
        net := runs.model("text"), opt := torch.optim.RMSprop(net.parameters(), 1e-3), 80, task="text",
        schedule=runs.warm_up(opt, 20, 80),
    ),
    "adamw, no norm": lambda: runs.train(
        net := runs.model("text", norm="none", depth=1), opt := runs.adamw(net), 80, task="text",
        schedule=runs.warm_up(opt, 20, 80),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_are_silent(kind):
    tracker = HEALTHY[kind]()
    assert tracker.findings == []
    losses = tracker.track.numbers("loss")
    assert losses[-1] < losses[0]


# -- planted


def from_step(step, change):
    """A plant that changes something once."""
    return lambda at, net, optimizer, batch: change(net, optimizer) if at == step else None


def weights_times(path, factor):
    def change(net, optimizer):
        with torch.no_grad():
            net.get_parameter(path).mul_(factor)

    return change


def own_rate(net, path, lr):
    """An optimizer with a group of its own for one parameter."""
    one = net.get_parameter(path)
    rest = [p for p in net.parameters() if p is not one]
    return torch.optim.SGD([{"params": rest}, {"params": [one]}], lr=lr)


def rate_times(factor):
    def change(net, optimizer):
        optimizer.param_groups[1]["lr"] *= factor

    return change


class Multiplied(torch.nn.Module):
    """A net whose token embedding is multiplied on its way in, and smaller by as much: the same function."""

    def __init__(self, net, factor):
        super().__init__()
        self.net, self.factor = net, factor
        with torch.no_grad():
            net.token.weight.div_(factor)

    def forward(self, ids):
        x = self.factor * self.net.token(ids) + self.net.position.weight[: ids.shape[1]]
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(self.net.norm(x))


PLANTED = {
    "rate: sgd diverges": (
        "rate-beyond-the-limit",
        lambda: runs.train(net := runs.model("text"), sgd(net, 4.0), 60, task="text", every=5),
    ),
    "rate: momentum diverges": (
        "rate-beyond-the-limit",
        lambda: runs.train(net := runs.model("text"), sgd(net, 2.0, momentum=0.9), 60, task="text", every=5),
    ),
    "rate: adam a hundred times too fast": (
        "rate-beyond-the-limit",
        lambda: runs.train(
            net := runs.model("text"), opt := runs.adamw(net, lr=1.0), 60, task="text", every=5,
            schedule=runs.warm_up(opt, 10, 60),
        ),
    ),
    "warm-up: sgd, sharp start": (
        "warm-up-too-short",
        lambda: runs.train(net := scaled(runs.model("text"), 3.0), sgd(net, 0.1), 60, task="text", every=2),
    ),
    "warm-up: sgd, sharp start, other seed": (
        "warm-up-too-short",
        lambda: runs.train(
            net := scaled(runs.model("text", seed=2), 3.0), opt := sgd(net, 0.1), 60, task="text", every=2, seed=2,
            schedule=runs.warm_up(opt, 3, 60),
        ),
    ),
    "blocks: an input multiplier": (
        "blocks-differ-by-orders",
        lambda: runs.train(net := Multiplied(runs.model("text"), 200.0), sgd(net, 1e-6), 30, task="text", every=10),
    ),
    "blocks: a larger one, with momentum": (
        "blocks-differ-by-orders",
        lambda: runs.train(
            net := Multiplied(runs.model("text", norm="pre", seed=1), 300.0), sgd(net, 1e-7, momentum=0.9), 30,
            task="text", every=10,
        ),
    ),
    "spike: values a hundred times as large": (
        "spike",
        lambda: runs.train(
            net := runs.model("text"), runs.adamw(net), 60, task="text", every=10,
            plant=from_step(45, weights_times("blocks.0.attn.W_V", 100.0)),
        ),
    ),
    "spike: the head": (
        "spike",
        lambda: runs.train(
            net := runs.model("text"), runs.adamw(net), 60, task="text", every=10,
            plant=from_step(45, weights_times("head.W_U", 10.0)),
        ),
    ),
    "spike: the rate of one block": (
        "spike",
        lambda: runs.train(
            net := runs.model("text"), own_rate(net, "blocks.1.mlp.W_2", 0.1), 60, task="text", every=10,
            plant=from_step(45, rate_times(5000.0)),
        ),
    ),
}  # fmt: skip
CAUSES = {
    "spike: values a hundred times as large": "layer.0.attn.value",
    "spike: the head": "head",
    "spike: the rate of one block": "layer.1.mlp.down",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:curvlens.Tracker")
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_is_found(kind):
    expected, run = PLANTED[kind]
    tracker = run()
    assert expected in names(tracker)
    if kind in CAUSES:
        found = next(f for f in tracker.findings if f.id == "spike")
        assert found.blocks == [CAUSES[kind]]
