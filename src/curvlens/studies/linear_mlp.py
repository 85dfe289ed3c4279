"""A-8: linear MLPs, whose diagonal blocks grow as σ² at every depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvlens.exact.mlp import LinearMLP
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, exponent, logarithmic, network
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near


@dataclass(frozen=True, kw_only=True)
class Depths(Config):
    width: int = 128
    sequences: int = 64
    repeats: int = 20
    depths: tuple[int, ...] = (1, 2, 3, 5)
    scales: tuple[float, ...] = logarithmic(-2, 1, 20)


def measure(config: Depths, unit: str) -> dict[str, Any]:
    """The exact norm of every layer's diagonal block of `H` and of `H_f`, at every scale and depth."""
    seed = seed_of(config, unit)
    generator = torch.Generator().manual_seed(seed)
    d = config.width
    draws = [torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(max(config.depths))]
    weights = [(0.8 * d**-0.5 * W).to(config.device) for W in draws]
    net = network(d, seed, config.device)
    ids, _ = addition(config.sequences, seed, config.device)
    norms: dict[str, list[list[float]]] = {}
    for depth in config.depths:
        layer = LinearMLP(weights[:depth])
        for sigma in config.scales:
            embed(net, sigma, seed)
            position = net.position.weight[: ids.shape[1]]
            x = (net.token(ids) + position).detach()
            R = hessian(layer, x, position.detach().expand_as(x))
            for part in ("total", "functional"):
                operator = getattr(R, part)
                values = [float(operator.block(name).frobenius()) for name in layer.weights]
                norms.setdefault(f"{part} {depth}", []).append(values)
    return norms


def numbers(config: Depths, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Per depth: curves `[repeat][layer][scale]`, exponents of all layers, their ratio, the functional part."""
    made: dict[str, Any] = {}
    for depth in config.depths:
        runs = [[list(layer) for layer in zip(*m[f"total {depth}"], strict=True)] for m in measured.values()]
        means = [
            [sum(v) / len(runs) for v in zip(*layers, strict=True)] for layers in zip(*runs, strict=True)
        ]
        made[str(depth)] = {
            "runs": runs,
            "exponent": mean95([exponent(config.scales, run, 0, 1e9) for layers in runs for run in layers]),
            "overlap": max(max(v) / min(v) for v in zip(*means, strict=True)),
            "functional": max(
                value for m in measured.values() for at in m[f"functional {depth}"] for value in at
            ),
        }
    return made


def judge(config: Depths, made: dict[str, Any]) -> list[Finding]:
    found = []
    for depth in config.depths:
        at = made[str(depth)]
        exact = "H_o is homogeneous of degree two in the tokens: rounding alone is left"
        found.append(near(f"exponent, depth {depth}", 2.0, at["exponent"], 1e-9, exact))
        found.append(
            near(f"largest functional block, depth {depth}", 0, at["functional"], 0, "zero in closed form")
        )
        if depth > 1:
            why = "on the paper's axes of six decades 'they perfectly overlap' hides a factor of 1.3"
            what = f"largest over smallest layer, depth {depth}"
            found.append(between(what, "overlap", at["overlap"], 1, 1.3, why, main=False, said=SPREAD))
    return found


SPREAD = (
    "the norms of layers agree in their law and in the order of their size; how far they lie apart is that of the "
    "factors on either side of a layer, and grows with depth over width"
)


def figure(config: Depths, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(len(config.depths), width=2.4)
    for axis, depth in zip(axes.flat, config.depths, strict=True):
        layers = list(zip(*made[str(depth)]["runs"], strict=True))
        for i, runs in enumerate(layers):
            draw.curve(axis, config.scales, runs, f"layer {i + 1}", f"C{i}")
        level = sum(run[0] for run in layers[0]) / len(layers[0])
        draw.trend(axis, config.scales, (config.scales[0], level), 2, "$\\sigma^2$")
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.titled(axis, f"depth {depth}", "σ", r"$\Vert H\Vert_F$" if depth == config.depths[0] else "")
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-8",
    title="Linear MLPs grow alike at every depth",
    source="Paper A, Figure 8 and §2",
    claim="The diagonal blocks of a linear MLP grow as σ² at every depth, layers overlap, and the functional diagonal "
    "blocks are zero.",
    presets={
        "smoke": Depths(width=6, sequences=3, repeats=2, scales=logarithmic(-2, 1, 4)),
        "cpu": Depths(repeats=10),
        "paper": Depths(),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact. Mean squared error, with the tokens' own positions as targets; weights drawn from N(0, 0.64/d).",
)
