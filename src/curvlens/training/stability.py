"""The largest learning rate at which an optimizer is stable on the local quadratic, against the one in use.

With `D` the largest stable curvature along each entry (`2/η` for gradient descent, `(2 + 2μ)/η` with momentum,
`(2 + 2β1) P / ((1 - β1) η)` for Adam, each entry with its own group's settings) and `Λ` weight decay's own curvature,
an optimizer is stable where `H + Λ ≺ D`, so while

    λ = λ_max(D^{-1/2} (H + Λ) D^{-1/2}) < 1.

`D` is as `1/η`: all rates together may grow by `1/λ`. That is the critical rate. It says nothing of noise, and P of
Adam is taken as it stands, though it follows the gradients at the pace of β2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.curvature import hessian
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.result import pm, table
from curvlens.estimate.sharpness import Preconditioned, stable_curvature
from curvlens.landscape import Landscape
from curvlens.operator import Operator
from curvlens.structured import Diagonal
from curvlens.training.curvature_aware import CurvatureAware

SHOWN = 5  # blocks in the table


@dataclass(frozen=True)
class GroupRate:
    """A parameter group: its rate, the critical one if all rates grow alike, its share of the sharpest direction."""

    index: int
    rate: float
    critical: float
    share: float
    parameters: int


@dataclass(frozen=True, repr=False)
class Stability:
    """`value` is λ: the rates in use over the critical ones, unstable above one; `stderr` bounds its error."""

    value: float
    stderr: float
    rules: tuple[str, ...]
    optimizer: str
    groups: tuple[GroupRate, ...]
    blocks: dict[str, float]  # each block's share of the sharpest direction, as the optimizer sees it
    decay: float  # the share of λ that is weight decay's
    left_out: tuple[str, ...]  # trainable parameters that the optimizer does not have
    pairs: Eigenpairs  # the vector lives in the coordinates D^{1/2} θ

    @property
    def stable(self) -> bool:
        return self.value < 1

    @property
    def factor(self) -> float:
        """By what all rates may be multiplied; infinite where nothing curves upwards."""
        return 1 / self.value if self.value > 0 else math.inf

    @property
    def rate(self) -> float:
        """The largest rate in use."""
        return max(group.rate for group in self.groups)

    @property
    def critical(self) -> float:
        """What the largest rate may become, all others in proportion."""
        return self.rate * self.factor

    @property
    def critical_error(self) -> float:
        """`critical` may be too large by so much: an eigenvalue lies within a residual above λ."""
        if not math.isfinite(self.factor):
            return 0.0
        return self.critical - self.rate / (self.value + self.stderr)

    @property
    def converged(self) -> bool:
        return self.pairs.converged

    @property
    def products(self) -> int:
        return self.pairs.products

    def __repr__(self) -> str:
        state = "converged" if self.converged else f"not converged: {self.pairs.stopped}"
        word = "stable" if self.stable else "unstable"
        lines = [
            f"{self.optimizer} is {word}: its rate is {pm(self.value, self.stderr)} of the critical one "
            f"({self.products} products, {state})",
            f"  critical rate {pm(self.critical, self.critical_error)}, in use {self.rate:.4g}; "
            f"stable below {'; '.join(self.rules)}",
        ]
        if len(self.groups) > 1:
            rows = [["group", "parameters", "rate", "critical", "share"]]
            for group in self.groups:
                row = (
                    f"{group.parameters:,}",
                    f"{group.rate:.3g}",
                    f"{group.critical:.3g}",
                    f"{group.share:.0%}",
                )
                rows.append([str(group.index), *row])
            lines.append(table(rows))
        top = sorted(self.blocks.items(), key=lambda item: -item[1])[:SHOWN]
        lines.append("  the sharpest direction: " + ", ".join(f"{name} {share:.0%}" for name, share in top))
        if self.decay:
            lines.append(f"  weight decay makes {self.decay:.1%} of it")
        if self.left_out:
            lines.append(f"  not in the optimizer, so held fast: {', '.join(self.left_out)}")
        return "\n".join(lines)


def stability(
    land: Landscape,
    optimizer: torch.optim.Optimizer,
    tol: float = 1e-3,
    H: Operator | None = None,
    **settings: Any,
) -> Stability:
    """The critical learning rate of SGD (momentum, Nesterov), RMSprop, Adam or AdamW at the present weights.

    The optimizer's groups may differ in rate, momentum and decay; parameters that it does not have are held fast. `H`:
    another curvature than the Hessian, such as `gauss_newton(land)`. `settings` are those of `eigsh`: `start=` takes
    the `pairs` of an earlier result. Cost: that of the largest eigenvalue, some 10 to 40 products.
    """
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            "expected an optimizer that minimizes, got one with maximize=True; negate the loss instead"
        )
    aware = optimizer if isinstance(optimizer, CurvatureAware) else None
    base = aware.optimizer if aware is not None else optimizer
    named = {name: p for name, p in land.model.named_parameters() if p.requires_grad}
    trained, left_out = _trained(land.blocks, base, named)
    H = hessian(land) if H is None else H
    if left_out:
        H = H.block(trained, trained)
    limits, decays, rules = stable_curvature(H, base, named)
    if aware is not None:
        limits = limits / aware.factor().to(limits)[aware.land.blocks.positions(trained)]
    scale = limits.rsqrt()
    whole = H + Diagonal(decays.to(H.device, H.dtype), H.domain) if decays.any() else H
    settings = {"copies": False, **settings}
    pairs = eigsh(Preconditioned(whole, scale), 1, "LA", tol, **settings)
    value, error = (pairs.values[0].item(), pairs.residuals[0].item()) if len(pairs) else (math.nan, math.inf)
    vector = pairs.vectors[:, 0].double() if len(pairs) else torch.zeros_like(scale)
    decayed = (vector.square() * (scale.square() * decays).to(vector)).sum().item()
    return Stability(
        value,
        error,
        rules,
        type(base).__name__ if aware is None else f"CurvatureAware({type(base).__name__})",
        _by_group(H.domain, base, named, vector, value),
        {name: part.square().sum().item() for name, part in H.domain.split(vector).items()},
        decayed / value if value > 0 else 0.0,
        left_out,
        pairs,
    )


def _trained(
    blocks: Blocks, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> tuple[Blocks, tuple[str, ...]]:
    """The blocks whose parameter the optimizer has, and the parameters it has not."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = tuple(name for name in blocks.parameters if id(named[name]) not in held)
    kept = Blocks(b for b in blocks if b.source is not None and b.source.parameter not in left_out)
    if not len(kept):
        raise ValueError(
            "expected the optimizer to have parameters of the landscape's model, got none; is it another model's, or "
            "was the model copied after the optimizer was made?"
        )
    return kept, left_out


def _by_group(
    blocks: Blocks,
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, Tensor],
    vector: Tensor,
    value: float,
) -> tuple[GroupRate, ...]:
    homes = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    shares, counts = [0.0] * len(optimizer.param_groups), [0] * len(optimizer.param_groups)
    for name, part in blocks.split(vector).items():
        source = blocks[name].source
        assert source is not None
        index = homes[id(named[source.parameter])]
        shares[index] += part.square().sum().item()
        counts[index] += part.numel()
    return tuple(
        GroupRate(
            index,
            float(group["lr"]),
            float(group["lr"]) / value if value > 0 else math.inf,
            shares[index],
            counts[index],
        )
        for index, group in enumerate(optimizer.param_groups)
        if counts[index]
    )
