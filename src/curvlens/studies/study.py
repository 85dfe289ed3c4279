"""What a study is: a claim of a paper with its number, how it is measured, and how the measurement is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRESETS = ("smoke", "cpu", "paper")
REPRODUCED, DIFFERENCE, NOT = "reproduced", "reproduced with a difference", "not reproduced"
UNDECIDED = "undecided at this size"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every study is given. A study adds its sizes; they are all that its numbers depend on."""

    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Finding:
    """One number of ours beside the paper's.

    It holds if the 95 % interval `ours ± error` meets the accepted range `low … high`, and is undecided if the
    interval is wider than that range, or contains the one end of a range without another. `why` gives the reason for
    the range, which is set before measuring.
    """

    what: str
    paper: str  # the paper's number or statement
    ours: float
    low: float
    high: float
    why: str
    error: float = 0.0  # half the width of the 95 % interval over repeats; 0: exact for the seed
    main: bool = True  # whether the claim falls with it
    said: str = ""  # what there is to say, if it does not hold

    @property
    def decided(self) -> bool:
        if not math.isfinite(self.ours) or not math.isfinite(self.error):
            return False
        ends = [end for end in (self.low, self.high) if math.isfinite(end)]
        if len(ends) == 2:
            return 2 * self.error <= self.high - self.low
        return all(abs(end - self.ours) >= self.error for end in ends)

    @property
    def holds(self) -> bool:
        return self.decided and self.ours + self.error >= self.low and self.ours - self.error <= self.high

    @property
    def outcome(self) -> str:
        return "holds" if self.holds else "does not hold" if self.decided else "undecided"


def near(what: str, paper: float, ours: Any, within: float, why: str, **more: Any) -> Finding:
    """`ours`, a number or the pair of a mean and its error, within a distance of the paper's number."""
    return between(what, f"{paper:.4g}", ours, paper - within, paper + within, why, **more)


def ratio(what: str, paper: float, ours: Any, factor: float, why: str, **more: Any) -> Finding:
    """`ours` within a factor of the paper's number, up or down."""
    return between(what, f"{paper:.4g}", ours, paper / factor, paper * factor, why, **more)


def between(what: str, paper: str, ours: Any, low: float, high: float, why: str, **more: Any) -> Finding:
    """`ours` in a range that the paper's statement leaves; either end may be infinite."""
    value, error = ours if isinstance(ours, (tuple, list)) else (ours, 0.0)
    return Finding(what, paper, float(value), low, high, why, error=float(error), **more)


def verdict(findings: Sequence[Finding]) -> str:
    """Reproduced if no finding fails; with a difference if only lesser ones do; not reproduced, if a main one does.

    Undecided if no main one fails and the interval of one is too wide: more repeats are needed.
    """
    if any(finding.main and finding.decided and not finding.holds for finding in findings):
        return NOT
    if any(finding.main and not finding.decided for finding in findings):
        return UNDECIDED
    return DIFFERENCE if any(finding.decided and not finding.holds for finding in findings) else REPRODUCED


def mean95(values: Sequence[float]) -> tuple[float, float]:
    """Mean of repeats and half the width of its 95 % interval, with Student's factor; infinite for one repeat."""
    from scipy.stats import t

    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return mean, math.inf
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


Measured = Mapping[str, Any]
"""What one unit of work leaves: plain numbers and lists, for JSON."""


@dataclass(frozen=True)
class Study:
    """One figure, table or claim. Everything after `presets` is a plain function of a config."""

    name: str
    title: str
    source: str  # where in which paper
    claim: str
    presets: Mapping[str, Config]
    units: Callable[[Any], Sequence[str]]  # units of work, each kept when it is done: one repeat, one size
    measure: Callable[[Any, str], Measured]  # the work of one unit, the same for the same config
    numbers: Callable[[Any, Mapping[str, Any]], dict[str, Any]]  # of all units, for the plot and the verdict
    judge: Callable[[Any, dict[str, Any]], list[Finding]]
    plot: Callable[[Any, dict[str, Any]], Figure]
    remarks: str = ""  # where text and code of the paper differ, where the split is taken, what was chosen

    def config(self, preset: str = "cpu") -> Config:
        if preset not in self.presets:
            raise ValueError(f"expected preset {' or '.join(self.presets)}, got {preset!r}")
        return self.presets[preset]
