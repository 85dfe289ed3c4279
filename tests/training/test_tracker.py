"""The tracker: training as without it, numbers that are right, a record that survives."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import curvlens as cl
from curvlens.blocks import Blocks
from curvlens.report.groups import groups
from curvlens.training.pace import Pace
from curvlens.training.record import Track
from curvlens.training.tracker import Tracker
from training import runs

HELD = list(itertools.islice(runs.data(size=2, seed=9), 1))


def world():
    """All that is random."""
    numpy = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state(), random.getstate(), numpy[1].tolist(), numpy[2:]


class Noisy(torch.nn.Module):
    """A net with dropout, a buffer and a hook of its own."""

    def __init__(self):
        super().__init__()
        self.net = runs.model(width=4)
        self.drop = torch.nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += 1
        return self.drop(self.net(ids))


@pytest.mark.parametrize("kind", ["adamw", "sgd", "autocast"])
def test_training_is_the_same_bit_for_bit(kind, tmp_path):
    def train(tracked):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        net = Noisy()
        net.net.blocks[1].eval()  # a mode of one's own
        rates = {"lr": 1e-2, "weight_decay": 0.1}
        kinds = {"sgd": torch.optim.SGD}
        optimizer = kinds.get(kind, torch.optim.AdamW)(net.parameters(), **rates)
        loader = torch.utils.data.DataLoader([ids for ids, _ in HELD], batch_size=None)
        tracker = (
            Tracker(
                net, loader, optimizer, every=3, loss="next-token", path=tmp_path / "t.jsonl",
                parts={"eigenvalues": 1, "optimizer": 1, "blocks": 1, "heads": 3, "depth": 3},
            )
            if tracked
            else None
        )  # fmt: skip
        for step, batch in zip(range(8), runs.data(), strict=False):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                loss = runs.loss_of(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if tracked:
                hooks = [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in net.modules()]
                grads = [p.grad.clone() for p in net.parameters()]
                tracker.step(loss)
                assert all(torch.equal(g, p.grad) for g, p in zip(grads, net.parameters(), strict=True))
                assert hooks == [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in net.modules()]
            if step == 4:
                random.random()
        if tracked:
            assert tracker.track.steps == [1, 3, 6]
            assert not any("failed" in m for m in tracker.track.measurements)
        modes = [m.training for m in net.modules()]
        return net.state_dict(), optimizer.state_dict(), modes, world()

    plain, tracked = train(False), train(True)
    assert plain[2] == tracked[2]
    assert str(plain[3]) == str(tracked[3])
    assert torch.equal(plain[3][0], tracked[3][0])
    for name, value in plain[0].items():
        assert torch.equal(value, tracked[0][name]), name
    for key, state in plain[1]["state"].items():
        for name, value in state.items():
            assert value is None or torch.equal(value, tracked[1]["state"][key][name])


def test_numbers_against_dense_matrices_along_a_run():
    """λ_max, λ_min, the preconditioned one, masses, traces' and norms' errors: float64, every matrix formed."""
    torch.manual_seed(0)
    net = runs.model(width=4, depth=1).double()
    optimizer = runs.adamw(net, lr=1e-2, weight_decay=0.1)
    tracker = Tracker(net, HELD, optimizer, every=4, path=None, parts=("eigenvalues", "optimizer", "blocks"))
    land = cl.Landscape(net, HELD)
    seen = 0
    for _, batch in zip(range(16), runs.data(), strict=False):
        loss = runs.loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = tracker.step(loss)
        if found is None:
            continue
        seen += 1
        H = cl.hessian(land).dense()
        values, vectors = torch.linalg.eigh(H)
        top, low = found["lambda_max"], found["lambda_min"]
        for got, true in ((top, values[-1]), (low, values[0])):
            assert got["converged"]
            # an eigenvalue lies within a residual, and a Ritz value is far nearer to it: its error is of second order
            assert abs(got["value"] - true.item()) <= 0.1 * got["error"] + 1e-9
            assert got["error"] <= 1.001e-2 * abs(got["value"])
        g = land.gradient()
        # an eigenvector lies within the angle residual / gap
        turned = top["error"] / (values[-1] - values[-2]).item()
        cosine = (vectors[:, -1] @ g / g.norm()).abs().item()
        assert abs(found["alignment"]["top"] ** 0.5 - cosine) <= turned
        assert found["alignment"]["gradient_curvature"] == pytest.approx(
            (g @ H @ g / (g @ g)).item(), rel=1e-9
        )
        P = []
        for p in net.parameters():
            state = optimizer.state[p]
            t = state["step"].item()
            v = state["exp_avg_sq"] / (1 - 0.999**t)
            P.append((1 - 0.9**t) * (v.sqrt() + 1e-8))
        named = dict(zip([n for n, _ in net.named_parameters()], P, strict=True))
        S = land.blocks.from_parameters(named).rsqrt()
        true = torch.linalg.eigvalsh(S[:, None] * H * S)[-1].item()
        seen_by = found["preconditioned"]
        assert seen_by["value"] == pytest.approx(true, rel=1e-3)
        assert seen_by["threshold"] == pytest.approx(38 / 1e-2)
        assert found["decay"]["curvature"] == pytest.approx(0.1 * 19)
        assert seen_by["ratio"] == pytest.approx((seen_by["value"] + 1.9) / 3800)
        assert found["descent_threshold"] == 200
        assert sum(found["blocks"]["mass"]) == pytest.approx(1, abs=1e-6)
        names = tracker.track.header["blocks"]
        rows = land.blocks.positions(land.blocks.select("layer.0.attn.query"))
        at = names.index("layer.0.attn.query")
        share = vectors[rows, -1].norm().item()
        assert abs(found["blocks"]["mass"][at] ** 0.5 - share) <= turned
    assert seen == 5
    # the same probes every time: over many of them, the means are the traces and norms
    many = Tracker(net, HELD, optimizer, path=None, parts=("blocks",), samples=256).measure()["blocks"]
    H = cl.hessian(land).dense()
    for at, group in enumerate(groups(land.blocks)):
        rows = land.blocks.positions(Blocks(land.blocks[name] for name in group.blocks))
        assert abs(many["trace"][at] - H[rows, rows].sum().item()) <= 5 * many["trace_error"][at] + 1e-12
        assert abs(many["row_norm"][at] - H[rows].norm().item()) <= 5 * many["row_norm_error"][at] + 1e-12


def test_a_warm_start_does_not_hide_a_new_largest_eigenvalue():
    """Earlier eigenvectors are eigenvectors still, but another direction has become sharper."""
    gauge = Tracker(runs.model(width=8, depth=1).double(), HELD, path=None)._gauge
    n = 300
    values = torch.linspace(-1, 1, n, dtype=torch.float64)
    values[0], values[-1] = -3, 5
    from curvlens.structured import Dense

    gauge.H = Dense(torch.diag(values))
    first = gauge._search(gauge.H, 2, "both", None)
    values[150] = 12.0
    second = gauge._search(Dense(torch.diag(values)), 2, "both", first.vectors)
    assert second.values.tolist() == pytest.approx([12.0, -3.0], rel=1e-3)


def test_every_few_steps_or_on_a_budget():
    pace = Pace(every=10, budget=None)
    assert [step for step in range(1, 41) if pace.due(step, step == 1)] == [1, 10, 20, 30, 40]
    for budget, cost, step_time in ((0.05, 3.0, 0.1), (0.05, 0.02, 0.1), (0.2, 1.0, 0.01), (0.01, 7.0, 0.5)):
        pace, now, count = Pace(every=10, budget=budget), 0.0, 0
        pace.clock = lambda: now  # noqa: B023
        rng = random.Random(0)
        for step in range(1, 20_001):
            now += step_time * rng.uniform(0.5, 2)
            pace.tick()
            if pace.due(step, step == 1):
                now += cost * rng.uniform(0.7, 1.4)
                pace.spent()
                count += 1
        assert count >= 4
        assert pace.share == pytest.approx(budget, rel=0.25)


def test_the_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "deep" / "track.jsonl"
    net = runs.model(width=8, depth=1)
    tracker = runs.train(net, runs.adamw(net), 9, every=4, path=path)
    tracker.mark("my own event")
    again = Track.read(path)
    assert again.steps == tracker.track.steps == [1, 4, 8]
    assert again.measurements == json.loads(json.dumps(tracker.track.measurements))
    assert again.marks[-1] == (9, "my own event")
    steps, losses = again.training()
    assert steps == list(range(1, 10))  # the last after the last measurement
    assert losses == tracker.track.training()[1]
    # cut in the midst of a line, as by a crash
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"kind": "measurement"') + 60])
    assert Track.read(path).steps == [1, 4]
    Tracker(net, HELD, path=path).measure()
    assert all(json.loads(line) for line in path.read_text().splitlines())
    path.write_text("no json\n{}\n")
    with pytest.raises(ValueError, match="another in line 1"):
        Track.read(path)


def test_going_on_from_a_checkpoint(tmp_path):
    """Steps 1 to 12, saved at 6: what was measured after is superseded, what was before stays."""
    path = tmp_path / "t.jsonl"
    net = runs.model(width=8, depth=1)
    optimizer = runs.adamw(net)
    options = {"every": 2, "path": path, "parts": ("eigenvalues",)}

    def go(tracker, steps):
        for _ in steps:
            loss = runs.loss_of(net, next(runs.data()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracker.step(loss)

    first = Tracker(net, HELD, optimizer, **options)
    go(first, range(6))
    state = json.loads(json.dumps(first.state_dict()))
    go(first, range(6))
    assert Track.read(path).steps == [1, 2, 4, 6, 8, 10, 12]
    second = Tracker(net, HELD, optimizer, **options)
    second.load_state_dict(state)
    go(second, range(3))
    second.close()
    assert Track.read(path).steps == second.track.steps == [1, 2, 4, 6, 8]
    assert Track.read(path).training()[0] == list(range(1, 10))
    # a new run on the same path begins anew
    third = Tracker(net, HELD, optimizer, **options)
    go(third, range(2))
    assert Track.read(path).steps == third.track.steps == [1, 2]


KILLED = """
import sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from training import runs
net = runs.model(width=8, depth=1)
runs.train(net, runs.adamw(net), 10**6, every=2, path={path!r})
"""


def test_kill_9_loses_at_most_the_current_measurement(tmp_path):
    path = tmp_path / "t.jsonl"
    code = KILLED.format(tests=str(Path(__file__).parent.parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (path.exists() and path.read_text().count('"measurement"') >= 4):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()  # signal 9
        process.wait()
        process.stderr.close()
    track = Track.read(path)
    assert track.steps == [1, *range(2, 2 * len(track.steps) - 1, 2)]  # none is missing
    assert len(track.steps) >= 4


def test_ctrl_c_ends_the_training_and_leaves_the_model(monkeypatch):
    net = runs.model(width=8).train()
    tracker = Tracker(net, HELD, path=None, parts=("eigenvalues",))
    apply = type(tracker._gauge.H).apply

    def interrupted(self, stack):
        os.kill(os.getpid(), signal.SIGINT)
        return apply(self, stack)

    monkeypatch.setattr(type(tracker._gauge.H), "apply", interrupted)
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        tracker.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert all(m.training for m in net.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_a_measurement_that_fails_does_not_end_the_training(tmp_path):
    net = runs.model(width=8, depth=1)
    optimizer = runs.adamw(net)
    tracker = Tracker(net, HELD, optimizer, every=1, path=tmp_path / "t.jsonl")
    tracker.step()
    with torch.no_grad():
        next(net.parameters())[0] = float("nan")
    with pytest.warns(UserWarning, match="point failed at step 2: FloatingPointError"):
        found = tracker.step(float("nan"))
    assert "NaN" in found["failed"]["point"]
    assert (2, "the loss is not a number") in tracker.events
    again = Track.read(tmp_path / "t.jsonl")
    assert again.steps == [1, 2]
    assert np.isnan(again.training()[1]).tolist() == [True]
    assert np.isnan(again.numbers("loss")).tolist() == [False, True]


def test_what_does_not_fit_is_refused_before_the_training():
    net = runs.model(width=8)
    for wrong, options in (
        ("at least one batch", {"batches": []}),
        ("token ids from 0 to 11", {"batches": torch.full((2, 5), 77)}),
        ("expected parts of eigenvalues", {"parts": ("spectrum",)}),
        ("at least 1 step", {"every": 0}),
        ("share of the training time", {"budget": 50}),
        ("expected a SummaryWriter", {"writers": 3}),
    ):
        with pytest.raises((ValueError, TypeError), match=wrong):
            Tracker(net, **{"batches": HELD, "path": None, **options})
    other = runs.adamw(runs.model(width=8))
    with pytest.raises(ValueError, match="none of them in it"):
        Tracker(net, HELD, other, path=None)


def test_events_of_rate_and_loss():
    net = runs.model(width=8, depth=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracker = Tracker(net, HELD, optimizer, every=1000, path=None, parts=())
    rng = random.Random(0)
    for step in range(1, 101):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, step / 30)
        tracker.step(50.0 if step in (60, 61) else 3 + 0.05 * rng.random())
    assert tracker.events == [(30, "warm-up ends"), (60, "the loss spikes")]
    assert tracker.track.steps == [1, 60]  # the spike is measured at once


def test_writers(tmp_path):
    from curvlens.training.writers import scalars

    net = runs.model(width=8, depth=1)
    seen = []

    class Run:
        """As a run of Weights & Biases."""

        def __init__(self):
            self.defined, self.logged = [], []

        def define_metric(self, name, step_metric=None):
            self.defined.append((name, step_metric))

        def log(self, numbers):
            self.logged.append(numbers)

    run = Run()
    targets = [lambda step, numbers: seen.append((step, numbers)), run]
    tracker = Tracker(net, HELD, runs.adamw(net), every=1, path=None, parts=("eigenvalues",), writers=targets)
    found = tracker.step(2.0)
    assert seen[0][0] == 1
    assert seen[0][1]["curvature/lambda_max"] == found["lambda_max"]["value"]
    assert seen[0][1] == scalars(found, tracker.track.header["blocks"])
    assert run.defined == [("curvature/step", None), ("curvature/*", "curvature/step")]
    assert run.logged == [{**seen[0][1], "curvature/step": 1}]

    def broken(step, numbers):
        raise OSError("disk full")

    tracker = Tracker(net, HELD, every=1, path=None, parts=(), writers=broken)
    with pytest.warns(UserWarning, match="disk full"):
        tracker.step()


def test_tensorboard(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = runs.model(width=8, depth=1)
    with board.SummaryWriter(tmp_path) as target:
        tracker = Tracker(net, HELD, every=1, path=None, parts=("eigenvalues",), writers=target)
        values = [tracker.step()["lambda_max"]["value"] for _ in range(2)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    read = [(e.step, e.value) for e in events.Scalars("curvature/lambda_max")]
    assert read == [(1, pytest.approx(values[0])), (2, pytest.approx(values[1]))]


def test_a_running_wandb_is_found(monkeypatch):
    import types

    logged = []
    run = types.SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    Tracker(runs.model(width=8), HELD, every=1, path=None, parts=()).step()
    assert logged[0]["curvature/step"] == 1
