"""How much data a landscape needs: samples until more of them move it by less than a given amount.

For independent samples `E (L_{k+1} − L_k)² = S²/(k (k + 1))` and `E (L_k − L_∞)² = S²/k`, `S` the spread of the
samples' losses. So the answer is known as well as `S`, for numbers far above the samples at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.scaling.difference import spread

KINDS = ("step", "rest")
RESAMPLES = 1000


@dataclass(frozen=True, repr=False)
class Need:
    """The number of samples, and the interval that the uncertainty of the spread leaves it."""

    samples: int
    low: int
    high: float  # infinite where a handful of samples leaves it open
    confidence: float
    tol: float
    of: str
    spread: float
    at_hand: int

    @property
    def enough(self) -> bool:
        """Whether the samples at hand are enough for certain."""
        return self.at_hand >= self.high

    def __repr__(self) -> str:
        what = "one sample more moves" if self.of == "step" else "all further data moves"
        state = "enough" if self.enough else "not enough" if self.at_hand < self.low else "perhaps enough"
        return (
            f"{self.samples:,} samples ({self.low:,} to {self.high:,.0f}, {self.confidence:.0%}) until {what} the "
            f"landscape by less than {self.tol:g}; {self.at_hand:,} at hand: {state}"
        )


def need(
    values: Tensor,
    weights: Tensor,
    tol: float,
    of: str = "step",
    confidence: float = 0.95,
    seed: int = 0,
) -> Need:
    """From losses `[draws, n]` at several points (the mean square over them counts), or `[1, n]` at one.

    The interval is that of the bootstrap over samples, studentised on the logarithm of the spread: the plain one is too
    short where a few samples make most of the spread.
    """
    if not tol > 0:
        raise ValueError(f"expected a positive tol, got {tol}")
    if of not in KINDS:
        raise ValueError(f"expected of to be one of {', '.join(KINDS)}, got {of!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("expected finite losses, got an infinite one or NaN; take a smaller sigma")
    value, error = _log_spread(values, weights)
    n = len(weights)
    generator = torch.Generator().manual_seed(seed)
    studentised = []
    for _ in range(RESAMPLES):
        chosen = torch.randint(n, (n,), generator=generator)
        again, its_error = _log_spread(values[:, chosen], weights[chosen])
        if its_error > 0:
            studentised.append((again - value) / its_error)
    if not studentised:  # all samples alike
        low = high = value
    else:
        tail = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
        below, above = torch.tensor(studentised, dtype=torch.float64).quantile(tail).tolist()
        low, high = value - above * error, value - below * error
    samples, least, most = (_count(x, tol, of) for x in (value, min(low, value), max(high, value)))
    return Need(int(samples), int(least), most, confidence, tol, of, math.exp(value), n)


def _log_spread(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """`log S` and its standard error: with `e_i` what sample i adds to `S²`, `sd(e) / (2 S² √n)`."""
    square = spread(values, weights).square().mean()
    if square <= 0:
        return -math.inf, 0.0
    mean = (values * weights).sum(-1, keepdim=True) / weights.sum()
    own = (weights / weights.mean() * (values - mean)).square().mean(0)
    return 0.5 * math.log(square), (own.std() / (2 * square * math.sqrt(len(weights)))).item()


def _count(log_spread: float, tol: float, of: str) -> float:
    """The smallest k ≥ 1 with `S/√(k(k+1)) ≤ tol`, or `S/√k ≤ tol`."""
    exponent = 2 * (log_spread - math.log(tol))
    if exponent > 80:  # more than can ever be had
        return math.inf
    squared = math.exp(exponent)
    return max(1, math.ceil(squared if of == "rest" else (math.sqrt(1 + 4 * squared) - 1) / 2))
