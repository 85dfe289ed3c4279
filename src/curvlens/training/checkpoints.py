"""Tracking after the fact: the checkpoints of a run, in their order, through one tracker.

A folder of the Hugging Face Trainer (`checkpoint-100/` with `model.safetensors`, `optimizer.pt`, `trainer_state.json`),
or files of one's own (`step_100.pt`): a state dict, or a dictionary with "model" and "optimizer".
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlens.training.tracker import Tracker

NUMBER = re.compile(r"(\d+)(?!.*\d)")
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
Build = Callable[[], nn.Module]
SAME = (
    "loss",
    "scored_tokens",
    "dtype",
    "parameters",
    "parts",
    "samples",
    "seed",
)  # of all that one record holds


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path


def checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints in a folder, by the last number in their names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of checkpoints, got {str(folder)!r}")
    found = []
    for path in folder.iterdir():
        number = NUMBER.search(path.stem if path.is_file() else path.name)
        is_one = (path / "config.json").exists() if path.is_dir() else path.suffix in WEIGHTS
        if number and is_one:
            found.append(Checkpoint(int(number[1]), path))
    if not found:
        raise ValueError(
            f"expected checkpoints with their step in the name ('checkpoint-100/', 'step_100.pt'), got none in "
            f"{str(folder)!r}"
        )
    steps = [checkpoint.step for checkpoint in found]
    if len(set(steps)) < len(steps):
        raise ValueError(f"expected one checkpoint a step, got several of step {max(steps, key=steps.count)}")
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def track_checkpoints(
    found: Sequence[Checkpoint],
    model: nn.Module,
    batches: Any,
    path: str | Path | None = "track.jsonl",
    watch: Callable[[int, Checkpoint], None] | None = None,
    *,
    max_products: int | None = None,
    max_minutes: float | None = None,
    **options: Any,
) -> Tracker:
    """Measure every checkpoint; `model` is loaded with the weights of each. Options are those of `Tracker`.

    A record of the same folder that was broken off is gone on with: steps in it are not measured again. No checkpoint
    but the first is begun that would pass `max_products` or `max_minutes`, as far as the costliest so far tells.
    """
    budget = Budget(max_products, max_minutes)
    options["parts"] = options.get("parts") or ("eigenvalues", "optimizer", "blocks", "heads", "depth")
    load(model, found[0].path)
    tracker = Tracker(model.eval(), batches, None, 1, path=path, **options)
    done: set[int] = set()
    if path is not None and Path(path).exists() and Path(path).stat().st_size:
        settings = tracker.settings()
        tracker.restart(found[-1].step)
        _same(settings, tracker.track.header, Path(path))
        done = set(tracker.track.steps)
    for index, checkpoint in enumerate(found):
        if checkpoint.step in done:
            continue
        if not budget.allows(tracker.track.measurements):
            break
        if watch is not None:
            watch(index, checkpoint)
        load(model, checkpoint.path)
        tracker.optimizer, why = optimizer_of(model, checkpoint.path)
        tracker.left_out.pop("optimizer", None)
        if why:
            tracker.left_out["optimizer"] = why
        for step, loss, norm in _logged(checkpoint.path, tracker.track.training()[0]):
            tracker.handed.keep(step, loss, None, norm)
        tracker.steps = checkpoint.step
        budget.spent(tracker.measure())
    tracker.track.measurements.sort(key=lambda measurement: measurement["step"])
    return tracker


class Budget:
    """What one run may spend on checkpoints. The first is always measured, so that every run comes further."""

    def __init__(self, products: int | None, minutes: float | None):
        self.products, self.minutes = products, minutes
        self.used = self.measured = 0
        self.began = time.monotonic()

    def allows(self, measurements: Sequence[Mapping[str, Any]]) -> bool:
        """Whether one more that costs as much as the costliest of those known fits in."""
        if not self.measured:
            return True
        products = self.used + max(m.get("products", 0) for m in measurements)
        seconds = time.monotonic() - self.began + max(m.get("seconds", 0.0) for m in measurements)
        return (self.products is None or products <= self.products) and (
            self.minutes is None or seconds <= 60 * self.minutes
        )

    def spent(self, measurement: Mapping[str, Any]) -> None:
        self.used += measurement.get("products", 0)
        self.measured += 1


def _same(settings: Mapping[str, Any], recorded: Mapping[str, Any], path: Path) -> None:
    """Numbers of other data or settings do not belong on one curve."""
    for key in SAME:
        if recorded.get(key) != settings[key]:
            raise ValueError(
                f"expected {key} = {recorded.get(key)} to go on with {str(path)!r}, got {settings[key]}; "
                "measure as before, or keep another record"
            )


def load(model: nn.Module, path: Path) -> None:
    """The weights of a checkpoint into a model, all of them."""
    state = _model_state(_weights(path))
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # other shapes
        raise ValueError(
            f"expected the weights of this model in {str(path)!r}, got others: {str(error).splitlines()[-1].strip()}"
        ) from error
    tied = {name for name, _ in model.named_parameters()}  # a tied name may be missing, not a parameter
    lost = [name for name in missing if name in tied]
    if lost or unexpected:
        raise ValueError(
            f"expected the weights of this model in {str(path)!r}, got "
            + (f"none for {lost[0]!r}" if lost else f"{unexpected[0]!r} besides")
        )


def _weights(path: Path) -> Any:
    if path.is_dir():
        files = [*sorted(path.glob("model*.safetensors")), *sorted(path.glob("pytorch_model*.bin"))]
        if not files:
            raise ValueError(f"expected model.safetensors or pytorch_model.bin in {str(path)!r}, got neither")
        return {name: tensor for file in files for name, tensor in _weights(file).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _model_state(content: Any) -> Mapping[str, Any]:
    for name in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return content[name]
    if not isinstance(content, Mapping):
        raise ValueError(f"expected a state dict, or one under 'model', got {type(content).__name__}")
    return content


def optimizer_of(model: nn.Module, path: Path) -> tuple[torch.optim.Optimizer | None, str]:
    """The optimizer of a checkpoint with its state, and if there is none, why."""
    if path.is_dir():
        file = path / "optimizer.pt"
        if not file.exists():
            return None, "no optimizer.pt in the checkpoint"
        return rebuilt(model, torch.load(file, map_location="cpu", weights_only=True))
    saved = _optimizer_state(_weights(path) if path.suffix != ".safetensors" else {})
    return (None, "no optimizer in the checkpoint") if saved is None else rebuilt(model, saved)


def saved_optimizer(model: nn.Module, path: Path) -> torch.optim.Optimizer:
    """The optimizer of a file: its `state_dict()`, or a checkpoint that has one; or of a folder of the Trainer."""
    if path.is_dir():
        made, why = optimizer_of(model, path)
    elif not path.is_file():
        raise FileNotFoundError(f"expected a file with the state of an optimizer, got no file {str(path)!r}")
    else:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch each have their own
            raise ValueError(
                f"expected the state of an optimizer in {str(path)!r}, got what cannot be read as that; "
                "torch.save(optimizer.state_dict(), path) writes one"
            ) from error
        saved = _optimizer_state(content)
        made, why = (None, "no optimizer in the file") if saved is None else rebuilt(model, saved)
    if made is None:
        raise ValueError(
            f"expected the state of this model's optimizer in {str(path)!r}, got none that serves: {why}; "
            "torch.save(optimizer.state_dict(), path) writes one"
        )
    return made


def _optimizer_state(content: Any) -> Mapping[str, Any] | None:
    """An optimizer's state dict: the content itself, or what it has under a name."""
    if not isinstance(content, Mapping):
        return None
    kept = [content, *(content.get(name) for name in ("optimizer", "optimizer_state_dict"))]
    return next((k for k in kept if isinstance(k, Mapping) and {"state", "param_groups"} <= k.keys()), None)


