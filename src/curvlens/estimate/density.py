"""The spectral density from stochastic Lanczos quadrature, of an operator or of each of its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate.quadrature import Recurrence
from curvlens.estimate.result import Estimate, jackknife, mean_and_error, pm, table
from curvlens.estimate.run import Run, identity
from curvlens.operator import Operator


@dataclass(frozen=True)
class Support:
    """Where densities are drawn or compared: bins and a kernel in a coordinate t of the eigenvalue.

    `t = x` (threshold None), or `t = asinh(x / threshold)`, which is logarithmic in |x| beyond the threshold and
    linear below. The Gaussian kernel has standard deviation `width`, in t; bins reach six of them beyond the ends.
    """

    low: float
    high: float
    threshold: float | None = None
    bins: int = 400
    relative_width: float = 0.01  # of the range of t

    def coordinate(self, x: Tensor) -> Tensor:
        return x if self.threshold is None else torch.asinh(x / self.threshold)

    @cached_property
    def width(self) -> float:
        low, high = self._ends()
        return self.relative_width * ((high - low) or abs(high) or 1.0)

    @cached_property
    def edges(self) -> Tensor:
        """The edges of the bins, in t: `[bins + 1]`."""
        low, high = self._ends()
        return torch.linspace(low - 6 * self.width, high + 6 * self.width, self.bins + 1, dtype=torch.float64)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The middle of each bin, as an eigenvalue."""
        t = (self.edges[1:] + self.edges[:-1]) / 2
        return t if self.threshold is None else self.threshold * torch.sinh(t)

    def _ends(self) -> tuple[float, float]:
        low, high = self.coordinate(torch.tensor([self.low, self.high], dtype=torch.float64)).tolist()
        return low, high

    def masses(self, nodes: Tensor, weights: Tensor) -> Tensor:
        """The smoothed mass in each bin: `[..., m]` nodes and weights to `[..., bins]`; each sums to one."""
        scaled = (self.edges - self.coordinate(nodes)[..., None]) / self.width
        mass = torch.special.ndtr(scaled).diff(dim=-1)
        total = (weights[..., None] * mass).sum(-2)
        return total / total.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Curve:
    """A density to draw: `sum(density) * step = 1` in the coordinate `t` of its support."""

    support: Support
    t: Tensor
    eigenvalues: Tensor
    density: Tensor
    stderr: Tensor  # from the repeats


