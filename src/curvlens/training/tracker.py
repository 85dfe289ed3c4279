"""Tracker: the curvature of a model while it trains, on a held batch, with the training as it would be without.

tracker = cl.Tracker(model, batches, optimizer, every=100)
for batch in loader:
    loss = …; loss.backward(); optimizer.step(); optimizer.zero_grad()
    tracker.step(loss)
"""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from curvlens.batches import reiterable
from curvlens.landscape import Landscape
from curvlens.training.calm import at_rest, plain_optimizer, unwrapped
from curvlens.training.gauge import PARTS, Gauge, attempt, chosen
from curvlens.training.handed import HandedOver
from curvlens.training.pace import Pace
from curvlens.training.record import Keeper, Track, reason
from curvlens.training.writers import Writers, scalars

if TYPE_CHECKING:
    from curvlens.report.data import Finding


class Tracker:
    """Measures curvature every so many steps of a training, and writes each measurement down at once.

    model      the model that trains; wrapped in DDP or compiled, if you like
    batches    held batches, the same at every measurement, as a `Landscape` takes them; a few sequences are enough
    optimizer  for the sharpness that it sees, its limit, weight decay; SGD, RMSprop, Adam, AdamW
    every      steps between measurements
    budget     in place of `every`: the share of the training time that tracking may take, 0.05 for 5 %
    path       the record, JSON lines; None keeps it in memory alone
    parts      what is measured, `{part: at every how many-th measurement}`, or names alone; `gauge.PARTS`
    tol        relative residual of eigenvalues
    samples    random probes of block traces and norms and of the propagation
    clip       the norm to which the loop clips gradients; then hand over norms, `step(loss, norm)`
    averaged   a module with averaged weights, as `swa_utils.AveragedModel`: its loss and sharpness are tracked too
    writers    a `SummaryWriter`, a run of wandb, or functions of step and numbers; a running wandb is found by itself

    What does not fit (batches, dropout aside) is refused here, before the training. Later nothing that fails in a
    measurement ends the training: it is written down as failed. The model is measured in evaluation mode, in full
    precision, without weight decay in H; weights, gradients, modes, random states and hooks stay as they are, bit for
    bit. `landscape`: `dtype`, `micro_batch` of the `Landscape`.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Any,
        optimizer: Any = None,
        every: int = 100,
        loss: Any = "auto",
        *,
        budget: float | None = None,
        path: str | Path | None = "track.jsonl",
        parts: Mapping[str, int] | Iterable[str] = PARTS,
        tol: float = 1e-2,
        samples: int = 2,
        seed: int = 0,
        clip: float | None = None,
        averaged: nn.Module | None = None,
        writers: Any = (),
        **landscape: Any,
    ):
        self.parts, self.pace = chosen(parts), Pace(every, budget)
        self.model = unwrapped(model)
        self.optimizer = plain_optimizer(optimizer)
        self.clip, self.tol, self.samples, self.seed = clip, tol, samples, seed
        self.averaged = None if averaged is None else unwrapped(averaged)
        self.steps = 0
        self.left_out: dict[str, str] = {}
        with at_rest(self.model):
            self._batches = list(reiterable(batches))  # drawn once: a loader draws random numbers
            self._make: Callable[[], Landscape] = lambda: Landscape(
                self.model, self._batches, loss, **landscape
            )
            self._gauge = self._new_gauge()
            self._gauge.land.probe()
        self.record = Keeper(path, self.settings)
        self._writers = Writers(writers)
        self._measured = 0
        self.handed = HandedOver(self.mark)
        self._extra = False  # whether a spike has been measured since the last regular measurement
        self._warned: set[str] = set()

    # -- in a loop

    def step(
        self, loss: Any = None, gradient_norm: Any = None, step: int | None = None
    ) -> dict[str, Any] | None:
        """After each step of the optimizer (not after each micro-batch); the measurement, if one was due.

        `loss` and `gradient_norm` (before clipping) are of training: numbers or tensors, None if not known; on a GPU
        they are not waited for. A spike of the loss is measured at once, besides the regular measurements.
        `step` sets the number of the step where the loop counts for itself.
        """
        self.pace.tick()
        self.steps = self.steps + 1 if step is None else step
        words = self.handed.see(self.steps, loss, self._rate(), gradient_norm)
        if self.pace.due(self.steps, not self._measured and not self.track.measurements):
            self._extra = False
            return self.measure()
        return self._at_once(words)

    def observe(self, loss: Any, gradient_norm: Any = None, step: int | None = None) -> dict[str, Any] | None:
        """What training says of a step already counted, as loops that log now and then have it; as in `step`."""
        self.pace.tick()
        words = self.handed.keep(self.steps if step is None else step, loss, None, gradient_norm)
        return self._at_once(words)

    def _at_once(self, words: str) -> dict[str, Any] | None:
        """A measurement where a spike calls for one: one at most between two regular ones."""
        if not words or self._extra:
            return None
        self._extra = True
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """Measure now."""
        if self._gauge.land.device.type == "cuda":
            torch.cuda.synchronize(
                self._gauge.land.device
            )  # what training still has to do is training's time
        self.pace.tick()
        self.record.begin()
        found: dict[str, Any] = {"step": self.steps}
        self._take(found)
        found["train"] = self.handed.take()
        found["seconds"] = self.pace.spent()
        found["training_seconds"], found["share"] = self.pace.training, self.pace.share
        self._measured += 1
        self.record.write("measurement", found)
        self._writers.write(self.steps, scalars(found, self.track.header.get("blocks", ())))
        return found

    def mark(self, words: str, step: int | None = None) -> None:
        """Note an event of one's own: it stands on the page at this step."""
        self.record.write("event", {"step": self.steps if step is None else step, "words": words})

    def close(self) -> None:
        """Write what training came after the last measurement. A tracker that is not closed lacks these steps."""
        rest = self.handed.take()
        if rest:
            self.record.write("training", {"train": rest})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- in the loops of others

    def attach(self, model: nn.Module | None, optimizer: Any) -> None:
        """The model and the optimizer that train, where they are made after the tracker."""
        if optimizer is not None:
            self.optimizer = plain_optimizer(optimizer)
        if model is not None and unwrapped(model) is not self.model:
            self.model = unwrapped(model)
            with at_rest(self.model):
                self._gauge = self._new_gauge()

    @property
    def path(self) -> Path | None:
        return self.record.path

    def hugging_face(self, trainer: Any = None) -> Any:
        """A `TrainerCallback`: `Trainer(…, callbacks=[tracker.hugging_face()])`.

        With `trainer.add_callback(tracker.hugging_face(trainer))` measurements go to the Trainer's own reporters too.
        """
        from curvlens.training.hugging_face import TrackerCallback

        return TrackerCallback(self, trainer)

    def lightning(self) -> Any:
        """A callback of Lightning: `Trainer(…, callbacks=[tracker.lightning()])`."""
        from curvlens.training.lightning import callback

        return callback(self)

    # -- the state

    def state_dict(self) -> dict[str, Any]:
        """To be saved with the model's: the step, the time spent. Plain numbers."""
        return {"steps": self.steps, "measured": self._measured, "pace": self.pace.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: measurements after its step, which are undone, are read no more."""
        self.steps, self._measured = int(state["steps"]), int(state["measured"])
        self.pace.load(state["pace"])
        self.restart(self.steps)

    def restart(self, step: int) -> None:
        """The training (re)starts at a step: in the record, earlier measurements of later steps are superseded."""
        self.steps = step
        self.record.restart(step)
        self.handed = HandedOver(self.mark, step)

    # -- what came of it

    @property
    def track(self) -> Track:
        return self.record.track

    @property
    def findings(self) -> list[Finding]:
        return self.track.findings

    @property
    def events(self) -> list[tuple[int, str]]:
        return self.track.events

    def to_html(self, path: Any = None, title: str = "Curvature through training") -> str:
        return self.track.to_html(path, title)

    def __repr__(self) -> str:
        how = (
            f"every {self.pace.every} steps"
            if self.pace.budget is None
            else f"{self.pace.budget:.1%} of the time"
        )
        return f"Tracker({type(self.model).__name__}, {how}, {len(self.track.measurements)} measurements)"

    # -- one measurement

    def _take(self, found: dict[str, Any]) -> None:
        failed: dict[str, str] = {}
        with at_rest(self.model):
            try:
                gauge = self._current_gauge()
                before = gauge.products
                found["trained"] = gauge.blocks.size
                for name, measure in self._due_parts(gauge).items():
                    attempt(name, measure, found, failed)
                found["products"] = gauge.products - before
            except Exception as error:  # the model itself is at fault, as with frozen weights
                failed["landscape"] = reason(error)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []
        if rates:
            found["rates"], found["rate"] = rates, max(rates)
            clipped = self._clipped()
            found["clipped"] = clipped
            found["descent_threshold"] = 2 / (max(rates) * clipped) if max(rates) > 0 else None
        if failed:
            found["failed"] = failed
            for name in failed.keys() - self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"curvlens.Tracker: {name} failed at step {self.steps}: {failed[name]}", stacklevel=4
                )

    def _due_parts(self, gauge: Gauge) -> dict[str, Callable[[], dict[str, Any]]]:
        every: dict[str, Callable[[], dict[str, Any]]] = {
            "eigenvalues": gauge.eigenvalues,
            "optimizer": lambda: gauge.optimizer(self.optimizer, self._clipped()),
            "blocks": gauge.by_blocks,
            "heads": gauge.by_heads,
            "depth": gauge.by_depth,
        }
        due: dict[str, Callable[[], dict[str, Any]]] = {"point": gauge.point}
        for name, measure in every.items():
            if self.parts.get(name) and name not in self.left_out and self._measured % self.parts[name] == 0:
                due[name] = measure
        if self.averaged is not None:
            source = self.averaged
            due["averaged"] = lambda: gauge.averaged(source)
        return due

    def _rate(self) -> float | None:
        """The largest rate of the next step."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups) if self.optimizer else None

    def _clipped(self) -> float:
        """By which factor clipping shortened the gradients since the last measurement; the median."""
        norms = self.handed.norms()
        norms = [norm for norm in norms if math.isfinite(norm) and norm > 0]
        if self.clip is None or not norms:
            return 1.0
        return median(min(1.0, self.clip / norm) for norm in norms)

    # -- what the record says of how it is measured

    def settings(self) -> dict[str, Any]:
        import curvlens

        land, gauge = self._gauge.land, self._gauge
        return {
            "model": type(self.model).__name__,
            "optimizer": "" if self.optimizer is None else type(self.optimizer).__name__,
            "loss": land.loss.name,
            "scored_tokens": float(land.weight),
            "dtype": str(land.dtype).removeprefix("torch."),
            "device": str(land.device),
            "blocks": [group.name for group in gauge.groups],
            "sizes": [group.size for group in gauge.groups],
            "parameters": gauge.blocks.size,
            "every": self.pace.every if self.pace.budget is None else None,
            "budget": self.pace.budget,
            "parts": dict(self.parts),
            "left_out": self.left_out,
            "samples": self.samples,
            "seed": self.seed,
            "clip": self.clip,
            "versions": {"curvlens": curvlens.__version__, "torch": torch.__version__},
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    # -- the landscape

    def _new_gauge(self) -> Gauge:
        land = self._make()
        gauge = Gauge(land, self._trained(), self.tol, self.samples, self.seed)
        self.left_out = {name: why for name, why in gauge.unsupported().items() if name in self.parts}
        return gauge

    def _trained(self) -> set[str] | None:
        if self.optimizer is None:
            return None
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name for name, p in self.model.named_parameters() if p.requires_grad and id(p) in held}

    def _current_gauge(self) -> Gauge:
        """The gauge, a new one where other parameters train than before."""
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        held = self._trained()
        before = set(self._gauge.land.parameters())
        same = trained == before and (held is None or held == set(self._gauge.blocks.parameters))
        here = next(self.model.parameters()).device == self._gauge.land.device
        if not (same and here):
            self._gauge = self._new_gauge()
            self.record.changed()
        return self._gauge
