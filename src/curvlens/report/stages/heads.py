"""Every attention head: exact functional curvature, moments and entropy."""

from __future__ import annotations

import math

import torch

from curvlens import families
from curvlens.exact.heads import heads
from curvlens.report.data import HeadTable
from curvlens.report.stages.context import Context, Outcome, Skip


def measure(at: Context) -> Outcome:
    """One gradient, and closed forms (Theorem 3.2 of the attention paper, with the key blocks)."""
    if not families.attention_sites(at.land.model):
        raise Skip("no attention of a known family was found; describe it with families.register")
    try:
        found = heads(at.land, budget=at.preset.head_gradients, seed=at.seed)
    except ValueError as error:
        if "closed form" in str(error):
            raise Skip(str(error)) from error
        raise
    plain = found.to_dict()
    table = HeadTable(
        layers=list(found.layers),
        norms=_floats(plain["norms"]),
        stderr=_floats(plain["stderr"]),
        exact=plain["exact"],
        traces=_floats(plain["traces"]),
        entropy=_nan(plain["entropy"]),
        moments=_floats(plain["moments"]),
        entropy_limit=_limit(at),
        omitted=dict(found.omitted),
    )
    exact = all(all(layers) for layers in found.exact.values())
    return Outcome(
        {"heads": table}, "exact" if exact else "estimated", "" if exact else "norms of large heads"
    )


def _floats(tables: dict[str, list[list[float | None]]]) -> dict[str, list[list[float]]]:
    return {name: _nan(table) for name, table in tables.items()}


def _nan(table: list[list[float | None]]) -> list[list[float]]:
    return [[math.nan if x is None else x for x in row] for row in table]


def _limit(at: Context) -> float:
    """The mean entropy of attention spread evenly over the tokens in sight, of a causal or a full mask."""
    sites = families.attention_sites(at.land.model)
    if any(site.self_attention is False for site in sites):
        return math.nan
    piece = next(iter(at.land.pieces()))
    ids = next((t for t in piece.tensors() if not t.is_floating_point() and t.dim() == 2), None)
    if ids is None:
        return math.nan
    length = ids.shape[1]
    if sites[0].causal:
        return torch.log(torch.arange(1, length + 1, dtype=torch.float64)).mean().item()
    return math.log(length)
