"""The loop of every estimator that averages independent probes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.estimate.result import mean_and_error, shown_pm
from curvlens.estimate.run import Run

Summary = Callable[[Tensor], tuple[Tensor, Tensor]]  # samples [m, ...] -> value and error [...]
PATIENCE = 100  # with a tolerance, at most so many times the samples asked for


def sample(
    run: Run,
    measure: Callable[[range], Tensor],
    samples: int,
    tol: float | None = None,
    chunk: int = 4,
    cost: int = 1,
    summary: Summary = mean_and_error,
) -> tuple[Tensor, bool]:
    """Measure probes 0, 1, … until there are enough: the samples `[m, ...]`, and whether they are enough.

    Without `tol`: `samples` of them. With it: at least `samples`, then on until every error is at most
    `tol |value|`. `measure` takes a range of at most `chunk` probe indices, at `cost` products each.
    """
    require_counts(samples, tol, chunk)
    state = run.restore()
    values = torch.empty(0) if state is None else state["values"]
    while not _enough(values, samples, tol, summary):
        limit = samples if len(values) < samples else PATIENCE * samples
        count = run.affordable(min(chunk, limit - len(values)), cost)
        if count <= 0:
            run.stopped = run.stopped or "samples"
            return values, False
        new = measure(range(len(values), len(values) + count))
        values = new if not len(values) else torch.cat([values, new])
        shown, share = _shown(values, tol, summary)
        total = cost * max(samples, math.ceil(share * len(values)))
        run.step(lambda values=values: {"values": values}, total, shown)  # type: ignore[misc]
    run.stopped = "samples" if tol is None else "tolerance"
    return values, True


def _enough(values: Tensor, samples: int, tol: float | None, summary: Summary) -> bool:
    if len(values) < samples:
        return False
    if tol is None:
        return True
    value, error = summary(values)
    return bool((error <= tol * value.abs()).all())


def _shown(values: Tensor, tol: float | None, summary: Summary) -> tuple[str, float]:
    """The value ± error (their norms, for many), and how many times these samples the tolerance is likely to take."""
    if len(values) < 2:
        return "", 0
    value, error = summary(values)
    text = shown_pm(value, error)
    if tol is None:
        return text, 0
    share = (error / (tol * value.abs())).square().nan_to_num(0).max().item()  # errors shrink with the root
    return text, min(share, PATIENCE)


def require_counts(samples: int, tol: float | None, chunk: int) -> None:
    if samples < 1 or chunk < 1:
        raise ValueError(f"expected at least one sample and a chunk of at least one, got {samples}, {chunk}")
    if tol is not None and not tol > 0:
        raise ValueError(f"expected a positive tolerance, got {tol}")
