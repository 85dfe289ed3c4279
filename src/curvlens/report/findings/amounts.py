"""Numbers with errors, compared: what is surely above, surely below."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from curvlens.report.data import Number
from curvlens.report.figures.words import measured, number
from curvlens.report.findings.thresholds import CLEAR


class Amount(NamedTuple):
    """A value and its standard error; 0 where exact, infinite where not known."""

    value: float
    error: float = 0.0

    def __str__(self) -> str:
        return measured(self.value, self.error if math.isfinite(self.error) else math.nan)

    def __truediv__(self, other: Amount) -> Amount:
        """The ratio, with relative errors added in quadrature."""
        if not other.value:
            return Amount(math.inf if self.value else math.nan, 0.0)
        value = self.value / other.value
        relative = math.hypot(self.error / self.value if self.value else 0.0, other.error / other.value)
        error = abs(value) * relative if self.value else abs(self.error / other.value)
        return Amount(value, error)

    def above(self, limit: float) -> bool:
        """Surely: by `CLEAR` errors. What is NaN, or without a known error, is not."""
        return self.value - CLEAR * self.error > limit

    def below(self, limit: float) -> bool:
        return self.value + CLEAR * self.error < limit


def amount(n: Number) -> Amount:
    if n.exact:
        return Amount(n.value)
    return Amount(n.value, n.stderr if math.isfinite(n.stderr) else math.inf)


def of(value: float, stderr: float, exact: bool) -> Amount:
    """A cell of a table."""
    if exact:
        return Amount(value)
    return Amount(value, stderr if math.isfinite(stderr) else math.inf)


def root_of_squares(parts: Iterable[Amount]) -> Amount:
    """`√Σ x²`; errors are added as they are, since the parts share their probes."""
    parts = list(parts)
    value = math.sqrt(sum(p.value**2 for p in parts))
    error = sum(abs(p.value) * p.error for p in parts) / value if value else sum(p.error for p in parts)
    return Amount(value, error)


def total(parts: Iterable[Amount]) -> Amount:
    parts = list(parts)
    return Amount(sum(p.value for p in parts), sum(p.error for p in parts))


def mean_of_logs(values: Iterable[Amount]) -> Amount:
    """The geometric mean; errors as if shared."""
    values = [v for v in values if v.value > 0]
    if not values:
        return Amount(math.nan)
    value = math.exp(sum(math.log(v.value) for v in values) / len(values))
    return Amount(value, value * sum(v.error / v.value for v in values) / len(values))


def times(value: float) -> str:
    """`1,600` of 1635.2: how many times, as one says it."""
    if not math.isfinite(value) or value >= 1e7:
        return number(value, 2)
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def certainty(*amounts: Amount) -> str:
    """The sentence on what the numbers behind a finding are."""
    if all(a.error == 0 for a in amounts):
        return "The numbers are exact, up to rounding, on the data given."
    return f"Estimated; it holds at {CLEAR:g} standard errors of the numbers above, on the data given."
