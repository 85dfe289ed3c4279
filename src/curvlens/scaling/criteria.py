"""How far one more sample moves the landscape around a point: Δ₁, Δ₂ and Δ₂^(D), for all numbers of samples at once.

With `D_k(w) = L_{k+1}(w) − L_k(w)`, linear in the samples' losses:

    Δ₁      = E |D_k(θ + ε d)|           over unit directions d
    Δ₂      = E D_k(θ + z)²              over z ~ N(0, σ² I)
    Δ₂^(D)  = E D_k(θ + U z)²            over z ~ N(0, σ² I_D), U an orthonormal basis of D directions

and where `D_k` is its own Taylor polynomial `a + cᵀz + ½ zᵀBz`, in closed form

    Δ₂ = (a + ½ σ² tr B)² + σ² ‖c‖² + ½ σ⁴ ‖B‖_F².

In D directions `c` and `B` are known exactly. In all of them `c` is exact, one gradient a sample, and `tr B`, `‖B‖_F²`
follow from quadratic forms of Gaussian probes v: `E vᵀBv = tr B`, `Var vᵀBv = 2 ‖B‖_F²`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.estimate.result import jackknife, mean_and_error
from curvlens.scaling.difference import differences, shares


@dataclass(frozen=True)
class Criterion:
    """One criterion for k = 1 … n − 1, by sampling the true losses and by the closed form of the Taylor polynomial."""

    name: str
    sampled: Tensor  # [n − 1]
    sampled_stderr: Tensor
    quadratic: Tensor | None = None  # None where there is no closed form
    quadratic_stderr: Tensor | None = None  # zero where it is exact


def absolute(moved: Tensor, weights: Tensor) -> Criterion:
    """Δ₁ from losses `[draws, n]` at `θ + ε d`."""
    value, error = mean_and_error(differences(moved, weights).abs())
    return Criterion("Δ₁", value, error)


def squared(
    name: str, moved: Tensor, weights: Tensor, quadratic: tuple[Tensor, Tensor] | None = None
) -> Criterion:
    """Δ₂ from losses `[draws, n]` at `θ + z`, beside a closed form with its error."""
    value, error = mean_and_error(differences(moved, weights).square())
    return Criterion(name, value, error, *(quadratic or (None, None)))


def second_moment(a: Tensor, c_squared: Tensor, trace: Tensor, square: Tensor, sigma: float) -> Tensor:
    """`(a + ½ σ² tr B)² + σ² ‖c‖² + ½ σ⁴ ‖B‖_F²`."""
    return (a + sigma**2 / 2 * trace).square() + sigma**2 * c_squared + sigma**4 / 2 * square


def in_subspace(losses: Tensor, first: Tensor, second: Tensor, weights: Tensor, sigma: float) -> Tensor:
    """Δ₂^(D) in closed form, exact, from `Uᵀ∇ℓ_i` `[n, D]` and `Uᵀ∇²ℓ_i U` `[n, D, D]`."""
    c = differences(first.T, weights)
    B = differences(second.permute(1, 2, 0), weights)
    trace = B.diagonal().sum(1)
    return second_moment(
        differences(losses, weights), c.square().sum(0), trace, B.square().sum((0, 1)), sigma
    )


def in_full_space(
    losses: Tensor, c_squared: Tensor, forms: Tensor, weights: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """Δ₂ in closed form and its error, from `‖c_k‖²` and the quadratic forms `vᵀ∇²ℓ_i v` `[m, n]` of Gaussian probes.

    `¼ σ⁴ Var(vᵀBv)` stands for `½ σ⁴ ‖B‖_F²`; the jackknife over probes takes out the bias of both squares.
    """
    a, q = differences(losses, weights), differences(forms, weights)

    def moment(means: Tensor) -> Tensor:
        trace, square = means
        variance = square - trace.square()
        return second_moment(a, c_squared, trace, variance / 2, sigma)

    return jackknife(torch.stack([q, q.square()], dim=1), moment)


@dataclass(frozen=True)
class Gradients:
    """What is needed of the samples' gradients."""

    steps: Tensor  # [n − 1], ‖c_k‖² = ‖∇L_{k+1} − ∇L_k‖²
    spread: float  # Σ (w_i/w̄)² ‖∇ℓ_i − ∇L‖² / (n − 1)
    largest: float  # of ‖∇ℓ_i‖


def gradient_differences(gradients: Iterable[Tensor], weights: Tensor) -> Gradients:
    """From one gradient after the other, with three vectors of memory."""
    share = shares(weights).tolist()
    squares = (weights / weights.mean()).square().tolist()
    mean, scaled, total, largest = torch.zeros(()), torch.zeros(()), 0.0, 0.0
    found: list[float] = []
    for number, flat in enumerate(gradients):
        gradient = flat.double()
        change = gradient - mean if number == 0 else share[number - 1] * (gradient - mean)
        mean = mean + change
        scaled = scaled + squares[number] * gradient
        square = gradient.square().sum().item()
        total += squares[number] * square
        largest = max(largest, square**0.5)
        if number:
            found.append(change.square().sum().item())
    centred = total - 2 * (mean * scaled).sum().item() + sum(squares) * mean.square().sum().item()
    return Gradients(torch.tensor(found, dtype=torch.float64), centred / max(1, len(found)), largest)
