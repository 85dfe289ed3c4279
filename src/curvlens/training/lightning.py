"""The tracker as a callback of Lightning, of either of its packages.

Measured in `on_train_batch_end` when the step has changed, after the scheduler: gradient accumulation makes no
difference. Gradient norms are taken in `on_before_optimizer_step`, which here runs before clipping.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from curvlens.training.tracker import Tracker
from curvlens.training.writers import scalars

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback(tracker: Tracker) -> Any:
    """A callback for the Lightning that the program uses."""
    names = [name for name in PACKAGES if name in sys.modules] or list(PACKAGES)
    for name in names:
        try:
            base = import_module(name).Callback
        except ImportError:
            continue
        return type("TrackerCallback", (_Hooks, base), {})(tracker)
    raise ImportError("expected Lightning for its callback, got neither package; pip install lightning")


class _Hooks:
    def __init__(self, tracker: Tracker):
        self.tracker = tracker
        self._step = 0
        self._loss: Any = None  # the sum over micro-batches, each divided by their number
        self._norm: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state_dict)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        held = {id(p) for p in self.tracker.model.parameters()}
        for optimizer in trainer.optimizers:
            if any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
                self.tracker.attach(None, optimizer)
                break
        if self.tracker.clip is None and trainer.gradient_clip_val:
            self.tracker.clip = float(trainer.gradient_clip_val)
        self._step = trainer.global_step
        self.tracker.restart(self._step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.tracker.clip is not None:
            gradients = [p.grad for p in self.tracker.model.parameters() if p.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        loss, self._loss = self._loss, None
        if not trainer.is_global_zero:
            return
        found = self.tracker.step(loss, self._norm, step=self._step)
        if found is not None:
            numbers = scalars(found, self.tracker.track.header.get("blocks", ()))
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.tracker.close()
