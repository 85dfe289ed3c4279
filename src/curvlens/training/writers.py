"""Where measurements go beside the record: TensorBoard, Weights & Biases, or a function of one's own."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from curvlens.training.record import reason

Writer = Callable[[int, Mapping[str, float]], None]
SERIES = {
    "loss": ("loss",),
    "gradient_norm": ("gradient",),
    "lambda_max": ("lambda_max", "value"),
    "lambda_min": ("lambda_min", "value"),
    "descent_threshold": ("descent_threshold",),
    "preconditioned": ("preconditioned", "value"),
    "preconditioned_threshold": ("preconditioned", "threshold"),
    "of_the_limit": ("preconditioned", "ratio"),
    "gradient_curvature": ("alignment", "gradient_curvature"),
    "gradient_in_top": ("alignment", "top"),
    "averaged_lambda_max": ("averaged", "lambda_max", "value"),
    "averaged_loss": ("averaged", "loss"),
    "share_of_time": ("share",),
}


class Writers:
    """All of a run. Where none is given, a run of wandb under way is found by itself."""

    def __init__(self, targets: Any):
        given = targets if isinstance(targets, Sequence) else (targets,)
        self.writers: list[Writer] = [writer(target) for target in given]
        self._asked_wandb = bool(self.writers)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._asked_wandb and (run := running_wandb()) is not None:
            self._asked_wandb = True
            self.writers.append(writer(run))
        for write in self.writers:
            try:
                write(step, numbers)
            except Exception as error:  # a full disk of a dashboard must not end a training
                warnings.warn(f"curvlens.Tracker: writing failed: {reason(error)}", stacklevel=4)


def scalars(measurement: Mapping[str, Any], groups: Sequence[str]) -> dict[str, float]:
    """The numbers of a measurement by name, "curvature/lambda_max"; those of groups "curvature/trace/<group>"."""
    found = {}
    for name, path in SERIES.items():
        value: Any = measurement
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and math.isfinite(value):
            found[f"curvature/{name}"] = float(value)
    blocks = measurement.get("blocks") or {}
    for key in ("trace", "row_norm"):
        for group, value in zip(groups, blocks.get(key) or (), strict=False):
            if math.isfinite(value):
                found[f"curvature/{key}/{group}"] = value
    return found


def writer(target: Any) -> Writer:
    """A function of step and numbers for a `SummaryWriter`, a run of Weights & Biases, or such a function itself."""
    if hasattr(target, "add_scalar"):
        return _tensorboard(target)
    if hasattr(target, "define_metric") and hasattr(target, "log"):
        return _wandb(target)
    if callable(target):
        return target
    raise TypeError(
        "expected a SummaryWriter, a run of wandb, or a function of step and {name: number} to write to, "
        f"got {type(target).__name__}"
    )


def _tensorboard(target: Any) -> Writer:
    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            target.add_scalar(name, value, step)
        target.flush()

    return write


def _wandb(run: Any) -> Writer:
    # its own steps only go forward, and belong to the loop: ours are a metric of their own
    run.define_metric("curvature/step")
    run.define_metric("curvature/*", step_metric="curvature/step")

    def write(step: int, numbers: Mapping[str, float]) -> None:
        run.log({**numbers, "curvature/step": step})

    return write


def running_wandb() -> Any:
    """The run of Weights & Biases that is under way, if the program uses it."""
    module = sys.modules.get("wandb")
    return getattr(module, "run", None)
