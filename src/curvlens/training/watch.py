"""What a loss curve and a learning rate show step by step: a spike, a loss that is no number, the end of warm-up."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median

from curvlens.training.thresholds import LEAST, NEAR, RISE, SPREADS, WINDOW


class LossWatch:
    """Says when a loss leaves the range of those before it, once for each time it does."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.outside = 0  # steps since it left

    def see(self, loss: float) -> str:
        """A word for what happened, or nothing.

        A spike lies above the median m of the last 9 losses by 8 times their noise and by 15 % of |m|. Noise is told
        from the steps between losses, which a falling curve hardly changes: 1.4826 times the median of |difference|/√2,
        the standard deviation where it is normal. A loss that stays there for 24 steps is where the run is now.
        """
        if not math.isfinite(loss):
            first = self.outside == 0
            self.outside = 1
            return "the loss is not a number" if first else ""
        if len(self.recent) < LEAST:
            self.recent.append(loss)
            return ""
        centre = median(list(self.recent)[-NEAR:])
        noise = 1.4826 / math.sqrt(2) * median(abs(b - a) for a, b in pairwise(self.recent))
        if loss > centre + max(SPREADS * noise, RISE * abs(centre)):
            self.outside += 1
            if self.outside > WINDOW:
                self.recent.clear()
                self.outside = 0
            return "the loss spikes" if self.outside == 1 else ""
        self.outside = 0
        self.recent.append(loss)
        return ""


class RateWatch:
    """Says when a learning rate that has risen from the start stops rising."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.rising = False
        self.done = False

    def see(self, rate: float) -> bool:
        """Whether warm-up ended with the step before."""
        if self.last is not None and not self.done:
            if rate > self.last * (1 + 1e-9):
                self.rising = True
            else:
                self.done = True  # a rate that does not rise at once has no warm-up
                return self.rising
        self.last = rate
        return False


def spikes(steps: list[int], losses: list[float]) -> list[tuple[int, str]]:
    """What a whole curve shows."""
    watch, found = LossWatch(), []
    for step, loss in zip(steps, losses, strict=True):
        words = watch.see(loss)
        if words:
            found.append((step, words))
    return found
