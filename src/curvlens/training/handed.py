"""What a loop hands over of each step of training, kept until the next measurement takes it into the record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from curvlens.training.watch import LossWatch, RateWatch

KEYS = ("step", "loss", "rate", "gradient")


class HandedOver:
    """Losses, rates and gradient norms since the last measurement, watched for spikes and the end of warm-up.

    `mark(words, step)` is called where something happens. `start` is the step at which this run starts; a run that goes
    on has its warm-up behind it.
    """

    def __init__(self, mark: Callable[[str, int], None], start: int = 0):
        self.mark = mark
        self.kept: dict[str, list[Any]] = {key: [] for key in KEYS}
        self.losses, self.rates = LossWatch(), RateWatch()
        self.rates.done = start > 0

    def see(self, step: int, loss: Any, rate: float | None, norm: Any) -> str:
        """Keep what training says of this step; words for what it shows."""
        if rate is not None and self.rates.see(rate):
            self.mark("warm-up ends", step - 1)
        return self.keep(step, loss, rate, norm)

    def keep(self, step: int, loss: Any, rate: float | None, norm: Any) -> str:
        """The same for a step whose rate is seen already, or is not known."""
        if loss is None and norm is None and rate is None:
            return ""
        loss = _number(loss)
        for key, value in zip(KEYS, (step, loss, rate, _number(norm)), strict=True):
            self.kept[key].append(value)
        words = self.losses.see(loss) if isinstance(loss, float) else ""
        if words:
            self.mark(words, step)
        return words

    def norms(self) -> list[float]:
        """Norms of the gradients that are known."""
        return [float(norm) for norm in self.kept["gradient"] if norm is not None]

    def take(self) -> dict[str, list[Any]]:
        """All since the last measurement, which is then forgotten. A rate is kept where it turns."""
        kept, self.kept = self.kept, {key: [] for key in KEYS}
        for step, loss in zip(kept["step"], kept["loss"], strict=True):
            if isinstance(loss, Tensor) and (words := self.losses.see(float(loss))):
                self.mark(words, step)
        said = [
            i
            for i in range(len(kept["step"]))
            if kept["loss"][i] is not None or kept["gradient"][i] is not None or _turns(kept["rate"], i)
        ]
        found = {key: [_written(values[i]) for i in said] for key, values in kept.items()}
        return {key: values for key, values in found.items() if any(v is not None for v in values)}


def _number(value: Any) -> Any:
    """A number at once where that waits for nothing, the tensor where it lies on a device."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value if value.device.type != "cpu" else float(value)
    return None if value is None else float(value)


def _written(value: Any) -> Any:
    """As it stands in the record, where null means that nothing was said: "nan" and "inf" for such losses."""
    if isinstance(value, Tensor):
        value = float(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _turns(rates: list[float | None], i: int) -> bool:
    """Whether a rate is the first, the last, or other than the one before."""
    return i in (0, len(rates) - 1) or rates[i] != rates[i - 1]
