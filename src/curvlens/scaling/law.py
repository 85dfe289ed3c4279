"""Power laws `y = a x^b`: exponent and prefactor with bootstrap intervals, and whether the data is a power law at all.

A straight line fits any rising data in logarithms, with a large R². So a fit is judged by what a law excludes: a slope
that changes over the range (a quadratic term in `log x`), and means that stray from the line by more than the repeats
scatter (lack of fit). What fails is said not to be a law, and by how much its slope changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

LEVEL = 0.05  # of all tests of one law together
BEND = 0.05  # a change of the slope over the range below this is no matter, however certain
STRAY = 0.02  # nor are means that stray by less than this share
FEWEST = 4  # distinct sizes below which no test is possible
RESAMPLES = 2000
SURE = 1e-9  # residuals below this are rounding
HELD, NO_TREND, NOT_A_LAW, UNDECIDED = "a power law", "no trend", "not a power law", "undecided"
SCATTERED = "too scattered to tell"


class Interval(NamedTuple):
    """A value and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __contains__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and self.low <= other <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class HeldOut:
    """The largest size, predicted from all others, beside what was measured there."""

    size: float
    predicted: Interval  # for the geometric mean of the repeats at that size
    measured: float

    @property
    def met(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclass(frozen=True, repr=False)
class PowerLaw:
    """A fit of `y = a x^b` and the judgement of it."""

    x: str
    y: str
    sizes: Numbers  # of every measurement
    values: Numbers
    exponent: Interval
    prefactor: Interval
    confidence: float
    r_squared: float
    bend: float  # the change of the slope from the smallest to the largest size, by a quadratic term in log x
    bend_p: float  # the probability of so large a bend under the law; NaN with too few sizes
    stray: float  # the root mean square deviation of the means from the line, in log y
    stray_p: float  # NaN without repeats
    slopes: tuple[float, ...]  # between the means of neighbouring sizes
    held_out: HeldOut | None
    verdict: str

    @property
    def holds(self) -> bool:
        return self.verdict == HELD

    @property
    def statement(self) -> str:
        """The verdict in a sentence."""
        law = f"{self.y} ∝ {self.x}^{self.exponent}"
        ends = f"{self.slopes[0]:.3g} at the small end to {self.slopes[-1]:.3g} at the large one"
        if self.verdict == HELD:
            text = f"{law}, R² {self.r_squared:.3f}: a power law over this range"
        elif self.verdict == NO_TREND:
            text = f"no trend of {self.y} with {self.x} is seen: exponent {self.exponent}"
        elif self.verdict == SCATTERED:
            text = (
                f"{law} by least squares, R² {self.r_squared:.3f}: nothing speaks against a power law, but the scatter "
                "leaves its exponent open; expected more repeats or a wider range"
            )
        elif self.verdict == NOT_A_LAW:
            reasons = []
            if self.bend_p < LEVEL:
                reasons.append(
                    f"the slope changes by {self.bend:+.2g} over the range (p = {self.bend_p:.1g})"
                )
            if self.stray_p < LEVEL:
                reasons.append(f"means stray from the line by {self.stray:.1%} (p = {self.stray_p:.1g})")
            text = f"{self.y} is not a power law of {self.x}: {'; '.join(reasons)}; local slopes from {ends}"
        else:
            text = (
                f"{law} by least squares, but {len(set(self.sizes.tolist()))} sizes are too few to tell whether it "
                f"is a law; expected {FEWEST}"
            )
        if self.held_out is not None:
            state = "as predicted" if self.held_out.met else "missed"
            text += (
                f"; at {self.x} = {self.held_out.size:.4g}, left out of a fit, {self.held_out.measured:.4g} was "
                f"measured and {self.held_out.predicted} predicted: {state}"
            )
        return text + "."

    def predict(self, x: float) -> float:
        """`a x^b`."""
        return self.prefactor.value * x**self.exponent.value

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        made = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in vars(self).items()
        }
        held = self.held_out
        made["held_out"] = None if held is None else {**vars(held), "met": held.met}
        return {**made, "statement": self.statement}

    def __repr__(self) -> str:
        return self.statement


