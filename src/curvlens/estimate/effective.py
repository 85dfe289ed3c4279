"""Numbers that sum up a spectrum: effective dimension and rank, negative curvature, condition number."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from curvlens.estimate import vectors
from curvlens.estimate.density import Density, density
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.result import Estimate
from curvlens.operator import Operator


def effective_dimension(H: Operator | Density, damping: float, **settings: Any) -> Estimate:
    """`tr |H| (|H| + γ)^{-1} = sum |λ| / (|λ| + γ)`: the number of directions with curvature above the damping γ.

    `settings` are those of `density`; a Density that exists already costs nothing more.
    """
    if damping <= 0:
        raise ValueError(f"expected a positive damping, got {damping}")
    return _density(H, settings).spectral("effective dimension", lambda x: x.abs() / (x.abs() + damping))


def effective_rank(H: Operator | Density, **settings: Any) -> Estimate:
    """`exp(-sum p log p)` with `p = |λ| / sum |λ|` (Roy, Vetterli 2007): r for r eigenvalues of one size."""

    def rank(total: Tensor, entropy: Tensor) -> Tensor:
        total = total.clamp(min=torch.finfo(total.dtype).tiny)
        return torch.exp(torch.log(total) - entropy / total)

    return _density(H, settings).spectral("effective rank", torch.abs, _x_log_x, of=rank)


def _x_log_x(x: Tensor) -> Tensor:
    return torch.special.xlogy(x.abs(), x.abs())


def negative_fraction(
    H: Operator | Density, by: str = "curvature", threshold: float = 1e-6, **settings: Any
) -> Estimate:
    """How much of the curvature is negative.

    `by="curvature"`: `sum_{λ<0} |λ| / sum |λ|`. `by="count"`: the share of eigenvalues below `-threshold` times the
    largest magnitude; a step is hard for a quadrature, so its error is larger.
    """
    found = _density(H, settings)
    if by == "curvature":
        return found.spectral(
            "negative fraction of curvature",
            lambda x: (-x).clamp(min=0),
            torch.abs,
            of=lambda negative, total: negative / total.clamp(min=torch.finfo(total.dtype).tiny),
        )
    if by != "count":
        raise ValueError(f'expected by to be "curvature" or "count", got {by!r}')
    bound = -threshold * found.nodes.abs().max() if found.samples else 0.0
    return found.spectral("negative fraction of eigenvalues", lambda x: (x < bound).to(x.dtype) / found.size)


def condition(
    H: Operator,
    k: int = 10,
    subspace: Tensor | Eigenpairs | None = None,
    **settings: Any,
) -> Estimate:
    """Condition number on a stated subspace: `max |μ| / min |μ|`, with μ the eigenvalues of `Q^T H Q`.

    The subspace is spanned by the columns `[P, j]` given, or by the k largest eigenvectors by magnitude. For the
    latter the error is the bound that the residuals leave; for given vectors there is none but rounding.
    """
    if subspace is None:
        subspace = eigsh(H, k, "LM", **settings)
    if isinstance(subspace, Eigenpairs):
        magnitude = subspace.values.abs()
        if not len(magnitude):
            return Estimate(
                "condition number", math.nan, math.inf, 0, subspace.products, False, subspace.stopped
            )
        low, high = int(magnitude.argmin()), int(magnitude.argmax())
        value = (magnitude[high] / magnitude[low]).item()
        relative = (subspace.residuals / magnitude)[[low, high]].sum().item()
        what = f"condition number on {len(subspace)} eigenvectors ({subspace.which})"
        return Estimate(
            what, value, value * relative, 0, subspace.products, subspace.converged, subspace.stopped
        )
    rows, _, kept = vectors.extend(
        subspace.new_empty(0, len(subspace)), subspace.T, 100 * torch.finfo(H.dtype).eps
    )
    projected = vectors.gram(rows, H.apply(rows))
    magnitude = torch.linalg.eigvalsh((projected + projected.T) / 2).abs()
    value = (magnitude.max() / magnitude.min()).item()
    error = value * torch.finfo(H.dtype).eps * len(kept)
    return Estimate(f"condition number on {len(kept)} given vectors", value, error, 0, len(kept), True)


def _density(H: Operator | Density, settings: dict[str, Any]) -> Density:
    if isinstance(H, Density):
        if settings:
            raise TypeError(f"expected no settings beside a Density, got {', '.join(settings)}")
        return H
    return density(H, **settings)
