"""A-norm: no, pre-, post-LayerNorm and RMSNorm: heterogeneity of growth, and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curvlens import nets
from curvlens.exact.chain import Chain
from curvlens.exact.jet import Layer
from curvlens.exact.norm import LayerNorm, RMSNorm
from curvlens.exact.of_net import embedded, of_net
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, exponent, logarithmic, network
from curvlens.studies.every_layer import outer_norm, outer_rows
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95
from curvlens.studies.top_layer import next_tokens, top_layer

KINDS = ("none", "pre", "post", "pre RMS")
BLOCKS = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class Placements(Config):
    width: int = 32
    sequences: int = 16
    repeats: int = 20
    scales: tuple[float, ...] = logarithmic(-2, 1, 10)
    depths: tuple[int, ...] = (1, 2, 4)
    deep_scales: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)


def built(net: nets.GPT, kind: str) -> Chain:
    """The network in closed form, its norms replaced where RMSNorm is meant."""
    chain = of_net(net)
    return with_rms(chain) if kind == "pre RMS" else chain  # type: ignore[return-value]


def with_rms(layer: Layer) -> Layer:
    """The same with every LayerNorm an RMSNorm of the same weights."""
    if isinstance(layer, LayerNorm):
        return RMSNorm(layer.weights["weight"], eps=layer.eps)
    if isinstance(layer, Chain):
        return Chain([(name, with_rms(inner)) for name, inner in layer.layers], layer.residual)
    return layer


def measure(config: Placements, unit: str) -> dict[str, Any]:
    """Exact norms of H over σ of one block; of H_o of the first layer over σ and depth."""
    seed = seed_of(config, unit)
    ids, labels = addition(config.sequences, seed, config.device)
    targets = next_tokens(labels)
    made: dict[str, list[float]] = {}
    for kind in KINDS:
        place = kind.split()[0]
        net = network(config.width, seed, config.device, norm=place)
        for sigma in config.scales:
            embed(net, sigma, seed)
            layer = top_layer(built(net, kind), embedded(net, ids), targets)
            for block in BLOCKS:
                made.setdefault(f"{kind}: {block}", []).append(layer.norm("total", block))
        for depth in config.depths:
            net = network(config.width, seed, config.device, norm=place, depth=depth)
            names = [f"layer.0.attn.{block}" for block in ("query", "value")]
            for sigma in config.deep_scales:
                embed(net, sigma, seed)
                for name, C in outer_rows(built(net, kind), embedded(net, ids), targets, names).items():
                    key = f"{kind}, depth {depth}: {name.rpartition('.')[2]}"
                    made.setdefault(key, []).append(outer_norm(C, C))
    return made


def numbers(config: Placements, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {name: [run[name] for run in runs] for name in runs[0]}
    for kind in KINDS:
        for span, ends in (("below 1", (0.0, 1.0)), ("above 1", (1.0, math.inf))):
            slopes = [
                [exponent(config.scales, run[f"{kind}: {block}"], *ends) for block in BLOCKS] for run in runs
            ]
            made[f"{kind}: slopes {span}"] = [mean95(column) for column in zip(*slopes, strict=True)]
            made[f"{kind}: apart {span}"] = mean95([max(s) - min(s) for s in slopes])
        sizes = [[math.log10(run[f"{kind}: {block}"][i]) for block in BLOCKS] for run in runs for i in (0,)]
        made[f"{kind}: decades"] = mean95([max(s) - min(s) for s in sizes])
        for depth in config.depths:
            key = f"{kind}, depth {depth}: value"
            made[f"{kind}: deep {depth}"] = mean95(
                [exponent(config.deep_scales, run[key], 0, math.inf) for run in runs]
            )
    return made


def judge(config: Placements, made: dict[str, Any]) -> list[Finding]:
    found = []
    none = made["none: apart below 1"]
    three = "equation 5: σ⁵ against σ², over a range whose upper end bends: 0.5"
    found.append(between("exponents apart, none, σ < 1", "3", none, 2.5, 3.5, three))
    for kind in KINDS[1:]:
        less = "'much smaller' than without norms: less than half of 3"
        for span in ("below 1", "above 1"):
            place = "σ < 1" if span == "below 1" else "σ > 1"
            main = kind.startswith("pre")
            ours = made[f"{kind}: apart {span}"]
            found.append(
                between(
                    f"exponents apart, {kind}, {place}", "much less than 3", ours, 0, 1.5, less, main=main
                )
            )
        fewer = "blocks of more alike sizes at small σ: fewer decades between the largest and the smallest than without"
        ours, without = made[f"{kind}: decades"], made["none: decades"][0]
        what = f"decades between query, key and value, {kind}, σ = {config.scales[0]:g}"
        found.append(between(what, f"below {without:.2g} (none)", ours, 0, without / 2, fewer, main=False))
    deep, shallow = config.depths[-1], config.depths[0]
    why = "without norms the dependence on the data grows with depth: so does the first layer's exponent, of value"
    rise = made[f"none: deep {deep}"][0] - made[f"none: deep {shallow}"][0]
    found.append(
        between(
            f"rise of the exponent from depth {shallow} to {deep}, σ ≥ 1, none",
            "> 0",
            rise,
            0.2,
            1e3,
            why,
            said=NO_POWER,
        )
    )
    for kind in KINDS[1:]:
        rise = made[f"{kind}: deep {deep}"][0] - made[f"{kind}: deep {shallow}"][0]
        why = "with norms the exponent does not rise with depth"
        what = f"rise of the exponent from depth {shallow} to {deep}, σ ≥ 1, {kind}"
        found.append(between(what, "none", rise, -1e3, 0.2, why))
    return found


NO_POWER = (
    "the super-exponential law is that of linear attention (A-7). With softmax the deep network's curve rises by "
    "decades more than the shallow one's, and falls again as probabilities saturate: no one power describes it"
)


def figure(config: Placements, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(4, 2, width=2.5)
    for (upper, lower), kind in zip(axes.T, KINDS, strict=True):
        for block, colour in zip(BLOCKS, ("#2471a3", "#8e44ad", "#c0392b"), strict=True):
            draw.curve(upper, config.scales, made[f"{kind}: {block}"], block, colour)
        for i, depth in enumerate(config.depths):
            draw.curve(
                lower, config.deep_scales, made[f"{kind}, depth {depth}: value"], f"depth {depth}", f"C{i}"
            )
        for axis in (upper, lower):
            axis.set_xscale("log")
            axis.set_yscale("log")
            draw.legend(axis)
        draw.titled(
            upper, {"none": "no norm", "pre RMS": "pre-RMSNorm"}.get(kind, f"{kind}-LayerNorm"), "", ""
        )
        draw.titled(lower, "", "σ", "")
    axes[0, 0].set_ylabel(r"$\Vert H\Vert_F$, one block", fontsize=8)
    axes[1, 0].set_ylabel(r"$\Vert H_o\Vert_F$, value, first layer", fontsize=8)
    return drawing


STUDY = Study(
    name="A-norm",
    title="Where the norm stands: heterogeneity and depth",
    source="Paper A, §4.3",
    claim="Norms tame the dependence on the data, which otherwise grows with depth; Pre-LN evens out the growth of the "
    "blocks with the scale of the tokens.",
    presets={
        "smoke": Placements(width=6, sequences=2, repeats=3, scales=(0.01, 0.1, 1.0, 10.0), depths=(1, 2),
                            deep_scales=(1.0, 8.0)),
        "cpu": Placements(repeats=10),
        "paper": Placements(width=128, sequences=64),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact norms. RMSNorm stands where Pre-LN's norms stand. Post-LN scales away the tokens after the first "
    "block only, and the attention of that block sees them as they are.",
)  # fmt: skip
