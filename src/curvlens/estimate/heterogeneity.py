"""How unlike the blocks' spectra are.

The Jensen-Shannon divergence of two densities p, q with the mean `m = (p + q) / 2` is
`(KL(p | m) + KL(q | m)) / 2`, with the natural logarithm: from 0, alike, to ln 2, disjoint. Its square root is a
metric, the Jensen-Shannon distance. Densities are normalised, smoothed by one kernel and compared on one support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens.estimate.density import Density, Support, block_densities, common_support
from curvlens.estimate.result import BlockMap, jackknife
from curvlens.operator import Operator

MEASURES = ("divergence", "distance", "norm", "trace", "top")


def heterogeneity(
    H: Operator | Mapping[str, Density],
    measure: str = "divergence",
    support: Support | None = None,
    **settings: Any,
) -> BlockMap:
    """A labelled matrix that compares the spectra of every two diagonal blocks, with error.

    `measure`: "divergence", Jensen-Shannon, in nats, at most ln 2; "distance", its root; "norm", "trace", "top": row
    over column of the root mean square eigenvalue, the mean eigenvalue, the largest Ritz value by magnitude.
    The support is by default the range of all blocks' nodes on a symmetric-log axis; the result's name says it.
    Errors are those of the jackknife over probes. Not so for "top": a Ritz value bounds the eigenvalue from below, so
    the largest of all probes stands, and as its error what the last quarter of the steps has added to it (what is
    still to come is less while Lanczos converges; `eigsh` has a true bound). `H` may be the result of
    `block_densities`, and then costs nothing; otherwise `settings` are those of that function.
    """
    if measure not in MEASURES:
        raise ValueError(f"expected a measure of {', '.join(MEASURES)}, got {measure!r}")
    densities = block_densities(H, **settings) if isinstance(H, Operator) else dict(H)
    samples = min(density.samples for density in densities.values())
    names, parts = tuple(densities), list(densities.values())
    if samples == 0:
        value = torch.full((len(parts), len(parts)), torch.nan, dtype=torch.float64)
        error, what = value, measure
    elif measure in ("divergence", "distance"):
        support = common_support(parts, symlog=True) if support is None else support
        masses = torch.stack([support.masses(p.nodes[:samples], p.weights[:samples]) for p in parts], dim=1)
        value, error = _jensen_shannon(masses, measure == "distance")
        what = f"Jensen-Shannon {measure} (nats) on {_described(support)}"
    elif measure == "top":
        value, error = _tops(parts)
        what = f"ratio of {_RATIO[measure]}"
    else:
        values = torch.stack([_measured(part, measure)[:samples] for part in parts], dim=1)
        value, error = _ratios(values, root=measure == "norm")
        what = f"ratio of {_RATIO[measure]}"
    last = parts[0]
    return BlockMap(
        what,
        names,
        names,
        value,
        error,
        samples,
        last.products,
        all(p.converged for p in parts),
        last.stopped,
    )


_RATIO = {"norm": "root mean square eigenvalues", "trace": "mean eigenvalues", "top": "largest Ritz values"}


def _described(support: Support) -> str:
    axis = "linear axis" if support.threshold is None else f"asinh(x / {support.threshold:.2g})"
    return f"[{support.low:.3g}, {support.high:.3g}], {axis}, {support.bins} bins, kernel {support.width:.2g}"


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of masses `[..., bins]` that sum to one, in nats."""
    m = (p + q) / 2
    parts = torch.special.xlogy(p, p) + torch.special.xlogy(q, q) - 2 * torch.special.xlogy(m, m)
    return (parts.sum(-1) / 2).clamp(min=0)


def _jensen_shannon(masses: Tensor, root: bool) -> tuple[Tensor, Tensor]:
    """From masses `[s, B, bins]`: all pairs, with the jackknife's correction, kept where a divergence can be."""

    def pairs(mean: Tensor) -> Tensor:
        found = torch.stack([divergence(row, mean) for row in mean])
        return found.sqrt() if root else found

    value, error = jackknife(masses, pairs, curved=True)
    ceiling = torch.log(torch.tensor(2.0, dtype=torch.float64))
    value = value.clamp(min=0).minimum(ceiling.sqrt() if root else ceiling)
    value, error = (value + value.T) / 2, (error + error.T) / 2
    return value.fill_diagonal_(0), error.fill_diagonal_(0)


def _tops(parts: list[Density]) -> tuple[Tensor, Tensor]:
    """Ratios of the largest Ritz values of all probes; relative errors add in square."""
    full, shorter = (torch.stack([p.top(part) for p in parts]) for part in (1.0, 0.75))
    relative = (
        (full - shorter) / full.clamp(min=torch.finfo(full.dtype).tiny) + 10 * torch.finfo(full.dtype).eps
    ).square()
    value = full[:, None] / full
    error = value * (relative[:, None] + relative).sqrt()
    return value.fill_diagonal_(1), error.fill_diagonal_(0)


def _measured(density: Density, measure: str) -> Tensor:
    return (density.weights * density.nodes ** (1 if measure == "trace" else 2)).sum(1)


def _ratios(values: Tensor, root: bool) -> tuple[Tensor, Tensor]:
    def pairs(mean: Tensor) -> Tensor:
        mean = mean.clamp(min=0).sqrt() if root else mean
        return mean[:, None] / mean

    value, error = jackknife(values, pairs)
    return value.fill_diagonal_(1), error.fill_diagonal_(0)
