"""`curvlens track`: the checkpoints of a run, after the fact."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from curvlens.cli import run
from curvlens.training.checkpoints import checkpoints, load, optimizer_of, track_checkpoints
from curvlens.training.record import Track
from training import runs

BUILD = """
import sys
import torch
sys.path.insert(0, {tests!r})
from training import runs

def build():
    return runs.model(width=4, depth=1, seed=77)

batches = [next(runs.data(size=2, seed=9))]
"""
FAST = ("--parts", "eigenvalues,optimizer")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run with its live track, and checkpoints at steps 1, 4 and 8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BUILD.format(tests=str(runs.__file__.rsplit("/training", 1)[0])))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "saved").mkdir()
    net = runs.model(width=4, depth=1)
    optimizer = runs.adamw(net, weight_decay=0.1)
    from curvlens.training.tracker import Tracker

    held = [next(runs.data(size=2, seed=9))]
    tracker = Tracker(net, held, optimizer, every=4, path=None, parts=("eigenvalues", "optimizer"))
    for step, batch in zip(range(1, 9), runs.data(), strict=False):
        runs.loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if tracker.step() is not None:
            torch.save(
                {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"saved/step_{step}.pt"
            )
    return tracker


def command(*more):
    return run(["track", "saved", "--model", "mine:build", "--data", "mine:batches", "--quiet", *FAST, *more])


def test_the_same_numbers_as_while_it_trained(own, capsys):
    assert command("--json") == 0
    found = json.loads(capsys.readouterr().out)
    live = own.track
    assert [m["step"] for m in found["measurements"]] == live.steps == [1, 4, 8]
    for m, other in zip(found["measurements"], live.measurements, strict=True):
        assert m["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert m["decay"] == other["decay"]
        for key in ("lambda_max", "preconditioned"):
            assert m[key]["value"] == pytest.approx(other[key]["value"], rel=1e-3)
        assert m["preconditioned"]["threshold"] == pytest.approx(other["preconditioned"]["threshold"])
    assert "Sharpness through training" in Path("out/track.html").read_text()
    # again: nothing is measured twice; a new checkpoint is
    shutil.copy("saved/step_8.pt", "saved/step_12.pt")
    size = len(Track.read("out/track.jsonl").measurements)
    assert command() == 0
    assert len(Track.read("out/track.jsonl").measurements) == size + 1
    assert Path("out/track.jsonl").read_text().count('"step": 4,') == 1


def test_exit_codes(own, capsys, monkeypatch):
    assert command("--dry-run") == 0
    assert "step_4.pt" in capsys.readouterr().out
    assert run(["track", "nowhere", "--data", "mine:batches"]) == 2
    assert run(["track", "saved", "--data", "mine:batches"]) == 2  # no model
    assert run(["track", "saved", "--model", "mine:build"]) == 2  # no data
    assert command("--dtype", "int8") == 2
    assert command("--parts", "colour") == 2
    assert run(["track", "saved", "--model", "mine:none", "--data", "mine:batches"]) == 2
    torch.save(runs.model(width=6, depth=1).state_dict(), "saved/step_2.pt")
    assert command() == 2
    assert capsys.readouterr().out == ""
    Path("saved/step_2.pt").unlink()
    from curvlens.training.tracker import Tracker

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Tracker, "measure", interrupted)
        assert command() == 3
    assert command("--fail-on", "problem,warning") == 0


def test_a_run_ends_where_its_budget_does_and_goes_on(own, capsys):
    def steps():
        return Track.read("state/track.jsonl").steps

    assert command("--resume", "state", "--max-products", "1") == 0  # one at least
    assert steps() == [1]
    assert "2 of 3 checkpoints are left, from step 4" in capsys.readouterr().err
    assert not Path("out/track.jsonl").exists()
    assert command("--resume", "state", "--max-minutes", "0", "--strict") == 4  # not all is measured
    assert steps() == [1, 4]
    each = [m["products"] for m in Track.read("state/track.jsonl").measurements]
    assert all(m["lambda_max"]["products"] <= n for m, n in zip(own.track.measurements, each, strict=False))
    assert command("--resume", "state", "--max-products", "100000", "--max-minutes", "60", "--strict") == 0
    assert steps() == [1, 4, 8]
    # a fresh run stays within its products, and is as one without limits
    twice = str(2 * max(each))
    assert command("--resume", "again", "--max-products", twice) == 0
    found = Track.read("again/track.jsonl")
    assert found.steps == [1, 4]
    assert sum(m["products"] for m in found.measurements) <= int(twice)
    capsys.readouterr()
    assert command("--resume", "state", "--samples", "5") == 2
    assert "expected samples = 2 to go on" in capsys.readouterr().err
    assert command("--resume", "state", "--dtype", "float64") == 2
    assert steps() == [1, 4, 8]


def test_a_finding_fails(own, capsys):
    for path in Path("saved").iterdir():
        net = runs.model(width=4, depth=1)
        fast = torch.optim.SGD(net.parameters(), lr=1e4)
        torch.save({"model": net.state_dict(), "optimizer": fast.state_dict()}, path)
    assert command("--fail-on", "spike") == 0
    capsys.readouterr()
    assert command("--fail-on", "rate-beyond-the-limit") == 1
    assert "--fail-on: The learning rate is beyond its limit" in capsys.readouterr().err
    assert command("--fail-on", "warning") == 1  # and what is graver
    assert command("--fail-on", "colour") == 2


def test_strict_asks_for_convergence(own, capsys, monkeypatch):
    from curvlens.training import gauge

    assert command("--resume", "enough", "--strict") == 0
    monkeypatch.setattr(gauge, "MOST_PRODUCTS", 4)
    assert command("--resume", "few") == 0
    assert not Track.read("few/track.jsonl").measurements[0]["lambda_max"]["converged"]
    capsys.readouterr()
    assert command("--resume", "few", "--strict") == 4
    assert "--strict" in capsys.readouterr().err


def test_a_folder_of_the_trainer(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from training.test_hugging_face import HELD, small_gpt2, trainer

    model = small_gpt2()
    live = trainer(tmp_path / "run", model, save_strategy="steps", save_steps=6, weight_decay=0.1)
    live.train()
    found = checkpoints(tmp_path / "run")
    assert [c.step for c in found] == [6, 12]
    fresh = transformers.AutoModelForCausalLM.from_pretrained(found[0].path, dtype="float32")
    load(fresh, found[1].path)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), model.parameters(), strict=True))
    optimizer, why = optimizer_of(fresh, found[1].path)
    assert why == ""
    assert type(optimizer) is torch.optim.AdamW
    # the Trainer's groups, parameter by parameter
    inner = live.optimizer.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    mine = {id(p): name for name, p in fresh.named_parameters()}
    for group, other in zip(inner.param_groups, optimizer.param_groups, strict=True):
        assert [names[id(p)] for p in group["params"]] == [mine[id(p)] for p in other["params"]]
        assert group["weight_decay"] == other["weight_decay"]
    tracker = track_checkpoints(found, fresh, HELD, None, parts=("eigenvalues", "optimizer"))
    assert tracker.track.steps == [6, 12]
    first, last = tracker.track.measurements
    assert first["preconditioned"]["converged"]
    assert last["rate"] == 0  # where the schedule ends, nothing is unstable
    assert "preconditioned" not in last
    assert tracker.track.training()[0] == [2, 4, 6, 8, 10, 12]
    shutil.copytree(found[0].path, tmp_path / "run/copy-6")
    with pytest.raises(ValueError, match="several of step 6"):
        checkpoints(tmp_path / "run")
