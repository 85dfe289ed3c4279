"""What a loss curve and a learning rate show step by step: a spike, a loss that is no number, the end of warm-up."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW, LEAST = 24, 12  # losses that a new one is held against; fewer say nothing
SPREADS, RISE = 8.0, 0.15  # how far above their median a spike is: in their own spread, and of the median


class LossWatch:
    """Says when a loss leaves the range of those before it, once for each time it does."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.outside = 0  # steps since it left

    def see(self, loss: float) -> str:
        """A word for what happened, or nothing.

        A spike lies above the median m of the last 24 losses by 8 times their spread (1.4826 times the median
        deviation from m, the standard deviation of a normal) and by 15 % of |m|. A loss that stays there for 24 steps
        is where the run is now, and measured anew.
        """
        if not math.isfinite(loss):
            first = self.outside == 0
            self.outside = 1
            return "the loss is not a number" if first else ""
        if len(self.recent) < LEAST:
            self.recent.append(loss)
            return ""
        centre = median(self.recent)
        spread = 1.4826 * median(abs(value - centre) for value in self.recent)
        if loss > centre + max(SPREADS * spread, RISE * abs(centre)):
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