@dataclass(frozen=True, repr=False)
class Density:
    """Quadratures of the spectral measure, one a probe: raw nodes and weights, and what follows from them."""

    what: str
    size: int  # dimension of the operator
    tridiagonal: Tensor  # [s, m, m]
    counts: Tensor  # [s]: steps taken
    complete: Tensor  # [s]: whether the quadrature is exact for its probe
    measured: Tensor  # [s, 2]: first and second moments, measured from the products
    products: int  # of the whole run, all blocks together
    converged: bool
    stopped: str = ""
    _cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @property
    def samples(self) -> int:
        return len(self.counts)

    @property
    def nodes(self) -> Tensor:
        """Ritz values `[s, m]`; where a probe took fewer steps, further ones of weight zero."""
        return self._quadrature(0)[0]

    @property
    def weights(self) -> Tensor:
        """Weights `[s, m]`, of sum one for each probe."""
        return self._quadrature(0)[1]

    def _quadrature(self, fewer: int) -> tuple[Tensor, Tensor]:
        """Nodes and weights after so many steps fewer; a complete quadrature stays what it is."""
        if fewer not in self._cache:
            nodes, weights = torch.zeros(2, *self.tridiagonal.shape[:2], dtype=torch.float64)
            for k, (T, count) in enumerate(zip(self.tridiagonal, self.counts.tolist(), strict=True)):
                m = count if self.complete[k] else max(1, count - fewer)
                values, coordinates = torch.linalg.eigh(T[:m, :m])
                nodes[k, :m], weights[k, :m] = values, coordinates[0].square()
                nodes[k, m:] = values[-1]
            self._cache[fewer] = nodes, weights
        return self._cache[fewer]

    def spectral(self, what: str, *functions: Callable[[Tensor], Tensor], of: Any = None) -> Estimate:
        """`tr f(H)`; with several functions, `of(tr f_1(H), tr f_2(H), …)`, by the jackknife.

        The error has two parts, added in square: that of the probes, and that of the quadrature, for which the
        change by its last quarter of steps stands.
        """

        if not self.samples:
            return Estimate(what, math.nan, math.inf, 0, self.products, False, self.stopped)

        def combined(means: Tensor) -> Tensor:
            return means[0] if of is None else of(*means)

        def sums(fewer: int) -> Tensor:
            nodes, weights = self._quadrature(fewer)
            return self.size * torch.stack([(weights * f(nodes)).sum(1) for f in functions], dim=1)

        full, shorter = sums(0), sums(int(self.counts.max()) // 4)
        value, error = jackknife(full, combined)
        change = combined(full.mean(0)) - combined(shorter.mean(0))
        error = (error.square() + change.square()).sqrt()
        return Estimate(
            what, value.item(), error.item(), self.samples, self.products, self.converged, self.stopped
        )

    def top(self, part: float = 1.0) -> Tensor:
        """The largest Ritz value by magnitude, of all probes, after a part of their steps."""
        steps = int(self.counts.max())
        return self._quadrature(steps - math.ceil(part * steps))[0].abs().max()

    def moment(self, power: int) -> Estimate:
        """`tr H^p / n`. The quadrature is exact for p up to 2m - 1, so the error is that of the probes alone."""
        value, error = mean_and_error((self.weights * self.nodes**power).sum(1))
        what = f"moment {power}"
        return Estimate(
            what, value.item(), error.item(), self.samples, self.products, self.converged, self.stopped
        )

    def fault(self) -> float:
        """Largest relative disagreement of the first two moments with those measured: rounding, if all is well."""
        powers = torch.stack([(self.weights * self.nodes**p).sum(1) for p in (1, 2)], dim=1)
        root = self.measured[:, 1].sqrt()
        scale = torch.stack([root, self.measured[:, 1]], dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        return ((powers - self.measured).abs() / scale).max().item()

    def support(self, symlog: bool = False, bins: int = 400, relative_width: float = 0.01) -> Support:
        """The range of the nodes; `symlog` with a threshold of a ten-thousandth of the largest."""
        return common_support([self], symlog, bins, relative_width)

    def curve(self, support: Support | None = None, **settings: Any) -> Curve:
        """The smoothed density on a support (see `support` for the settings), with a band from the repeats."""
        support = self.support(**settings) if support is None else support
        step = (support.edges[1] - support.edges[0]).item()
        masses = support.masses(self.nodes, self.weights) / step
        density, error = mean_and_error(masses)
        t = (support.edges[1:] + support.edges[:-1]) / 2
        return Curve(support, t, support.eigenvalues, density, error)

    def __repr__(self) -> str:
        state = "converged" if self.converged else f"not converged: {self.stopped}"
        if not self.samples:
            return f"{self.what}: no spectral density ({self.products} products, {state})"
        low, high = self.nodes.min().item(), self.nodes.max().item()
        trace, square = self.moment(1), self.moment(2)
        return (
            f"{self.what}: spectral density of {self.size:,} eigenvalues on [{low:.4g}, {high:.4g}] "
            f"({self.samples} probes of {int(self.counts.max())} steps, {self.products} products, {state})\n"
            + table(
                [
                    ["mean eigenvalue", pm(trace.value, trace.stderr)],
                    ["mean square", pm(square.value, square.stderr)],
                ]
            )
        )


def common_support(
    densities: list[Density], symlog: bool = False, bins: int = 400, relative_width: float = 0.01
) -> Support:
    """One support for several densities: the range of all their nodes."""
    if not all(density.samples for density in densities):
        raise ValueError("expected densities of at least one probe, got one without; allow more products")
    low = min(density.nodes.min().item() for density in densities)
    high = max(density.nodes.max().item() for density in densities)
    threshold = 1e-4 * (max(-low, high) or 1.0) if symlog else None
    return Support(low, high, threshold, bins, relative_width)


def density(
    H: Operator,
    samples: int = 10,
    steps: int = 32,
    seed: int = 0,
    chunk: int = 2,
    **budget: Any,
) -> Density:
    """The spectral density of a symmetric operator: `samples` probes of `steps` products.

    Keeps `chunk * steps` vectors while it runs. `budget`: `max_products`, `max_minutes`, `checkpoint`, `progress`.
    """
    return _densities(H, [(H, None)], {"all": H.domain.size}, samples, steps, seed, chunk, budget)["all"]


def block_densities(
    H: Operator,
    samples: int = 10,
    steps: int = 32,
    seed: int = 0,
    chunk: int = 2,
    decoupled: bool = False,
    **budget: Any,
) -> dict[str, Density]:
    """The spectral density of every diagonal block, by name.

    In general a product serves one block. With `decoupled=True` the off-diagonal blocks are taken to be zero, as
    between heads in the functional part, and every product takes a step in all blocks at once.
    """
    parts: list[tuple[Operator, Blocks | None]] = (
        [(H, H.domain)] if decoupled else [(H.block(Blocks([b]), Blocks([b])), None) for b in H.domain]
    )
    sizes = {block.name: block.size for block in H.domain}
    return _densities(H, parts, sizes, samples, steps, seed, chunk, budget)


def _densities(
    H: Operator,
    parts: list[tuple[Operator, Blocks | None]],
    sizes: dict[str, int],
    samples: int,
    steps: int,
    seed: int,
    chunk: int,
    budget: dict[str, Any],
) -> dict[str, Density]:
    if not H.symmetric:
        raise ValueError(f"expected a symmetric operator for a spectral density, got {H}")
    if samples < 1 or steps < 1 or chunk < 1:
        raise ValueError(
            f"expected at least one sample, one step and a chunk of one, got {samples}, {steps}, {chunk}"
        )
    settings = identity(H, seed=seed, steps=steps, chunk=chunk, names=list(sizes), parts=len(parts))
    with Run("density", settings, **budget) as run:
        found, done = _run(run, parts, samples, steps, seed, chunk)
    run.stopped = "samples" if done else run.stopped
    split = found if len(found) == len(sizes) else [_column(found[0], b) for b in range(len(sizes))]
    return {
        name: Density(
            name,
            size,
            result["tridiagonal"][:, 0],
            result["counts"][:, 0],
            result["complete"][:, 0],
            result["moments"][:, 0],
            run.products,
            done,
            run.stopped,
        )
        for (name, size), result in zip(sizes.items(), split, strict=True)
    }


def _run(
    run: Run,
    parts: list[tuple[Operator, Blocks | None]],
    samples: int,
    steps: int,
    seed: int,
    chunk: int,
) -> tuple[list[dict[str, Tensor]], bool]:
    """The quadratures of each part, `[s, B, …]`: a group of probes for all parts, then the next group."""
    groups = [range(i, min(i + chunk, samples)) for i in range(0, samples, chunk)]
    units = [(part, indices) for indices in groups for part in range(len(parts))]
    total = samples * sum(min(steps, part.domain.size) for part, _ in parts)
    state = run.restore() or {"finished": [], "current": None}
    finished: list[dict[str, Tensor]] = state["finished"]
    partial: dict[str, Tensor] | None = None
    for part, indices in units[len(finished) :]:
        operator, blocks = parts[part]
        current = Recurrence.begin(operator, blocks, indices, min(steps, operator.domain.size), seed)
        if state["current"] is not None:
            current.load(state["current"])
            state["current"] = None
        while not current.finished and run.affordable(1, len(indices)):
            current.advance(run)
            shown = (
                f"probe {indices[-1] + 1}/{samples}  mean {_mean([*finished, current.result()], len(parts))}"
            )
            run.step(
                lambda current=current, known=tuple(finished): {  # type: ignore[misc]
                    "finished": list(known),
                    "current": current.state(),
                },
                total,
                shown,
            )
        if not current.finished:
            partial = current.result() if current.step else None
            break
        finished.append(current.result())
    results = []
    for i in range(len(parts)):
        own = [result for result, (part, _) in zip(finished, units, strict=False) if part == i]
        if not own and partial is not None and len(finished) % len(parts) == i:
            own = [partial]  # fewer steps are better than nothing
        own = own or [Recurrence.begin(*parts[i], range(0), 1, seed).result()]
        results.append({key: torch.cat([result[key] for result in own]) for key in own[0]})
    return results, len(finished) == len(units)


def _mean(results: list[dict[str, Tensor]], parts: int) -> str:
    """The mean eigenvalue ± error so far, of the part at hand."""
    own = [result["moments"][:, 0, 0] for result in results[(len(results) - 1) % parts :: parts]]
    mean, error = mean_and_error(torch.cat(own))
    return pm(mean.item(), error.item())


def _column(result: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    return {key: value[:, b : b + 1] for key, value in result.items()}
