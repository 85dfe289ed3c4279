"""How the mean loss of a trained ViT settles as handwritten digits are added, for B-converge and B-criteria."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.scaling.convergence import LandscapeConvergence, landscape_convergence
from curvlens.studies.growth_without_norm import seed_of
from curvlens.studies.images import classifier, handwritten, train
from curvlens.studies.study import Config

CURVE = 40  # points that are kept of a curve over k


@dataclass(frozen=True, kw_only=True)
class Landscapes(Config):
    width: int = 16
    depth: int = 1
    steps: int = 400
    samples: int = 512
    repeats: int = 5
    draws: int = 32
    dims: int = 10
    sigma: float = 1e-3


def landscape(config: Landscapes, unit: str, norms: int | None = None) -> LandscapeConvergence:
    """Of one net, trained on the digits that are not measured on."""
    seed = seed_of(config, unit)
    images, classes = (t.to(config.device) for t in handwritten(seed))
    net = classifier("ViT", seed, config.device, width=config.width, depth=config.depth)
    n = config.samples
    train(net, images[n:], classes[n:], config.steps, torch.optim.Adam(net.parameters(), lr=3e-3), seed)
    return landscape_convergence(
        net,
        [(images[:n], classes[:n])],
        "cross-entropy",
        sigma=config.sigma,
        draws=config.draws,
        dims=config.dims,
        norms=norms,
        seed=seed,
    )


def places(count: int) -> list[int]:
    """Indices into `count` numbers, even on a logarithmic scale."""
    points = min(CURVE, count)
    return sorted({round(count ** (i / (points - 1))) - 1 for i in range(points)})


def thinned(curve: Tensor) -> list[float]:
    return curve[places(len(curve))].tolist()


def middle(values: Tensor) -> float:
    """The median of those that are finite."""
    return values[values.isfinite()].median().item()


def geometric(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def shared(made: LandscapeConvergence) -> dict[str, Any]:
    return {"k": [i + 1 for i in places(len(made.changes))], "differences": thinned(made.changes.abs())}
