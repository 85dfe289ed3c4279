"""A-1: the absolute Hessian of one GPT-2 block, entry by entry, and its query, key and value part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.entries import Entries, described, summary
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Finding, Study, between, mean95, ratio
from curvlens.studies.top_layer import next_tokens

BLOCKS = ("attn.query", "attn.key", "attn.value", "attn.out", "mlp.up", "mlp.down")
ZOOM = BLOCKS[:3]
FLOOR = -14.0  # log10 of what is drawn as zero
REFERENCE = {"value": (1.60e-5, 2.32e-3, 2.67e-2), "query": (5.13e-7, 9.00e-6, 2.60e-4)}
KEYS = ("median", "largest", "norm")


@dataclass(frozen=True, kw_only=True)
class Map(Entries):
    pixels: int = 96  # of each map, along a side


def measure(config: Map, unit: str) -> dict[str, Any]:
    """The dense Hessian of the block; of the first repeat its two maps are kept, of all the numbers."""
    seed = seed_of(config, unit)
    net = network(config.width, seed, config.device)
    ids, labels = addition(config.sequences, seed, config.device)
    R = hessian(of_net(net), embedded(net, ids), next_tokens(labels), loss="cross-entropy")
    names = [f"layer.0.{name}" for name in BLOCKS]
    space = R.blocks.select(*names)
    H = R.total.block(space).dense()
    at = {name.rpartition(".")[2]: span for name, span in space.ranges.items()}
    made: dict[str, Any] = {"asymmetry": float((H - H.mT).abs().max() / H.abs().max())}
    for block, span in at.items():
        made[block] = described(H[span, span])
    made["pairs"] = [[float(H[a, b].norm()) for b in at.values()] for a in at.values()]
    if unit == units(config)[0]:
        size = at["value"].stop
        made["map"], made["zoom"] = (pixels(part, config.pixels) for part in (H, H[:size, :size]))
    return made


def pixels(H: Tensor, side: int) -> list[list[float]]:
    """log10 of the mean absolute entry under each pixel."""
    means = F.adaptive_avg_pool2d(H.abs()[None, None], min(side, len(H)))[0, 0]
    return [[round(value, 2) for value in row] for row in means.log10().clamp(min=FLOOR).tolist()]


def numbers(config: Map, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    names = [name.rpartition(".")[2] for name in BLOCKS]
    made: dict[str, Any] = {name: summary(measured, name) for name in names}
    made |= {
        "map": runs[0]["map"],
        "zoom": runs[0]["zoom"],
        "asymmetry": max(run["asymmetry"] for run in runs),
    }
    made["pairs"] = torch.tensor([run["pairs"] for run in runs]).mean(0).tolist()
    for key in KEYS:
        made[f"value over query, {key}"] = mean95([run["value"][key] / run["query"][key] for run in runs])
    return made


ONE_DRAW = (
    "the reference is one draw of weights and data, whose scatter over our repeats is a factor of up to two"
)


def judge(config: Map, made: dict[str, Any]) -> list[Finding]:
    found = []
    for key, paper in zip(KEYS, ("31", "258", "103"), strict=True):
        why = "'significantly smaller': by an order of magnitude at the least"
        ours = made[f"value over query, {key}"]
        found.append(between(f"value over query, {key}", paper, ours, 10, math.inf, why))
    if (config.width, config.sequences) == (16, 64):
        for block, values in REFERENCE.items():
            for key, value in zip(KEYS, values, strict=True):
                found.append(ratio(f"{key} of {block}", value, made[block][key], 2.0, ONE_DRAW, main=False))
    symmetric = "a Hessian is symmetric, up to rounding in float64"
    found.append(between("largest asymmetry over largest entry", "0", made["asymmetry"], 0, 1e-12, symmetric))
    return found


def figure(config: Map, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.6, height=3.2)
    d = config.width
    sizes = {"map": (d * d,) * 4 + (4 * d * d,) * 2, "zoom": (d * d,) * 3}
    names = [name.rpartition(".")[2] for name in BLOCKS]
    for axis, key in zip(axes.flat, ("map", "zoom"), strict=True):
        total, ends, middles = sum(sizes[key]), [], []
        for i, size in enumerate(sizes[key]):
            middles.append((sum(sizes[key][:i]) + size / 2) / total)
            ends.append((sum(sizes[key][:i]) + size) / total)
        image = axis.imshow(
            made[key], extent=(0, 1, 1, 0), cmap="magma", vmin=-9, vmax=-2.5, interpolation="nearest"
        )
        for end in ends[:-1]:
            axis.axvline(end, color="w", lw=0.4)
            axis.axhline(end, color="w", lw=0.4)
        axis.set_xticks(middles, names[: len(middles)], fontsize=7)
        axis.set_yticks(middles, names[: len(middles)], fontsize=7, rotation=90, va="center")
        axis.tick_params(length=0)
        draw.titled(axis, "one block" if key == "map" else "query, key, value")
    drawing.colorbar(image, ax=axes, shrink=0.8).set_label("log10 of the mean |entry|", fontsize=7)
    return drawing


STUDY = Study(
    name="A-1",
    title="The Hessian of one block, entry by entry",
    source="Paper A, Figure 1",
    claim="In a single-block GPT-2 at initialisation the entries of the query block are significantly smaller than "
    "those of the value block.",
    presets={
        "smoke": Map(width=4, sequences=4, repeats=4, pixels=48),
        "cpu": Map(repeats=5),
        "paper": Map(),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact, by products in closed form, of all weights of the block. A pixel is the mean of the absolute "
    "entries under it.",
)
