"""In the Trainer: the same weights, its own log kept, state over a resume, real settings."""

import json

import pytest
import torch

from curvlens.training.record import Track
from curvlens.training.tracker import Tracker

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def small_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )  # its dropout is on: 0.1
    return transformers.GPT2LMHeadModel(config)


def sentences(count=24):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 23, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


HELD = [{"input_ids": torch.stack([s["input_ids"] for s in sentences(30)[24:26]])}]


def trainer(folder, model, callbacks=(), **more):
    arguments = {
        "max_steps": 12, "per_device_train_batch_size": 4, "logging_steps": 2, "save_strategy": "no", "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2, "warmup_steps": 4, "seed": 5, **more,
    }  # fmt: skip
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=sentences(),
        callbacks=list(callbacks),
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(transformers.trainer_callback.PrinterCallback, "on_log", lambda *a, **k: None)


def losses(run):
    return [(h["step"], h["loss"]) for h in run.state.log_history if "loss" in h]


@pytest.mark.parametrize(
    "settings", [{}, {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}]
)
def test_the_trainer_trains_as_without(settings, tmp_path):
    plain = trainer(tmp_path / "a", small_gpt2(), **settings)
    plain.train()
    model = small_gpt2()
    tracker = Tracker(model, HELD, every=4, path=tmp_path / "t.jsonl")
    tracked = trainer(tmp_path / "b", model, [tracker.hugging_face()], **settings)
    tracked.train()
    for (name, p), q in zip(plain.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert losses(plain) == losses(tracked)
    track = Track.read(tmp_path / "t.jsonl")
    assert track.steps == [1, 4, 8, 12]
    assert not any("failed" in m for m in track.measurements)
    assert track.header["optimizer"] == "AdamW"
    assert track.training() == tuple(map(list, zip(*losses(tracked), strict=True)))
    assert (4, "warm-up ends") in track.events
    assert track.header["clip"] == settings.get("max_grad_norm", 1.0)
    # measured in full precision whatever the training's
    import curvlens as cl

    land = cl.Landscape(model.eval(), HELD)
    model.__dict__.pop("forward", None)  # what mixed precision put over it
    again = Tracker(model, HELD, path=None, parts=("eigenvalues",)).measure()
    assert track.measurements[-1]["lambda_max"]["value"] == pytest.approx(
        again["lambda_max"]["value"], rel=1e-3
    )
    assert track.measurements[-1]["loss"] == pytest.approx(land.value().item(), rel=1e-6)


def test_measurements_reach_the_reporters_and_no_log_is_lost(tmp_path):
    class Reporter(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append((state.global_step, set(logs)))

    plain = trainer(tmp_path / "a", small_gpt2())
    plain.train()
    model, reporter = small_gpt2(), Reporter()
    tracker = Tracker(model, HELD, every=2, path=None, parts=("eigenvalues", "optimizer"))
    run = trainer(tmp_path / "b", model, [reporter])
    run.add_callback(tracker.hugging_face(run))
    run.train()
    assert losses(plain) == losses(run)  # every other step both log: the Trainer's own is not switched off
    steps = [step for step, names in reporter.seen if "curvature/lambda_max" in names]
    assert steps == [1, 2, 4, 6, 8, 10, 12]
    assert any("curvature/of_the_limit" in names for _, names in reporter.seen)


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_trainer_goes_on_with_the_record(restore, tmp_path):
    path = tmp_path / "t.jsonl"

    def run(steps, resume=None):
        model = small_gpt2()
        tracker = Tracker(model, HELD, every=3, path=path, parts=("eigenvalues",))
        found = trainer(
            tmp_path / "run", model, [tracker.hugging_face()], max_steps=steps, save_strategy="steps", save_steps=4,
            restore_callback_states_from_checkpoint=restore, lr_scheduler_type="constant", warmup_steps=0,
        )  # fmt: skip
        found.train(resume_from_checkpoint=resume)
        return model, tracker

    straight, _ = run(12)
    expected = Track.read(path).numbers("lambda_max", "value")
    state = json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TrackerCallback"]["attributes"]["kept"]["steps"] == 4
    again, tracker = run(12, str(tmp_path / "run/checkpoint-4"))
    assert [torch.equal(p, q) for p, q in zip(straight.parameters(), again.parameters(), strict=True)].count(
        False
    ) == 0
    track = Track.read(path)
    assert track.steps == tracker.track.steps == [1, 3, 6, 9, 12]
    # from there on eigenvectors start anew, and the numbers agree to their tolerance
    assert track.numbers("lambda_max", "value") == pytest.approx(expected, rel=1e-3)
    assert tracker.pace.training > 0
    assert tracker._measured == 5


def test_a_checkpoint_from_before_there_was_a_tracker(tmp_path):
    trainer(tmp_path / "run", small_gpt2(), save_strategy="steps", save_steps=4, max_steps=4).train()
    model = small_gpt2()
    tracker = Tracker(model, HELD, every=3, path=tmp_path / "t.jsonl", parts=("eigenvalues",))
    run = trainer(
        tmp_path / "run", model, [tracker.hugging_face()], save_strategy="steps", save_steps=4, max_steps=8
    )
    run.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert Track.read(tmp_path / "t.jsonl").steps == [5, 6]
    assert (tmp_path / "run/checkpoint-8").exists()