def fit(
    sizes: Sequence[float] | Numbers,
    values: Sequence[float] | Numbers,
    x: str = "x",
    y: str = "y",
    confidence: float = 0.95,
    seed: int = 0,
    hold_out: bool = True,
) -> PowerLaw:
    """Fit `log y = log a + b log x` by least squares; repeats at one size are entries of their own.

    Intervals are those of the studentised bootstrap of residuals, which are first scaled by what the fit took from
    them; the noise is taken to be a factor of like spread at all sizes.
    """
    sizes, values = np.asarray(sizes, float), np.asarray(values, float)
    _check(sizes, values, y, confidence)
    order = np.argsort(sizes, kind="stable")
    sizes, values = sizes[order], values[order]
    lx, ly = np.log(sizes), np.log(values)
    line = _Line(lx, ly)
    generator = np.random.default_rng(seed)
    exponent = line.exponent(confidence, generator)
    constant = line.value(0.0, 0, confidence, generator)
    distinct = np.unique(lx)
    means = np.array([ly[lx == at].mean() for at in distinct])
    bend, bend_p = _bend(lx, ly, line)
    stray, stray_p = _stray(lx, ly, line, distinct, means)
    total = ((ly - ly.mean()) ** 2).sum()
    held = None
    if hold_out and len(distinct) >= FEWEST:
        held = _held_out(lx, ly, distinct[-1], confidence, generator)
    return PowerLaw(
        x,
        y,
        sizes,
        values,
        exponent,
        Interval(*(math.exp(end) for end in constant)),
        confidence,
        float(1 - line.squares / total) if total > 0 else 1.0,
        bend,
        bend_p,
        stray,
        stray_p,
        tuple((np.diff(means) / np.diff(distinct)).tolist()),
        held,
        _verdict(exponent, len(distinct), bend, bend_p, stray, stray_p),
    )


