"""Scales: from a value to a place, with the ticks that name it. What a scale cannot show has no place: None."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Tick = tuple[float, str]


def power(exponent: int) -> str:
    """`10⁻³`; 1 and 10 as they are."""
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(SUPERSCRIPTS))


@dataclass(frozen=True)
class Linear:
    low: float
    high: float

    def fraction(self, value: float) -> float | None:
        """0 at the low end, 1 at the high end; None for what is not finite."""
        if not math.isfinite(value):
            return None
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self, most: int = 6) -> list[Tick]:
        span = (self.high - self.low) or 1.0
        step = 10.0 ** math.floor(math.log10(span / most))
        step = next(step * m for m in (1, 2, 5, 10, 20) if span / (step * m) <= most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(k * step, f"{k * step:.4g}") for k in range(first, last + 1)]


@dataclass(frozen=True)
class Log:
    """Logarithmic, for values above zero; zero and below have no place here and must be drawn apart."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], decades: float = 14) -> Log:
        """The range of the positive values, at most so many decades down from the largest."""
        positive = [v for v in values if math.isfinite(v) and v > 0]
        if not positive:
            return cls(0.1, 1.0)
        high = max(positive)
        low = max(min(positive), high * 10.0**-decades)
        return cls(low, high) if high > low else cls(low / 2, high * 2)

    def wider(self) -> Log:
        """With ends at the powers of ten around, or near them for a range of many decades."""
        return Log(10.0 ** math.floor(math.log10(self.low)), 10.0 ** math.ceil(math.log10(self.high) - 1e-9))

    def fraction(self, value: float) -> float | None:
        if not (math.isfinite(value) and value > 0):
            return None
        return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))

    def ticks(self, most: int = 6) -> list[Tick]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 1:
            step = -(-(last - first + 1) // most)
            return [(10.0**k, power(k)) for k in range(first, last + 1) if k % step == 0]
        base = 10.0 ** math.floor(math.log10(self.low))
        marks = [m * base for m in (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)]
        inside = [(m, f"{m:.3g}") for m in marks if self.low * (1 - 1e-9) <= m <= self.high * (1 + 1e-9)]
        return inside if len(inside) > 1 else Linear(self.low, self.high).ticks(min(most, 4))


@dataclass(frozen=True)
class SymLog:
    """`asinh(x / threshold)`: logarithmic in |x| beyond the threshold, linear below, odd around zero."""

    low: float
    high: float
    threshold: float

    def fraction(self, value: float) -> float | None:
        if not math.isfinite(value):
            return None
        a, b = math.asinh(self.low / self.threshold), math.asinh(self.high / self.threshold)
        return (math.asinh(value / self.threshold) - a) / ((b - a) or 1.0)

    def ticks(self, most: int = 9) -> list[Tick]:
        """Zero, and powers of ten on both sides, thinned from the largest down."""
        top = max(abs(self.low), abs(self.high))
        if top <= 0:
            return [(0.0, "0")]
        first, last = math.ceil(math.log10(self.threshold)), math.floor(math.log10(top))
        sides = (self.low < -self.threshold) + (self.high > self.threshold)
        step = max(1, -(-(last - first + 1) * sides // (most - 1)))
        found: list[Tick] = [(0.0, "0")]
        for k in range(last, first - 1, -step):
            found += [(s * 10.0**k, ("−" if s < 0 else "") + power(k)) for s in (1, -1)]
        return sorted(tick for tick in found if self.low <= tick[0] <= self.high)


Scale = Linear | Log | SymLog
