"""The plan of a product: its engine, its time and its memory, before it is run.

Small shares of the product itself are run and measured: one sample of the largest batch, then twice as many while that
is quick, and one vector beside a few. Time and memory are affine in the tokens and in the vectors of a pass, so that
two measurements of each give the whole. Nothing is taken from tables of machines; a plan costs a few small products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from curvlens import guards
from curvlens.engine import choose, run_piece, vectors_a_pass
from curvlens.engine.double_backward import graph_bytes
from curvlens.engine.memory import recorded_peak
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape
from curvlens.operator import free_memory

QUICK = 0.3  # seconds: a trial that took less is followed by one of twice the samples
MOST = 0.8  # of the free memory is planned for


@dataclass(frozen=True)
class Plan:
    """What one call with a number of vectors, over all the data, will take.

    seconds      of the call; compiling and checks that are done once are not in it
    peak_bytes   what it allocates at most, its result included, beside weights, data and the vectors
    free_bytes   what the device has
    chunk        vectors that go through the model at once
    micro_batch  samples at a time that fit the free memory; None: whole batches do
    kept         bytes worth keeping between products, `hessian(land, keep=…)`: what the whole graphs hold if they fit
                 beside `peak_bytes`, else what some layers may
    """

    engine: str
    seconds: float
    peak_bytes: int
    free_bytes: int
    chunk: int
    micro_batch: int | None
    kept: int = 0
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.free_bytes

    def __str__(self) -> str:
        size = f", {self.micro_batch} samples at a time" if self.micro_batch else ""
        fits = "" if self.fits else f", more than the {self.free_bytes / 2**30:.1f} GiB that are free"
        return (
            f"{self.engine}: about {self.seconds:.3g} s and {self.peak_bytes / 2**30:.3g} GiB{fits}"
            f"{size}{''.join(f'; {note}' for note in self.notes)}"
        )


def plan(
    land: Landscape, quantity: Quantity | str = "hessian", vectors: int = 1, engine: str = "auto"
) -> Plan:
    """The plan of products of a quantity of a landscape with so many vectors at once."""
    quantity = Quantity(quantity) if isinstance(quantity, str) else quantity
    engine = choose(engine, quantity, land)
    trials = _Trials(land, quantity, engine, vectors)
    free = free_memory(land.device)
    seconds, peak = trials.whole(land.micro_batch)
    notes: tuple[str, ...] = ()
    micro_batch = land.micro_batch
    if peak > MOST * free:
        micro_batch = trials.fitting(MOST * free)
        seconds, peak = trials.whole(micro_batch)
        if peak > MOST * free:
            notes = ("one sample at a time is still too much",)
        else:
            notes = (f"give the landscape micro_batch={micro_batch}, so that it fits",)
    kept = min(trials.graphs(quantity), max(0, int(MOST * free - peak)))
    return Plan(engine, seconds, int(peak), free, trials.chunk, micro_batch, kept, notes)


class _Trials:
    """Measurements of parts of a product, and what they say of the whole."""

    def __init__(self, land: Landscape, quantity: Quantity, engine: str, vectors: int):
        self.land, self.quantity, self.engine, self.vectors = land, quantity, engine, vectors
        self.tokens = [piece.target.numel() for piece in land.pieces()]
        self.largest = max(land.pieces(), key=lambda piece: piece.target.numel())
        self.samples = len(self.largest.target)
        self.each = self.largest.target.numel() / self.samples  # tokens of a sample
        self.result = land.blocks.size * land.dtype.itemsize  # bytes of one image
        self.chunk = vectors_a_pass(land, self.largest, vectors, engine)
        self.more_seconds = self.more_bytes_a_token = 0.0
        self._run_sizes()
        self._run_vectors()

    def _run_sizes(self) -> None:
        size = 1
        self.small = self.large = (1, *self._trial(1, 1))
        while size < self.samples and (size == 1 or self.large[1] < QUICK):
            size = min(2 * size, self.samples)
            self.small, self.large = self.large, (size, *self._trial(size, 1))

    def _run_vectors(self) -> None:
        """Seconds and bytes that a further vector adds, at the size of the smaller trial."""
        count = min(self.vectors, max(2, min(self.chunk, 4)))
        if count > 1:
            size, seconds, peak = self.small
            several = self._trial(size, count)
            self.more_seconds = max(0.0, several[0] - seconds) / (count - 1) / seconds
            more_bytes = (several[1] - peak) / (count - 1) - self.result
            self.more_bytes_a_token = max(0.0, more_bytes) / (size * self.each)

    def _trial(self, size: int, vectors: int) -> tuple[float, int]:
        land = self.land
        piece = next(self.largest.split(size))
        generator = torch.Generator().manual_seed(0)
        stack = torch.randn(vectors, land.blocks.size, generator=generator, dtype=land.dtype).to(land.device)

        def run() -> object:
            return run_piece(
                self.engine, land, self.quantity.started(), piece, land.blocks, land.blocks, stack
            )

        with guards.twice_differentiable(land.model, land.device), guards.explained():
            run()  # what is found, checked or built once
            peak = recorded_peak(run, land.device)
            seconds = min(_seconds(run, land.device) for _ in range(2))
        return seconds, peak

    def _affine(self, index: int) -> tuple[float, float]:
        """Intercept and slope by tokens of what two trials measured."""
        (a, *first), (b, *second) = self.small, self.large
        if a == b:
            return 0.0, second[index] / (b * self.each)
        slope = max(0.0, (second[index] - first[index]) / ((b - a) * self.each))
        return max(0.0, second[index] - slope * b * self.each), slope

    def whole(self, micro_batch: int | None) -> tuple[float, float]:
        """Seconds and bytes of the product over all data, with micro-batches of a given size."""
        start, slope = self._affine(0)
        size = self.samples if micro_batch is None else min(micro_batch, self.samples)
        pieces = sum(max(1, round(tokens / self.each / size)) for tokens in self.tokens)
        seconds = (start * pieces + slope * sum(self.tokens)) * (1 + (self.vectors - 1) * self.more_seconds)
        start, slope = self._affine(1)
        peak = start + slope * size * self.each
        if self.vectors > 1:
            peak += (self.vectors - 1) * self.result
            peak += (self.chunk - 1) * self.more_bytes_a_token * size * self.each
        return seconds, peak

    def graphs(self, quantity: Quantity) -> int:
        """About what the graphs of all data hold between products."""
        sample = next(self.largest.split(1))
        return int(graph_bytes(self.land, sample, quantity) / self.each * sum(self.tokens))

    def fitting(self, limit: float) -> int:
        """The largest number of samples at a time that stays below a limit, at least one."""
        size = self.samples
        while size > 1 and self.whole(size)[1] > limit:
            size //= 2
        return size


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del found
    return seconds
