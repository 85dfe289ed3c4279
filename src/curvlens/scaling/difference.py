"""How the mean loss changes when one sample is added, and what it would do with no model behind it.

With `L_k = Σ_{i≤k} w_i ℓ_i / W_k`, `W_k = Σ_{i≤k} w_i`, exactly

    L_{k+1} − L_k = (w_{k+1} / W_{k+1}) (ℓ_{k+1} − L_k),

`1/(k+1)` in front where all samples have the same number of scored tokens. So any independent losses whatever fall as
`1/k`; a curve of the differences says of the model only what its height says. The null are such losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.estimate.result import mean_and_error


def running_means(values: Tensor, weights: Tensor) -> Tensor:
    """`Σ_{i≤k} w_i x_i / W_k` along the last dimension, `[..., n]`."""
    return (values * weights).cumsum(-1) / weights.cumsum(-1)


def shares(weights: Tensor) -> Tensor:
    """`w_{k+1} / W_{k+1}` for k = 1 … n − 1."""
    return weights[1:] / weights.cumsum(0)[1:]


def differences(values: Tensor, weights: Tensor) -> Tensor:
    """`L_{k+1} − L_k` for k = 1 … n − 1, `[..., n] -> [..., n − 1]`.

    By the identity above: the difference of two means would lose digits. It holds for anything linear in the losses:
    gradients, curvatures.
    """
    return shares(weights) * (values[..., 1:] - running_means(values, weights)[..., :-1])


def spread(values: Tensor, weights: Tensor) -> Tensor:
    """`s`, such that on average over the order of the samples `E (L_{k+1} − L_k)² ≈ s² / (k (k + 1))`.

    The root mean square of `(w_i / w̄)(ℓ_i − L)`: the standard deviation of the losses where all weights are the same,
    and then the law is exact for independent samples. `[..., n] -> [...]`.
    """
    mean = (values * weights).sum(-1, keepdim=True) / weights.sum()
    scaled = weights / weights.mean() * (values - mean)
    return (scaled.square().sum(-1) / (values.shape[-1] - 1)).sqrt()


def slope(steps: Tensor, changes: Tensor, start: int = 10) -> float:
    """The slope of log change against log k from k = `start`, by least squares; zeros are passed over."""
    kept = (changes > 0) & (steps >= min(start, len(steps) // 2))
    x, y = steps[kept].log(), changes[kept].log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum()) if len(x) > 1 else math.nan


@dataclass(frozen=True)
class Null:
    """`|L_{k+1} − L_k|` of independent Gaussian losses that have the samples' mean and spread and no model."""

    mean: Tensor  # [n − 1], over the draws
    stderr: Tensor
    slope: float
    slopes: tuple[float, float]  # between them lie 95 % of the draws


def null(losses: Tensor, weights: Tensor, draws: int = 200, seed: int = 0) -> Null:
    """The null of a set of losses."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, len(losses), generator=generator, dtype=torch.float64)
    mean = (losses * weights).sum() / weights.sum()
    deviation = (weights * (losses - mean).square()).sum().div(weights.sum()).sqrt()
    changes = differences(mean + deviation * noise, weights).abs()
    steps = torch.arange(1, len(losses), dtype=torch.float64)
    slopes = torch.tensor([slope(steps, one) for one in changes], dtype=torch.float64)
    low, high = slopes.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    value, error = mean_and_error(changes)
    return Null(value, error, slopes.mean().item(), (low, high))
