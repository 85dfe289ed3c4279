"""Where the model stands: loss, gradient, weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from curvlens.estimate import vectors
from curvlens.report.data import Number
from curvlens.report.groups import sums
from curvlens.report.stages.context import Context, Outcome


def measure(at: Context) -> Outcome:
    """The loss, and the norms of gradient and parameters, in whole and by group. Cost: one gradient."""
    land = at.land
    loss, gradient = land.value().item(), at.gradient
    point = land.blocks.from_parameters(land.parameters())
    members = sums(at.group_blocks, land.blocks)
    norms = [
        (members @ vectors.block_dots(v[None], v[None], land.blocks)[0]).sqrt() for v in (gradient, point)
    ]
    found = [
        replace(group, gradient=g, weight=w)
        for group, g, w in zip(at.groups, norms[0].tolist(), norms[1].tolist(), strict=True)
    ]
    numbers = {
        "loss": Number("loss", loss),
        "gradient_norm": Number("norm of the gradient", torch.linalg.vector_norm(norms[0]).item()),
        "parameter_norm": Number("norm of the parameters", torch.linalg.vector_norm(norms[1]).item()),
    }
    return Outcome({"numbers": numbers, "groups": found}, "exact")
