"""The tracker as a callback of the Hugging Face `Trainer`.

Order in the Trainer: clipping, `on_pre_optimizer_step`, step, `on_optimizer_step`, scheduler, `zero_grad`,
`global_step += 1`, `on_step_end` (here it is measured), then the Trainer's log, evaluation and checkpoint.
Gradient accumulation makes no difference: the hook runs once a step of the optimizer.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from curvlens.training.tracker import Tracker
from curvlens.training.writers import scalars

# the callbacks of this process by name: the Trainer makes new ones from a checkpoint's JSON, which holds no model
_LIVE: WeakValueDictionary[str, TrackerCallback] = WeakValueDictionary()


class TrackerCallback(TrainerCallback, ExportableState):
    """Calls the tracker after each step, hands it the Trainer's losses, and keeps its times in checkpoints.

    With `trainer`, measurements are logged by it, so that all its reporters have them (as "train/curvature/…").
    """

    def __init__(self, tracker: Tracker | str, trainer: Any = None):
        if isinstance(tracker, str):
            earlier = _LIVE.get(tracker)
            if earlier is None:
                raise ValueError(
                    f"expected the tracker of {tracker!r} among the Trainer's callbacks, got none with this path; "
                    "give it the path that it had when the checkpoint was saved"
                )
            tracker, trainer = earlier.tracker, earlier.trainer
        self.tracker: Tracker = tracker
        self.trainer: Any = trainer
        _LIVE[self.name] = self

    @property
    def name(self) -> str:
        path = self.tracker.path
        return f"tracker {id(self.tracker)}" if path is None else str(path)

    # -- over a checkpoint

    def state(self) -> dict[str, Any]:
        return {"args": {"tracker": self.name}, "attributes": {"kept": self.kept}}

    @property
    def kept(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    @kept.setter
    def kept(self, state: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state)

    # -- while it trains

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tracker = self.tracker
        tracker.attach(kwargs.get("model"), kwargs.get("optimizer"))
        if tracker.clip is None and args.max_grad_norm:
            tracker.clip = float(args.max_grad_norm)
        stored = (state.stateful_callbacks or {}).get(type(self).__name__)
        if state.global_step and stored and not isinstance(stored, list):
            self.kept = stored["attributes"]["kept"]
        # a checkpoint from before there was a tracker has no place for its state, and saving would fail
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        tracker.restart(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not state.is_world_process_zero:
            return control
        found = self.tracker.step(step=state.global_step)
        self._log(found, control)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        if state.is_world_process_zero and logs and "loss" in logs:
            found = self.tracker.observe(logs["loss"], logs.get("grad_norm"), state.global_step)
            self._log(found, control)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tracker.close()

    def _log(self, found: dict[str, Any] | None, control: Any) -> None:
        """Log by the Trainer, whose own log of the loss must still come: logging switches it off."""
        if found is None or self.trainer is None:
            return
        due = control.should_log
        self.trainer.log(scalars(found, self.tracker.track.header.get("blocks", ())))
        control.should_log = due
