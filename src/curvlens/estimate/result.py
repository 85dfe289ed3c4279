"""What an estimator returns: numbers with their error, their cost and their state of convergence.

A standard error is the half-width of the 68.27 % interval: with few samples it carries Student's factor. A
nonlinear function of means (a root, a ratio) is corrected for bias, and its error formed, by the jackknife.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ONE_SIGMA = math.erf(math.sqrt(0.5))  # 0.6827


@lru_cache(None)
def student(samples: int) -> float:
    """The factor that makes `mean ± factor s / sqrt(samples)` a 68.27 % interval for few samples."""
    from scipy.stats import t

    return float(t.ppf((1 + ONE_SIGMA) / 2, samples - 1))


def students(counts: Tensor) -> Tensor:
    """Student's factor for each of many numbers of samples, infinite for fewer than two."""
    factor = torch.full(counts.shape, torch.inf, dtype=torch.float64)
    for n in counts.unique().tolist():
        if n > 1:
            factor[counts == n] = student(n)
    return factor


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of independent samples along dimension 0 and its error; NaN marks a sample not taken.

    The error of a single sample is infinite: one sample does not tell.
    """
    known = ~values.isnan()
    count = known.sum(0)
    mean = values.nansum(0) / count
    squares = (values - mean).square().nansum(0) / (count - 1).clamp(min=1)
    error = (squares / count.clamp(min=1)).sqrt() * students(count)
    return mean, torch.where(count > 1, error, math.inf)


def jackknife(
    values: Tensor, function: Callable[[Tensor], Tensor], curved: bool = False
) -> tuple[Tensor, Tensor]:
    """`function` of the mean of samples `[m, ...]`, its first-order bias removed, with its error.

    With `f_i` the function without sample i: value `m f - (m - 1) mean f_i`, variance
    `(m - 1)/m sum (f_i - mean f_i)^2` (Quenouille, Tukey), times Student's factor. That counts the variance of a
    quadratic function twice; `curved` takes it out once by the pairs left out (Efron, Stein 1981, section 5).
    """
    m = len(values)
    mean = values.mean(0)
    whole = function(mean)
    if m < 2:
        return whole, torch.full_like(whole, math.inf)
    without = torch.stack([function(mean + (mean - value) / (m - 1)) for value in values])
    centre = without.mean(0)
    variance = (m - 1) / m * (without - centre).square().sum(0)
    if curved and m > 3:
        changes = []
        for i in range(m):
            for j in range(i):
                both = function(mean + (2 * mean - values[i] - values[j]) / (m - 2))
                changes.append(m * whole - (m - 1) * (without[i] + without[j]) + (m - 2) * both)
        second = torch.stack(changes)
        twice = (second - second.mean(0)).square().sum(0) / (m * (m - 1))
        variance = torch.maximum(variance - twice, variance / 2)  # half of it for a function purely quadratic
    return m * whole - (m - 1) * centre, variance.sqrt() * student(m)


@dataclass(frozen=True, repr=False)
class Estimate:
    """A number (or a vector of numbers) estimated from products."""

    what: str
    value: Any  # float, or a tensor for a vector of numbers
    stderr: Any
    samples: int
    products: int
    converged: bool
    stopped: str = ""  # why it ended: "samples", "tolerance", "max_products", "max_minutes", "interrupted"

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        cost = _cost(self.samples, self.products, self.converged, self.stopped)
        if isinstance(self.value, Tensor):
            error = self.stderr.square().sum().sqrt().item()
            return (
                f"{self.what}: {self.value.numel():,} values, norm {self.value.norm().item():.4g}, "
                f"norm of the errors {error:.2g} ({cost})"
            )
        return f"{self.what}: {pm(self.value, self.stderr)} ({cost})"


@dataclass(frozen=True, repr=False)
class BlockMap:
    """One number a block `[B]`, or a pair of blocks `[B, B]`, labelled by block names."""

    what: str
    rows: tuple[str, ...]
    columns: tuple[str, ...] | None  # None: one number a block
    value: Tensor
    stderr: Tensor
    samples: int
    products: int
    converged: bool
    stopped: str = ""

    def __getitem__(self, names: str | tuple[str, str]) -> Estimate:
        """`traces["query"]` or `norms["query", "value"]`, as an Estimate of its own."""
        asked = (names,) if isinstance(names, str) else tuple(names)
        axes = (self.rows,) if self.columns is None else (self.rows, self.columns)
        if len(asked) != len(axes) or any(name not in axis for name, axis in zip(asked, axes, strict=True)):
            raise KeyError(f"expected {len(axes)} block name(s) of {', '.join(self.rows)}, got {asked}")
        at = tuple(axis.index(name) for name, axis in zip(asked, axes, strict=True))
        return Estimate(
            f"{self.what}[{', '.join(asked)}]",
            self.value[at].item(),
            self.stderr[at].item(),
            self.samples,
            self.products,
            self.converged,
            self.stopped,
        )

    def __repr__(self) -> str:
        head = f"{self.what} ({_cost(self.samples, self.products, self.converged, self.stopped)})"
        if self.columns is None:
            rows = [[name, pm(*pair)] for name, pair in zip(self.rows, self._pairs(()), strict=True)]
            return head + "\n" + table(rows)
        shown = len(self.columns) <= 12
        if not shown:
            return head + f"\n  {len(self.rows)} x {len(self.columns)} blocks; .value, .stderr, [row, column]"
        rows = [["", *self.columns]]
        for i, name in enumerate(self.rows):
            rows.append([name, *(pm(*pair) for pair in self._pairs((i,)))])
        return head + "\n" + table(rows)

    def _pairs(self, at: tuple[int, ...]) -> Iterable[tuple[float, float]]:
        return zip(self.value[at].tolist(), self.stderr[at].tolist(), strict=True)


def pm(value: float, stderr: float) -> str:
    """`1.234 ± 0.056`: the value to the digits that its error leaves it."""
    if not math.isfinite(stderr) or not math.isfinite(value):
        return f"{value:.4g} ± ?"
    if stderr <= 1e-12 * abs(value):
        return f"{value:.6g} ± {stderr:.0e}"
    digits = 2 + max(0, math.floor(math.log10(abs(value) / stderr))) if value else 2
    return f"{value:.{min(digits + 1, 8)}g} ± {stderr:.2g}"


def shown_pm(value: Tensor, stderr: Tensor) -> str:
    """Many numbers by the norm of the values and that of the errors; one as it is."""
    if value.dim() == 0:
        return pm(value.item(), stderr.item())
    return f"norm {pm(value.norm().item(), stderr.norm().item())}"


def table(rows: list[list[str]]) -> str:
    """Lines of aligned columns, the first one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _cost(samples: int, products: int, converged: bool, stopped: str) -> str:
    state = "converged" if converged else f"not converged: {stopped}"
    return f"{samples} samples, {products} products, {state}"
