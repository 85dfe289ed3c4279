"""What the norms do to what passes through them: the deviation of their inputs and the gain of their Jacobians."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from curvlens import guards
from curvlens.report.data import NormGains
from curvlens.report.stages.context import Context, Outcome, Skip

FITS = 1e-2  # how near an output must be to γ x / √(var + ε) for its module to count as an RMSNorm


def measure(at: Context) -> Outcome:
    """One forward pass over all data. The Jacobian of a norm is `γ r (C − n nᵀ/d)`, r = (var + ε)^(-1/2)."""
    modules = _norms(at)
    if not modules:
        raise Skip("the model has no LayerNorm or RMSNorm with a weight")
    rows: dict[str, list[Tensor]] = defaultdict(list)

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            found = _tokens(module, inputs[0].double(), output.double())
            if found is not None:
                rows[name].append(found)

        return look

    land = at.land
    with ExitStack() as hooks, guards.twice_differentiable(land.model, land.device), torch.no_grad():
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(watch(name)).remove)
        for piece in land.pieces():
            land.output(land.parameters(), piece)
    if not rows:
        raise Skip("the norms of this model are of a kind that is not known")
    means = torch.stack([torch.cat(parts).mean(0) for parts in rows.values()])
    deviation, gain, epsilon = means[:, 0].sqrt(), means[:, 1].sqrt(), means[:, 2]
    found = NormGains(list(rows), deviation.tolist(), gain.tolist(), epsilon.tolist())
    return Outcome({"norms": found}, "exact")


def _norms(at: Context) -> dict[str, nn.Module]:
    """Modules whose weight is that of a group of the kind "norm", by the group's name."""
    names = {block: g.name for g in at.groups if g.role == "norm" for block in g.blocks}
    owners = {
        block.source.parameter.removesuffix(".weight"): names[block.name]
        for block in at.land.blocks
        if block.name in names and block.source is not None and block.source.parameter.endswith(".weight")
    }
    return {name: module for path, module in at.land.model.named_modules() if (name := owners.get(path, ""))}


def _tokens(module: nn.Module, x: Tensor, out: Tensor) -> Tensor | None:
    """`[tokens, 3]`: variance, mean squared gain, share of ε; None for a module that is neither norm."""
    epsilon = next(
        (getattr(module, n) for n in ("eps", "variance_epsilon", "epsilon") if hasattr(module, n)), None
    )
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else float(epsilon)
    x, out = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
    if isinstance(module, nn.LayerNorm):
        x = x - x.mean(1, keepdim=True)
    variance = x.square().mean(1)
    r = (variance + epsilon).rsqrt()
    normed = x * r[:, None]
    if isinstance(module, nn.LayerNorm):
        weight = module.weight.double()
    else:  # the weight as it acts: some add one to it
        weight = (out * normed).sum(0) / normed.square().sum(0).clamp(min=1e-300)
        if (out - weight * normed).norm() > FITS * out.norm():
            return None
    gain = r.square() * weight.square().mean()
    return torch.stack([variance, gain, epsilon * r.square()], dim=1)
