"""How much the numbers move from one part of the data to another."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.curvature import hessian
from curvlens.estimate import vectors
from curvlens.estimate.result import student
from curvlens.report.data import Noise
from curvlens.report.stages.context import Context, Outcome, Skip


def measure(at: Context) -> Outcome:
    """Loss, gradient and the curvature along the top eigenvector on disjoint parts. Cost: one gradient, one product."""
    if len(at.parts) < 2:
        raise Skip("the data is one sample; give more for an idea of its noise")
    weights = torch.tensor([part.weight for part in at.parts], dtype=torch.float64)
    rows = {"loss": [part.value().item() for part in at.parts]}
    gradients = [part.gradient() for part in at.parts]
    rows["norm of the gradient"] = [vectors.norm(g[None])[0].item() for g in gradients]
    mean = at.gradient
    norm = vectors.norm(mean[None])[0].item()
    if norm > 0:
        rows["gradient along the mean gradient"] = [
            vectors.dot(g[None], mean[None])[0].item() / norm for g in gradients
        ]
    if "eigenpairs" in at.found:
        v = at.pairs.vectors[:, int(at.pairs.values.argmax())][None].contiguous()
        rows["curvature along the top eigenvector"] = [
            vectors.dot(v, hessian(part).apply(v))[0].item() for part in at.parts
        ]
    found = [
        _row(label, torch.tensor(values, dtype=torch.float64), weights) for label, values in rows.items()
    ]
    return Outcome({"noise": found}, "exact", f"{len(at.parts)} parts of the data", len(at.parts))


def _row(label: str, values: Tensor, weights: Tensor) -> Noise:
    """Weighted mean over parts, spread, and error of the mean (parts of unequal weight count by their weight)."""
    share = weights / weights.sum()
    mean = (share * values).sum()
    effective = 1 / share.square().sum()
    spread = ((share * (values - mean).square()).sum() / (1 - 1 / effective)).sqrt()
    error = spread / effective.sqrt() * student(len(values))
    return Noise(label, values.tolist(), mean.item(), spread.item(), error.item())
