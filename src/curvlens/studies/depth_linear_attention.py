"""A-7: linear attention by depth, whose blocks grow super-exponentially."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.jet import Layer
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, local_slopes, logarithmic, network
from curvlens.studies.every_layer import diagonal_norms
from curvlens.studies.growth_without_norm import PARTS, seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, near

NETWORKS = ("chain", "with MLP")
FLOAT32 = math.log10(torch.finfo(torch.float32).max)


@dataclass(frozen=True, kw_only=True)
class Depths(Config):
    width: int = 128
    sequences: int = 64
    repeats: int = 20
    depths: tuple[int, ...] = (1, 2, 3)
    scales: tuple[float, ...] = logarithmic(-1, 1, 20)


def stacked(config: Depths, seed: int, depth: int, kind: str) -> Layer:
    """`depth` linear attentions one on the other; "with MLP": each with a ReLU MLP and its skip after it."""
    net: Any = network(config.width, seed, config.device, depth=depth, attention="linear")
    layers: list[tuple[str, Layer]] = []
    for i, block in enumerate(net.blocks):
        a = block.attn
        W_Q, W_K, W_V, W_O = (W.detach() for W in (a.W_Q, a.W_K, a.W_V, a.W_O))
        attention = SelfAttention(W_Q, W_K, W_V, W_O=W_O, activation="linear", causal=True, scale=a.scale)
        layers.append((f"layer.{i + 1}", AttentionLayer(attention)))
        if kind == "with MLP":
            mlp = FeedForward(block.mlp.W_1.detach(), block.mlp.W_2.detach(), activation="relu")
            layers.append((f"layer.{i + 1}", Chain([("mlp", mlp)], residual=True)))
    return Chain(layers)


def measure(config: Depths, unit: str) -> dict[str, Any]:
    """`kind: depth: layer: part block -> norms` over the scales."""
    seed = seed_of(config, unit)
    ids, _ = addition(config.sequences, seed, config.device)
    net = network(config.width, seed, config.device)
    generator = torch.Generator().manual_seed(seed)
    norms: dict[str, list[float]] = {}
    for kind in NETWORKS:
        for depth in config.depths:
            model = stacked(config, seed, depth, kind)
            names = [f"layer.{i + 1}.{block}" for i in range(depth) for block in ("value", "query")]
            shape = (*ids.shape, config.width)
            fixed = torch.randn(shape, generator=generator, dtype=torch.float64).to(config.device)
            for sigma in config.scales:
                embed(net, sigma, seed)
                position = net.position.weight[: ids.shape[1]]
                x = (net.token(ids) + position).detach()
                Y = fixed if kind == "chain" else position.detach().expand_as(x)
                for name, values in diagonal_norms(model, x, Y, names, "mse", seed=seed).items():
                    _, layer, block = name.split(".")
                    for part, value in zip(("outer", "functional", "total"), values, strict=True):
                        norms.setdefault(f"{kind}: {depth}: {layer}: {part} {block}", []).append(value)
    return norms


def numbers(config: Depths, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means of repeats, slopes between scales, and how many norms float32 could not hold."""
    made: dict[str, Any] = {}
    beyond: dict[int, int] = dict.fromkeys(config.depths, 0)
    for name in next(iter(measured.values())):
        runs = [norms[name] for norms in measured.values()]
        if not all(map(all, runs)):
            made[name] = None if not any(map(any, runs)) else {"runs": runs, "slopes": [math.nan]}
            continue
        means = [math.exp(math.fsum(map(math.log, v)) / len(v)) for v in zip(*runs, strict=True)]
        made[name] = {"runs": runs, "mean": means, "slopes": local_slopes(config.scales, means)}
        beyond[int(name.split(": ")[1])] += sum(math.log10(v) > FLOAT32 for run in runs for v in run)
    made["beyond float32"] = {str(depth): count for depth, count in beyond.items()}
    return made


