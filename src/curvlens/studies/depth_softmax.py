"""A-6: growth of the blocks of every layer of a multi-layer softmax Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curvlens.exact.of_net import embedded, of_net
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, exponent, logarithmic, network
from curvlens.studies.every_layer import diagonal_norms
from curvlens.studies.growth_without_norm import LAWS, PARTS, seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near
from curvlens.studies.top_layer import next_tokens, of_network

SMALL = 0.3  # the practical range that the paper fits


@dataclass(frozen=True, kw_only=True)
class Layers(Config):
    width: int = 128
    sequences: int = 64
    repeats: int = 20
    depths: tuple[int, ...] = (2, 3)
    scales: tuple[float, ...] = logarithmic(-2, 1, 20)


def measure(config: Layers, unit: str) -> dict[str, Any]:
    """`depth: layer: part block -> norms` over the scales; the top layer by its closed form, others by products."""
    seed = seed_of(config, unit)
    ids, labels = addition(config.sequences, seed, config.device)
    norms: dict[str, list[float]] = {}

    def note(depth: int, layer: int, block: str, values: list[float]) -> None:
        for part, value in zip(("outer", "functional", "total"), values, strict=True):
            norms.setdefault(f"{depth}: {layer + 1}: {part} {block}", []).append(value)

    for depth in config.depths:
        net = network(config.width, seed, config.device, depth=depth)
        for sigma in config.scales:
            embed(net, sigma, seed)
            lower = [f"layer.{i}.attn.{block}" for i in range(depth - 1) for block in ("value", "query")]
            found = diagonal_norms(of_net(net), embedded(net, ids), next_tokens(labels), lower, seed=seed)
            for name, values in found.items():
                _, layer, _, block = name.split(".")
                note(depth, int(layer), block, values)
            top = of_network(net, ids, labels)
            for block in ("value", "query"):
                note(depth, depth - 1, block, [top.norm(part, block) for part in PARTS])
    return norms


def numbers(config: Layers, measured: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in next(iter(measured.values())):
        runs = [norms[name] for norms in measured.values()]
        if not any(map(any, runs)):
            made[name] = None
            continue
        made[name] = {
            "runs": runs,
            "small": mean95([exponent(config.scales, run, 0, SMALL) for run in runs]),
            "large": mean95([exponent(config.scales, run, 1, 1e9) for run in runs]),
        }
    for depth in config.depths:
        for block in ("value", "query"):
            first, top = (made[f"{depth}: {layer}: total {block}"]["runs"] for layer in (1, depth))
            made[f"{depth}: first over top {block}"] = mean95(
                [a[0] / b[0] for a, b in zip(first, top, strict=True)]
            )
    return made


def judge(config: Layers, made: dict[str, Any]) -> list[Finding]:
    fit = "the laws hold up to terms of order σ, seen from 0.01 to 0.3; the paper's slopes are those of one layer: 0.2"
    found = []
    for depth in config.depths:
        for layer in range(1, depth + 1):
            for name, law in LAWS.items():
                ours = made[f"{depth}: {layer}: {name}"]["small"]
                found.append(
                    near(f"exponent of {name}, layer {layer} of {depth}, σ < 0.3", law, ours, 0.2, fit)
                )
        top = made[f"{depth}: {depth}: functional value"]
        largest = 0.0 if top is None else max(map(max, top["runs"]))
        found.append(near(f"largest functional value block, top of {depth}", 0, largest, 0, "exactly zero"))
        below = min(map(min, made[f"{depth}: 1: functional value"]["runs"]))
        why = "no longer zero below the top"
        found.append(
            between(f"smallest functional value block, layer 1 of {depth}", "not 0", below, 1e-300, 1, why)
        )
        for block in ("value", "query"):
            why = "'lines of earlier layers are lower for σ < 1': the ratio at the smallest σ"
            ours = made[f"{depth}: first over top {block}"]
            what = f"{block}, layer 1 over layer {depth}, σ = {config.scales[0]:g}"
            found.append(between(what, "below 1", ours, 0, 1, why, main=False))
        why = "'higher-order dependencies for σ > 1 and deeper layers': more than the exponent of one layer"
        ours = made[f"{depth}: 1: outer value"]["large"]
        found.append(
            between(
                f"exponent of outer value, layer 1 of {depth}, σ > 1", "> 2", ours, 2.2, 100, why, main=False
            )
        )
    return found


def figure(config: Layers, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, len(config.depths))
    for row, depth in zip(axes, config.depths, strict=True):
        for axis, block in zip(row, ("value", "query"), strict=True):
            for layer in range(1, depth + 1):
                for part in ("outer", "functional"):
                    curve = made[f"{depth}: {layer}: {part} {block}"]
                    if curve is None:
                        continue
                    means = [sum(v) / len(v) for v in zip(*curve["runs"], strict=True)]
                    style = ("-", "--", ":", "-.")[(depth - layer) % 4]
                    label = f"{draw.LABELS[part]}, layer {layer}"
                    axis.plot(config.scales, means, style, color=draw.COLOURS[part], lw=1.2, label=label)
                    law = LAWS.get(f"{part} {block}")
                    if law is not None and layer == depth:
                        draw.trend(axis, config.scales, (config.scales[0], means[0]), law, f"$\\sigma^{law}$")
            axis.axvline(1, color="0.8", lw=0.8)
            axis.set_xscale("log")
            axis.set_yscale("log")
            draw.titled(axis, f"{block} block, depth {depth}", "σ", r"$\Vert\cdot\Vert_F$")
            draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-6",
    title="Growth by layer in deeper softmax Transformers",
    source="Paper A, Figure 6 and Appendix G",
    claim="In the practical range of σ the blocks of every layer grow as those of one layer: value H_o as σ², query "
    "H_o as σ⁶ and H_f as σ⁵; the functional value block is zero in the top layer only.",
    presets={
        "smoke": Layers(width=4, sequences=2, repeats=2, depths=(2,), scales=(0.01, 0.1, 1.0, 10.0)),
        "cpu": Layers(width=16, sequences=16, repeats=3, scales=logarithmic(-2, 1, 10)),
        "paper": Layers(),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="The top layer by its closed form, lower ones by exact products with every column (`cpu`, d = 16); in "
    "`paper`, d = 128, norms of lower layers are estimates from 20 products, as in the paper. Split at the logits.",
)
