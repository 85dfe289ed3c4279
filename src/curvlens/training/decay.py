"""The curvature that weight decay adds.

Coupled decay w (SGD, Adam, RMSprop: `g + w θ`) is the loss `w/2 ‖θ‖²`, so it adds `w I` to H, and is preconditioned
with it. Decoupled decay (AdamW: `θ ← (1 − η w) θ − η P^{-1} m`) is not: with the momentum `m ← β m + (1 − β) λ x` a
direction of preconditioned curvature λ follows

    z² − (1 − η w + β − η (1 − β) λ) z + β (1 − η w) = 0,

which leaves the unit disc at z = −1, where `λ + w (1 + β)/(1 − β) = (2 + 2β)/((1 − β) η)`: beside Adam's limit the
decay counts as the curvature `w (1 + β)/(1 − β)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks


@dataclass(frozen=True)
class Decay:
    coupled: Tensor  # [P], what is added to the diagonal of H
    decoupled: float  # what is added to the sharpness that the optimizer sees; of the largest decay
    weight: float  # the largest w

    def to_dict(self) -> dict[str, Any]:
        """The curvature of the decay itself, as the optimizer sees it beside that of the loss."""
        kind = "decoupled" if self.decoupled else "coupled" if self.weight else "none"
        return {"kind": kind, "weight": self.weight, "curvature": self.decoupled or self.weight}


def decay_of(optimizer: torch.optim.Optimizer, blocks: Blocks, names: Mapping[str, Tensor]) -> Decay:
    """The decay of the blocks' parameters."""
    homes = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts, decoupled, largest = {}, 0.0, 0.0
    for name, shape in blocks.parameters.items():
        group = homes[id(names[name])]
        w = float(group.get("weight_decay", 0.0))
        largest = max(largest, w)
        if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
            beta = float(group["betas"][0])
            decoupled, w = max(decoupled, w * (1 + beta) / (1 - beta)), 0.0
        parts[name] = torch.full(tuple(shape), w, dtype=torch.float64)
    return Decay(blocks.from_parameters(parts), decoupled, largest)
