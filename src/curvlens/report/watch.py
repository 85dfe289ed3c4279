"""One line a stage on stderr: what is begun, how it ended, and how long the rest will take."""

from __future__ import annotations

import sys

import torch

from curvlens.landscape import Landscape
from curvlens.report.data import Stage
from curvlens.report.forecast import products, time_words
from curvlens.report.presets import Preset, named
from curvlens.report.stages import STAGES, Context


class Announcer:
    """Called around every stage. The time left is that of the products left, at the pace so far."""

    def __init__(self, land: Landscape, preset: str | Preset, optimizer: torch.optim.Optimizer | None = None):
        at = Context(land, named(preset), 0, optimizer)
        self.expected = {stage.name: products(at, stage.name)[0] for stage in STAGES}
        self.done: list[Stage] = []

    def __call__(self, index: int, count: int, title: str, stage: Stage | None) -> None:
        if stage is None:
            print(
                f"\r[{index + 1:>2}/{count}] {title} …{self._left():<40}", end="", file=sys.stderr, flush=True
            )
            return
        self.done.append(stage)
        words = f"[{index + 1:>2}/{count}] {title:<24} {stage.status:<9} {stage.seconds:6.1f} s"
        print(f"\r{words:<78}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        spent = sum(stage.seconds for stage in self.done if stage.products)
        made = sum(stage.products for stage in self.done)
        names = {stage.name for stage in self.done}
        left = sum(count for name, count in self.expected.items() if name not in names)
        return f"  about {time_words(spent / made * left)} left" if made and left else ""
