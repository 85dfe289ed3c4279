"""In Lightning: the same weights, one measurement a step of the optimizer, loggers, resume."""

import warnings

import pytest
import torch

from curvlens.training.record import Track
from curvlens.training.tracker import Tracker
from training import runs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    L = pytest.importorskip("pytorch_lightning")
HELD = [next(runs.data(size=2, seed=9))]
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = runs.model(width=4, depth=1)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, ids):
        return self.drop(self.net(ids))

    def training_step(self, batch, index):
        return runs.loss_of(self, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Logger(L.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, metrics))


def fit(folder, tracker_of=None, logger=False, resume=None, steps=6, **more):
    torch.manual_seed(0)
    module = Module()
    tracker = None if tracker_of is None else tracker_of(module)
    data = [batch for _, batch in zip(range(40), runs.data(), strict=False)]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    options = {
        "max_steps": steps, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "default_root_dir": folder, "logger": logger, **more,
    }  # fmt: skip
    callbacks = [] if tracker is None else [tracker.lightning()]
    trainer = L.Trainer(callbacks=callbacks, **options)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, tracker, trainer


def test_lightning_trains_as_without(tmp_path):
    plain, _, _ = fit(tmp_path, enable_checkpointing=False)
    logger = Logger()
    path = tmp_path / "t.jsonl"
    module, _, _ = fit(
        tmp_path, lambda m: Tracker(m, HELD, every=2, path=path), logger=logger, enable_checkpointing=False
    )
    for p, q in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(p, q)
    track = Track.read(path)
    assert track.steps == [1, 2, 4, 6]
    assert not any("failed" in m for m in track.measurements)
    assert track.header["optimizer"] == "AdamW"
    steps, found = track.training()
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(2 < loss < 4 for loss in found)  # the mean over micro-batches, not a share of it
    assert 0 < track.measurements[-1]["clipped"] <= 1
    logged = [step for step, metrics in logger.seen if "curvature/lambda_max" in metrics]
    assert len(logged) == 4


def test_lightning_goes_on_from_a_checkpoint(tmp_path):
    path = tmp_path / "t.jsonl"
    build = lambda m: Tracker(m, HELD, every=2, path=path, parts=("eigenvalues",))  # noqa: E731
    _, _, trainer = fit(tmp_path, build, steps=4)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    _, tracker, _ = fit(tmp_path, build, steps=8, resume=tmp_path / "c.ckpt")
    assert Track.read(path).steps == tracker.track.steps == [1, 2, 4, 6, 8]
    assert tracker._measured == 5
