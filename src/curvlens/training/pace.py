"""When to measure: every so many steps, or as often as a share of the training time allows."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any


class Pace:
    """Counts the time of training and of tracking, and says when the next measurement is due.

    With `budget = b`, one is due when it brings the time of tracking nearer to b times that of training, its cost taken
    as the median of the last three: tracking then stays within half a measurement of the budget, so within a quarter of
    it from the second measurement that it pays for. The first, at once, is on credit.
    """

    def __init__(self, every: int, budget: float | None):
        if every < 1:
            raise ValueError(f"expected at least 1 step between measurements, got every={every}")
        if budget is not None and not 0 < budget < 10:
            raise ValueError(f"expected a budget as a share of the training time, such as 0.05, got {budget}")
        self.every, self.budget = every, budget
        self.training = 0.0  # seconds, tracking apart
        self.tracking = 0.0
        self.costs: deque[float] = deque(maxlen=3)
        self.clock = time.perf_counter
        self._last: float | None = None  # when the tracker last gave control back

    def tick(self) -> None:
        """Control comes from the training loop."""
        now = self.clock()
        if self._last is not None:
            self.training += now - self._last
        self._last = now

    def due(self, step: int, first: bool) -> bool:
        if first:
            return True
        if self.budget is None:
            return step % self.every == 0
        expected = median(self.costs) if self.costs else 0.0
        return self.tracking + expected / 2 <= self.budget * self.training

    def spent(self) -> float:
        """A measurement is done: the seconds since control came."""
        now = self.clock()
        assert self._last is not None
        cost = now - self._last
        self.tracking += cost
        self.costs.append(cost)
        self._last = now
        return cost

    @property
    def share(self) -> float:
        """Time of tracking over time of training."""
        return self.tracking / self.training if self.training > 0 else float("nan")

    def state(self) -> dict[str, Any]:
        return {"training": self.training, "tracking": self.tracking, "costs": list(self.costs)}

    def load(self, state: dict[str, Any]) -> None:
        self.training, self.tracking = float(state["training"]), float(state["tracking"])
        self.costs = deque(state["costs"], maxlen=3)
        self._last = None
