"""A-T: what the product of a query and a key matrix adds to the Hessian: paired spectrum, rank, temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.bounds import t_rank_bound
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, exponent, logarithmic, network
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near
from curvlens.studies.top_layer import of_network

LARGE = 10.0  # temperatures beyond it make attention uniform


@dataclass(frozen=True, kw_only=True)
class Scores(Config):
    width: int = 16
    key_widths: tuple[int, ...] = (4, 8, 16)
    sequences: int = 64
    repeats: int = 20
    temperatures: tuple[float, ...] = logarithmic(-3, 3, 19)


def measure(config: Scores, unit: str) -> dict[str, Any]:
    """Spectrum of the T-functional part and rank of the T-outer part by key width; both norms by temperature."""
    seed = seed_of(config, unit)
    ids, labels = addition(config.sequences, seed, config.device)
    made: dict[str, Any] = {"outer": [], "functional": [], "outer held": [], "functional held": []}
    for key_width in config.key_widths:
        net = network(config.width, seed, config.device, key_width=key_width)
        top = of_network(net, ids, labels)
        curved: Any = top.passed
        values = torch.linalg.eigvalsh(curved.t_functional.dense())
        outer = curved.t_outer.dense()
        made[f"bound {key_width}"] = t_rank_bound(top.attention)
        made[f"rank {key_width}"] = int(torch.linalg.matrix_rank(outer, hermitian=True))
        made[f"pairing {key_width}"], made[f"multiplicity {key_width}"] = paired(values, key_width)
        made[f"spectrum {key_width}"] = values.tolist()
    last = config.key_widths[-1]
    for t in config.temperatures:
        net = network(config.width, seed, config.device, key_width=last, scale=last**-0.5 / t)
        attn: Any = net.blocks[0].attn
        W_Q, W_K, W_V, W_O = (W.detach() for W in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
        # with queries t times as large the scores stay, and with them the map and its moments
        held = SelfAttention(t * W_Q, W_K, W_V, W_O=W_O, scale=attn.scale, causal=True)
        usual = network(config.width, seed, config.device, key_width=last)
        for layer, ending in (
            (of_network(net, ids, labels), ""),
            (of_network(usual, ids, labels, held), " held"),
        ):
            result: Any = layer.passed
            made["functional" + ending].append(float(result.t_functional.frobenius()))
            block = result.t_outer.block("query") if ending else result.t_outer
            made["outer" + ending].append(float(block.frobenius()))
    return made


def paired(values: Tensor, multiplicity: int) -> tuple[float, float]:
    """How far eigenvalues are from `±` pairs, and from groups of this many, over the largest."""
    largest = values.abs().max()
    pairs = (values + values.flip(0)).abs().max() / largest
    groups = values.sort().values.view(-1, multiplicity)
    return float(pairs), float((groups[:, -1] - groups[:, 0]).max() / largest)


def numbers(config: Scores, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {}
    for key_width in config.key_widths:
        for key in ("rank", "bound", "pairing", "multiplicity"):
            made[f"{key} {key_width}"] = max(run[f"{key} {key_width}"] for run in runs)
        made[f"spectrum {key_width}"] = runs[0][f"spectrum {key_width}"]
    for name in ("outer", "functional", "outer held", "functional held"):
        curves = [run[name] for run in runs]
        low = 0.0 if "held" in name else LARGE
        made[name] = curves
        made[f"exponent {name}"] = mean95(
            [exponent(config.temperatures, curve, low, math.inf) for curve in curves]
        )
    ratios = [[f / o for f, o in zip(run["functional"], run["outer"], strict=True)] for run in runs]
    made["ratios"] = ratios
    made["ratio, hot"] = mean95([math.log10(ratio[-1]) for ratio in ratios])
    made["ratio, cold"] = mean95([math.log10(ratio[0]) for ratio in ratios])
    return made


def judge(config: Scores, made: dict[str, Any]) -> list[Finding]:
    found = []
    for key_width in config.key_widths:
        rounding = "exact in theory: rounding of the eigenvalues in float64"
        what = f"distance of eigenvalues from ± pairs, d_K = {key_width}"
        found.append(between(what, "0", made[f"pairing {key_width}"], 0, 1e-10, rounding))
        what = f"distance from groups of d_K equal ones, d_K = {key_width}"
        found.append(between(what, "0", made[f"multiplicity {key_width}"], 0, 1e-10, rounding))
        rank, bound = made[f"rank {key_width}"], made[f"bound {key_width}"]
        found.append(
            between(f"rank of the T-outer part, d_K = {key_width}", f"≤ {bound}", rank, 1, bound, "a theorem")
        )
        share = "the bound is met where there are tokens enough"
        found.append(
            between(f"rank over bound, d_K = {key_width}", "1", rank / bound, 0.95, 1, share, main=False)
        )
    exact = "with the scores held, each is an exact power of t"
    found.append(
        near("exponent of t, T-outer query block, map held", -2, made["exponent outer held"], 1e-9, exact)
    )
    found.append(
        near("exponent of t, T-functional, map held", -1, made["exponent functional held"], 1e-9, exact)
    )
    limit = "attention is uniform for t > 10, up to corrections of the order of the scores over t"
    found.append(near("exponent of t, T-outer, t > 10", -2, made["exponent outer"], 0.05, limit))
    found.append(near("exponent of t, T-functional, t > 10", -1, made["exponent functional"], 0.05, limit))
    hot, cold = made["ratio, hot"], made["ratio, cold"]
    rules = "one of the two is larger: the sign of the logarithm of their ratio"
    found.append(between("log10 T-functional over T-outer, hottest", "> 0", hot, 0, math.inf, rules))
    said = (
        "the powers of t hold for a map that is held; as t falls the map itself sharpens, and the moments vanish with "
        "it in both parts"
    )
    found.append(
        between(
            "log10 T-functional over T-outer, coldest",
            "< 0",
            cold,
            -math.inf,
            0,
            rules,
            main=False,
            said=said,
        )
    )
    return found


def figure(config: Scores, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.6)
    spectra, heat = axes.flat
    for i, key_width in enumerate(config.key_widths):
        values = made[f"spectrum {key_width}"]
        places = [(j + 0.5) / len(values) for j in range(len(values))]
        spectra.plot(places, values, ".", ms=2.5, color=f"C{i}", label=f"$d_K={key_width}$")
    draw.titled(spectra, "spectrum of the T-functional part", "index over size", "eigenvalue")
    draw.legend(spectra)
    for name in ("outer", "functional"):
        draw.curve(heat, config.temperatures, made[name], f"T-{name}", draw.COLOURS[name])
    for name, power in (("outer", -2), ("functional", -1)):
        level = sum(run[-1] for run in made[name]) / len(made[name])
        x = [t for t in config.temperatures if t >= 1]
        draw.trend(heat, x, (x[-1], level), power, f"$t^{{{power}}}$")
    heat.set_xscale("log")
    heat.set_yscale("log")
    draw.titled(heat, "temperature", "t", r"$\Vert\cdot\Vert_F$")
    draw.legend(heat)
    return drawing


STUDY = Study(
    name="A-T",
    title="What two matrices for one add: paired spectrum, rank, temperature",
    source="Paper A, Remark D.1, Lemma D.2 and §4.3",
    claim="The T-functional part has eigenvalues in ± pairs, each d_K times; the T-outer part has a rank of at most "
    "2 d_K d_V − d_K²; they scale as 1/t and 1/t² with the temperature, so that the T-functional part rules as t grows "
    "and the T-outer part as t falls.",
    presets={
        "smoke": Scores(
            width=6, key_widths=(2, 6), sequences=12, repeats=3, temperatures=(0.01, 1.0, 100.0, 1000.0)
        ),
        "cpu": Scores(repeats=5),
        "paper": Scores(width=32, key_widths=(8, 16, 32)),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact. The paper prints Remark D.1 without the loss's factor and with V in the order (K, Q); here it "
    "is (Q, K) throughout. The powers of t are those of the map held; both are shown.",
)