def judge(config: Depths, made: dict[str, Any]) -> list[Finding]:
    found = []
    for depth in config.depths:
        law = 2 * 3**depth
        for kind in NETWORKS:
            slopes = [
                slope
                for layer in range(1, depth + 1)
                for block in ("value", "query")
                for slope in made[f"{kind}: {depth}: {layer}: outer {block}"]["slopes"]
            ]
            exact = "the output is homogeneous of degree 3^D in the tokens: rounding alone is left"
            for end, slope in (("smallest", min(slopes)), ("largest", max(slopes))):
                what = f"{end} slope of H_o, any layer and σ, depth {depth}, {kind}"
                found.append(near(what, law, slope, 1e-6 * law, exact))
            top = [made[f"{kind}: {depth}: {depth}: functional {block}"] for block in ("value", "query")]
            largest = max(0.0 if curve is None else max(map(max, curve["runs"])) for curve in top)
            scale = max(map(max, made[f"{kind}: {depth}: {depth}: outer query"]["runs"]))
            what = f"largest functional block of the top layer over H_o, depth {depth}, {kind}"
            found.append(
                between(what, "0", largest / scale, 0, 1e-12, "zero in theory (Remark 4.1), up to rounding")
            )
        if depth > 1:
            ends = [
                made[f"chain: {depth}: 1: functional {block}"]["slopes"][0] for block in ("value", "query")
            ]
            why = "with fixed targets H_f of lower layers goes as the second derivative, σ^(3^D), while they rule: 5 %"
            for block, slope in zip(("value", "query"), ends, strict=True):
                what = f"slope of functional {block}, layer 1 of {depth}, smallest σ, chain"
                found.append(near(what, 3**depth, slope, 0.05 * 3**depth, why))
            why = "'the remaining layers follow for bigger σ': at the largest σ within 5 %"
            slope = made[f"chain: {depth}: 1: total query"]["slopes"][-1]
            found.append(
                near(f"slope of H, query, layer 1 of {depth}, largest σ, chain", law, slope, 0.05 * law, why)
            )
    return found


def figure(config: Depths, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(len(config.depths), 2)
    for row, kind in zip(axes, NETWORKS, strict=True):
        for axis, depth in zip(row, config.depths, strict=True):
            for layer in range(1, depth + 1):
                for part in PARTS[::2]:
                    curve = made[f"{kind}: {depth}: {layer}: {part} query"]
                    if curve is None or "mean" not in curve:
                        continue
                    style = ("-", "--", ":")[(depth - layer) % 3]
                    label = f"{draw.LABELS[part]}, layer {layer}"
                    axis.plot(
                        config.scales, curve["mean"], style, color=draw.COLOURS[part], lw=1.2, label=label
                    )
            level = made[f"{kind}: {depth}: {depth}: outer query"]["mean"]
            power = 2 * 3**depth
            draw.trend(
                axis, config.scales, (config.scales[0], level[0] * 0.1), power, f"$\\sigma^{{{power}}}$"
            )
            axis.set_xscale("log")
            axis.set_yscale("log")
            title = f"depth {depth}, {kind}" + (", query block" if depth == config.depths[0] else "")
            draw.titled(axis, title, "σ", "")
            draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-7",
    title="Linear attention by depth",
    source="Paper A, Figure 7 and §4.1",
    claim="The outer-product blocks of a linear attention network of depth D grow as σ^(2·3^D) in every layer; H does "
    "so too, in the top layer at every σ and in the others at large σ.",
    presets={
        "smoke": Depths(width=4, sequences=2, repeats=2, depths=(1, 2), scales=(0.1, 0.2, 10.0, 20.0)),
        "cpu": Depths(width=16, sequences=8, repeats=3, scales=logarithmic(-1, 1, 9)),
        "paper": Depths(),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Float64: at depth 3 the norms leave float32 over a wider range of σ, which ended the paper's figure. Two "
    "networks: the text's chain of attentions, with targets that do not depend on σ; and that of the authors' "
    "code, with a ReLU MLP and its skip after each attention, and the inputs' own positions as targets. Mean squared "
    "error; the code sums, which changes a factor and no exponent.",
)
