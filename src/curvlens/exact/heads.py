"""Every attention head of a real model from one gradient: the exact norms and traces of its functional blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens import families
from curvlens.exact.head_capture import Unsupported, capture
from curvlens.exact.head_grams import BLOCKS, KEY_BLOCKS, Gram, Shared, inner, traces
from curvlens.exact.head_rows import Rows, Sequence
from curvlens.families import AttentionSite
from curvlens.landscape import Landscape


@dataclass(frozen=True)
class Heads:
    """The functional curvature of every attention head, split at the output of its layer.

    `norms[block]` and `traces[block]` are `[layers, heads]` for QQ, QK and VQ, one number for each query head `h`:
    VQ is the block between the values that head `h` reads and its query. KK and VK are `[layers, kv_heads]`: a key
    head's block sums over all query heads that share it, with the cross terms. The block VV is zero, and so is every
    block between different query heads. NaN stands where a layer has fewer heads than others, and for the trace of a
    block that is not square.
    """

    layers: tuple[str, ...]
    norms: dict[str, Tensor]
    stderr: dict[str, Tensor]  # of the norms; 0 where exact
    traces: dict[str, Tensor]  # exact
    exact: dict[str, Tensor]  # [layers]: whether the norms are
    entropy: Tensor  # [layers, heads], of the attention of a query in nats, a mean over those that the loss depends on
    moments: dict[str, Tensor]  # means of ‖M1‖, tr M2 and |tr M3[w]| of the key inputs, [layers, heads]
    sequences: int
    samples: int  # random vectors behind each norm that is not exact
    omitted: dict[str, str]  # layers without a closed form, and why


def heads(land: Landscape) -> Heads:
    sites = families.attention_sites(land.model)
    if not sites:
        raise ValueError("no sites")
    omitted: dict[str, str] = {}
    seen: dict[str, list[Sequence]] = {site.name: [] for site in sites}
    for piece in land.pieces():
        for name, found in capture(land, piece, sites).items():
            if isinstance(found, Unsupported):
                omitted[name] = str(found)
            else:
                seen[name].extend(found)
    sites = [site for site in sites if site.name not in omitted]
    H = max(s.heads for s in sites)
    G = max(s.kv_heads for s in sites)
    norms = {b: torch.full((len(sites), G if b in KEY_BLOCKS else H), math.nan, dtype=torch.float64) for b in BLOCKS}
    tr = {b: n.clone() for b, n in norms.items()}
    for i, site in enumerate(sites):
        for b in BLOCKS:
            count = site.kv_heads if b in KEY_BLOCKS else site.heads
            norms[b][i, :count] = 0
            tr[b][i, :count] = 0
        sequences = seen[site.name]
        for p, a in enumerate(sequences):
            for c in sequences[p:]:
                shared = Shared.of(a, c)
                crossed = a.x @ a.centred.T if a is c else None
                for g in range(site.kv_heads):
                    group = range(g * a.group, (g + 1) * a.group)
                    left = [Rows(a, h) for h in group]
                    right = left if a is c else [Rows(c, h) for h in group]
                    for u, rows in enumerate(left):
                        for other in right[u if a is c else 0 :]:
                            gram = Gram.over_tokens(rows, other, shared.y)
                            if rows is other:
                                for b, t in traces(rows, crossed, shared, gram).items():
                                    tr[b][i, g if b in KEY_BLOCKS else rows.head] += t
                            for b, t in inner(rows, other, shared, gram).items():
                                norms[b][i, g if b in KEY_BLOCKS else rows.head] += t * (1 if rows is other else 2)
    return {b: n.clamp(min=0).sqrt() for b, n in norms.items()}, tr, omitted, sites