def _check(sizes: Numbers, values: Numbers, y: str, confidence: float) -> None:
    if sizes.ndim != 1 or sizes.shape != values.shape:
        raise ValueError(
            f"expected as many sizes as values, got {list(sizes.shape)} and {list(values.shape)}"
        )
    if len(set(sizes.tolist())) < 3:
        raise ValueError(f"expected at least three distinct sizes, got {len(set(sizes.tolist()))}")
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise ValueError("expected positive finite sizes")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(
            f"expected positive finite values of {y}, got {values.min():.4g} at the least: what changes its sign or "
            "vanishes follows no power law; fit its magnitude, or another measure"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")


class _Line:
    """Least squares of `ly = c + b lx`."""

    def __init__(self, lx: Numbers, ly: Numbers):
        self.lx, self.n = lx, len(lx)
        self.mean, self.centre = float(ly.mean()), float(lx.mean())
        self.dx = lx - self.centre
        self.width = float((self.dx**2).sum())
        self.slope = float((self.dx * ly).sum() / self.width)
        self.residuals = ly - self.mean - self.slope * self.dx
        self.squares = float((self.residuals**2).sum())
        self.degrees = self.n - 2
        self.scatter = math.sqrt(self.squares / self.degrees) if self.degrees else 0.0

    def _draws(self, generator: np.random.Generator, count: int) -> Numbers:
        """Residuals `[RESAMPLES, count]`, scaled to the variance of the noise."""
        leverage = 1 / self.n + self.dx**2 / self.width
        scaled = self.residuals / np.sqrt(np.maximum(1 - leverage, 1e-12))
        scaled = scaled - scaled.mean()
        return scaled[generator.integers(self.n, size=(RESAMPLES, count))]

    def _refits(self, generator: np.random.Generator) -> tuple[Numbers, Numbers, Numbers]:
        """Changes of mean and slope, and the scatter, of fits to resampled residuals."""
        noise = self._draws(generator, self.n)
        means = noise.mean(1)
        slopes = noise @ self.dx / self.width
        rest = noise - means[:, None] - slopes[:, None] * self.dx
        return means, slopes, np.sqrt((rest**2).sum(1) / max(1, self.degrees))

    def exponent(self, confidence: float, generator: np.random.Generator) -> Interval:
        _, slopes, scatters = self._refits(generator)
        return self._interval(self.slope, slopes, scatters, 1 / math.sqrt(self.width), confidence)

    def value(self, at: float, repeats: int, confidence: float, generator: np.random.Generator) -> Interval:
        """The line at `log x = at`; with `repeats`, the mean of so many new measurements there."""
        means, slopes, scatters = self._refits(generator)
        dx = at - self.centre
        errors, variance = means + slopes * dx, 1 / self.n + dx**2 / self.width
        if repeats:
            errors, variance = errors - self._draws(generator, repeats).mean(1), variance + 1 / repeats
        return self._interval(self.mean + self.slope * dx, errors, scatters, math.sqrt(variance), confidence)

    def _interval(
        self, value: float, errors: Numbers, scatters: Numbers, unit: float, confidence: float
    ) -> Interval:
        if self.scatter <= SURE or not self.degrees:
            return Interval(value, value, value)
        kept = scatters > 1e-6 * self.scatter  # all residuals the same one: no fit to learn from
        studentised = errors[kept] / (scatters[kept] * unit)
        low, high = np.quantile(studentised, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Interval(value, value - high * self.scatter * unit, value - low * self.scatter * unit)


def _bend(lx: Numbers, ly: Numbers, line: _Line) -> tuple[float, float]:
    """The change of the slope over the range, and the p-value of the quadratic term."""
    from scipy.stats import t

    n = len(lx)
    if n < FEWEST or len(np.unique(lx)) < 3:
        return math.nan, math.nan
    design = np.stack([np.ones(n), line.dx, line.dx**2], axis=1)
    solution, *_ = np.linalg.lstsq(design, ly, rcond=None)
    rest = ly - design @ solution
    bend = float(2 * solution[2] * (lx[-1] - lx[0]))
    scatter = math.sqrt((rest**2).sum() / (n - 3))
    if scatter <= SURE:
        return bend, 1.0 if abs(bend) <= BEND else 0.0
    error = scatter * math.sqrt(np.linalg.inv(design.T @ design)[2, 2])
    return bend, float(2 * t.sf(abs(solution[2]) / error, n - 3))


def _stray(lx: Numbers, ly: Numbers, line: _Line, distinct: Numbers, means: Numbers) -> tuple[float, float]:
    """How far the means at each size lie from the line, and the p-value of the F test of lack of fit."""
    from scipy.stats import f

    off = means - (line.mean + line.slope * (distinct - line.centre))
    counts = np.array([(lx == at).sum() for at in distinct])
    between, free = float((counts * off**2).sum()), len(distinct) - 2
    stray = math.sqrt(between / counts.sum())
    within = line.squares - between
    repeats = len(lx) - len(distinct)
    if repeats < 2 or free < 1:
        return stray, math.nan
    if within / repeats <= SURE**2:
        return stray, 1.0 if stray <= STRAY else 0.0
    return stray, float(f.sf(between / free / (within / repeats), free, repeats))


def _held_out(
    lx: Numbers, ly: Numbers, last: float, confidence: float, generator: np.random.Generator
) -> HeldOut:
    kept = lx < last
    there = ly[~kept]
    made = _Line(lx[kept], ly[kept]).value(last, len(there), confidence, generator)
    return HeldOut(math.exp(last), Interval(*(math.exp(end) for end in made)), math.exp(there.mean()))


def _verdict(
    exponent: Interval, distinct: int, bend: float, bend_p: float, stray: float, stray_p: float
) -> str:
    if distinct < FEWEST:
        return UNDECIDED
    tests = 1 + (not math.isnan(stray_p))
    if (bend_p < LEVEL / tests and abs(bend) > BEND) or (stray_p < LEVEL / tests and stray > STRAY):
        return NOT_A_LAW
    if exponent.low <= 0 <= exponent.high:
        return NO_TREND
    if exponent.high - exponent.low > abs(exponent.value):  # an exponent that is not known to its half
        return SCATTERED
    return HELD