def rebuilt(model: nn.Module, saved: Mapping[str, Any]) -> tuple[torch.optim.Optimizer | None, str]:
    """The optimizer of a state dict, and if there is none, why.

    Its kind is told by what it keeps. A state has no names: parameters are taken in the order of the model, or, as the
    Trainer has them, those with weight decay first; the shapes of the state must agree.
    """
    groups, state = saved["param_groups"], saved["state"]
    for names in _orders(model):
        parameters = [model.get_parameter(name) for name in names]
        if _agree(parameters, groups, state):
            break
    else:
        return None, "the optimizer's state does not fit the model's parameters"
    kind = _kind(groups[0], state)
    if kind is None and not state:
        return None, "the optimizer has not taken a step"
    if kind is None:
        return None, "an optimizer of another kind than SGD, RMSprop, Adam and AdamW"
    made = kind([{"params": [parameters[i] for i in group["params"]]} for group in groups], lr=1e-3)
    made.load_state_dict(saved)
    return made, ""


def _orders(model: nn.Module) -> list[list[str]]:
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
    plain = [name for name in trained if name not in norms and not name.endswith("bias")]
    return [trained, [*plain, *(name for name in trained if name not in set(plain))]]


def _agree(parameters: list[nn.Parameter], groups: Any, state: Any) -> bool:
    indices = [i for group in groups for i in group["params"]]
    if sorted(indices) != list(range(len(parameters))):
        return False
    return all(
        value.shape == parameters[int(i)].shape
        for i, kept in state.items()
        for key, value in kept.items()
        if key != "step" and isinstance(value, torch.Tensor)
    )


def _kind(group: Mapping[str, Any], state: Mapping[Any, Any]) -> Any:
    kept = set(next(iter(state.values()), {}))
    if "betas" in group and {"exp_avg", "exp_avg_sq"} <= kept:
        # AdamW and Adam keep the same; from torch 2.7 the group says which, before that it is taken for AdamW
        return torch.optim.AdamW if group.get("decoupled_weight_decay", True) else torch.optim.Adam
    if "square_avg" in kept:
        return torch.optim.RMSprop
    return torch.optim.SGD if "momentum" in group and "nesterov" in group else None


def _logged(path: Path, known: Sequence[int]) -> list[tuple[int, float, float | None]]:
    """What the Trainer has logged up to a checkpoint and is not in the record: step, loss, gradient norm."""
    file = path / "trainer_state.json"
    if not (path.is_dir() and file.exists()):
        return []
    history = json.loads(file.read_text())["log_history"]
    after = max(known, default=0)
    return [(h["step"], h["loss"], h.get("grad_norm")) for h in history if "loss" in h and h["step"] > after]
