"""Claims: the numbered statements of the papers, each with the checks that verify it.

A check names a case and holds two ways to the same numbers as functions, so that both can be timed. `run` turns it
into an `Outcome`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from curvlens.exact.verification.problems import Draw

# Float64 carries 2e-16. Autodiff of a softmax with a second weight of 6e-6, the least there is here (`problems.large`),
# keeps 3e-11 of it, and sums of some hundred products a little less. A wrong factor, sign or index is of order one.
TOLERANCE = 1e-10

# A true zero comes out of autodiff as rounding of the largest number beside it.
ZERO = 1e-12

# A law is the limit of small tokens; at σ ≤ 1e-3 the next order, σ² of the leading one, moves a slope by about 1e-6.
SLOPE = 1e-4

Values: TypeAlias = "Tensor | Mapping[Any, Tensor]"


@dataclass(frozen=True)
class Outcome:
    """One check done. `value`: a relative error, the smallest bound over the true number, or a slope's deviation."""

    case: str
    kind: str  # "equal", "bound" or "law"
    value: float
    passed: bool
    closed_seconds: float
    autodiff_seconds: float
    message: str = ""


@dataclass(frozen=True)
class Equal:
    """The closed form gives what autodiff gives, each tensor relative to its own largest entry.

    `joint`: relative to the largest entry of them all, where single ones vanish (one token, one-hot attention).
    The closed form may give fewer tensors than autodiff, by key.
    """

    case: str
    closed: Callable[[], Values]
    autodiff: Callable[[], Values]
    joint: bool = False

    def run(self) -> Outcome:
        closed, seconds = _timed(self.closed)
        autodiff, autodiff_seconds = _timed(self.autodiff)
        found, true = _table(closed), _table(autodiff)
        if not found or not found.keys() <= true.keys():
            raise ValueError(f"expected tensors among {list(true)}, got {list(found)}")
        size = max(_largest(x) for x in true.values()) if self.joint else None
        worst = max((_error(x, true[key], size), str(key)) for key, x in found.items())
        passed = worst[0] <= TOLERANCE
        at = "" if passed or worst[1] == "()" else f"at {worst[1]}"
        return Outcome(self.case, "equal", worst[0], passed, seconds, autodiff_seconds, at)


@dataclass(frozen=True)
class Bound:
    """No entry of `true` exceeds that of `bound`, but by what autodiff rounds."""

    case: str
    bound: Callable[[], Tensor]
    true: Callable[[], Tensor]

    def run(self) -> Outcome:
        bound, seconds = _timed(self.bound)
        true, true_seconds = _timed(self.true)
        if bound.shape != true.shape:
            raise ValueError(f"expected one bound each of {list(true.shape)}, got {list(bound.shape)}")
        floor = ZERO * float(true.max())
        passed = bool((true <= bound * (1 + TOLERANCE) + floor).all())
        ratios = (bound / true)[true > floor]
        lowest, highest = (
            (float(ratios.min()), float(ratios.max())) if ratios.numel() else (math.inf, math.inf)
        )
        message = f"{lowest:.4g} to {highest:.4g} times the true number"
        return Outcome(self.case, "bound", lowest, passed, seconds, true_seconds, message)


@dataclass(frozen=True)
class Law:
    """A slope of log norm against log scale is the predicted exponent."""

    case: str
    predicted: float
    fitted: Callable[[], float]

    def run(self) -> Outcome:
        fitted, seconds = _timed(self.fitted)
        value = abs(fitted - self.predicted)
        message = f"predicted {self.predicted:g}, fitted {fitted:.6f}"
        return Outcome(self.case, "law", value, value <= SLOPE, seconds, 0.0, message)


Value = TypeVar("Value")
Check: TypeAlias = "Equal | Bound | Law"


@dataclass(frozen=True)
class Claim:
    """A statement of paper "A" or "B" by its number, and the checks of it, drawn from a seed.

    `checks` yields them one by one, and each is run before the next is asked for: they see the loop that makes them.
    """

    paper: str
    number: str
    statement: str
    note: str
    checks: Callable[[Draw], Iterator[Check]]

    @property
    def name(self) -> str:
        return f"{self.paper} {self.number}"


CLAIMS: dict[str, Claim] = {}

Checks: TypeAlias = Callable[[Draw], "Iterator[Check]"]


def claim(paper: str, number: str, statement: str, note: str = "") -> Callable[[Checks], Checks]:
    """Enters a function that yields checks as the claim `paper number`. `note`: what print has otherwise."""

    def enter(checks: Checks) -> Checks:
        made = Claim(paper, number, statement, note, checks)
        if made.name in CLAIMS:
            raise ValueError(f"expected one claim of each number, got a second {made.name}")
        CLAIMS[made.name] = made
        return checks

    return enter


def _timed(function: Callable[[], Value]) -> tuple[Value, float]:
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def _table(values: Values) -> Mapping[Any, Tensor]:
    return {(): values} if isinstance(values, Tensor) else values


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _error(closed: Tensor, true: Tensor, size: float | None) -> float:
    if closed.shape != true.shape:
        return math.inf
    error, size = _largest(closed - true), _largest(true) if size is None else size
    if error == 0:
        return 0.0
    return error / size if size > 0 and not math.isnan(error) else math.inf
