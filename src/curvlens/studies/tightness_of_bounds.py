"""B-bounds: how tight upper bounds of the spectral norm are, from norms alone and from Kronecker factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.block import TransformerBlock
from curvlens.exact.block_bounds import block_bounds
from curvlens.exact.bounds import bounds, unit_attention_bound
from curvlens.exact.ffn import FeedForward
from curvlens.exact.norm import LayerNorm
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import exponent, logarithmic
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near

PAIRS = ("query, query", "query, key", "query, value", "key, key", "key, value", "value, value")
KINDS = ("norms", "kronecker")
SMALL = 0.2  # up to this σ attention is nearly uniform


@dataclass(frozen=True, kw_only=True)
class Bounds(Config):
    width: int = 8
    length: int = 12
    lengths: tuple[int, ...] = (4, 8, 16, 32)
    scales: tuple[float, ...] = logarithmic(-2, 1, 10)
    repeats: int = 20


def drawn(generator: torch.Generator, rows: int, columns: int, size: float | None = None) -> Tensor:
    made = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return made * (rows**-0.5 if size is None else size)


def measure(config: Bounds, unit: str) -> dict[str, Any]:
    """Bound over true norm of every block, over the scale of the tokens and over the length; of whole blocks, too."""
    generator = torch.Generator().manual_seed(seed_of(config, unit))
    d = config.width
    W = [drawn(generator, d, d) for _ in range(3)]
    layer = SelfAttention(*W)
    X, Y = drawn(generator, config.length, d, 1.0), drawn(generator, config.length, d, 1.0)
    made: dict[str, Any] = {
        f"{kind}: {pair}": [] for kind in (*KINDS, "true") for pair in (*PAIRS, "all, all")
    }
    for scale in config.scales:
        for bound in bounds(layer, scale * X, Y):
            if bound.part == "total":
                pair = f"{bound.row}, {bound.column}"
                made[f"norms: {pair}"].append(bound.norms)
                made[f"kronecker: {pair}"].append(bound.kronecker)
                made[f"true: {pair}"].append(bound.true)
    made["value, outer"] = value_block(layer, X, Y, config.scales)
    made["one token"] = all_to_one(d, config.length, generator)
    for norm in ("post", "pre"):
        made[f"block, {norm}"] = []
        weights = {key: drawn(generator, rows, columns) for key, rows, columns in
                   (("up", d, 2 * d), ("down", 2 * d, d))}  # fmt: skip
        for length in config.lengths:
            x, y = drawn(generator, length, d, 1.0), drawn(generator, length, d, 1.0)
            feed = FeedForward(weights["up"], weights["down"], activation="relu")
            ones = torch.ones(d, dtype=torch.float64)
            block = TransformerBlock(layer, feed, LayerNorm(ones), LayerNorm(ones), norm=norm)
            found = block_bounds(block, x, y)
            H = hessian(block, x, y).total.dense()
            whole = torch.linalg.matrix_norm(H, ord=2)
            made[f"block, {norm}"].append((found.whole / whole).item())
    return made


def value_block(layer: SelfAttention, X: Tensor, Y: Tensor, scales: tuple[float, ...]) -> list[float]:
    """The true spectral norm of the value block over the scale of the tokens."""
    return [
        torch.linalg.matrix_norm(hessian(layer, s * X, Y).total.block("value", "value").dense(), ord=2).item()
        for s in scales
    ]


def all_to_one(d: int, length: int, generator: torch.Generator) -> float:
    """The value block over the bound that takes `‖A‖₂ ≤ 1`, where all tokens attend to one of them."""
    X = 0.1 * drawn(generator, length, d, 1.0)
    X[:, 0], X[0, 0] = 1.0, 20.0
    W_Q, W_K = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    W_Q[0, 0] = W_K[0, 0] = 5.0
    R: Any = hessian(SelfAttention(W_Q, W_K, torch.eye(d, dtype=torch.float64)), X, torch.zeros_like(X))
    true = torch.linalg.matrix_norm(R.total.block("value", "value").dense(), ord=2).item()
    return true / unit_attention_bound(R)


def numbers(config: Bounds, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"lowest": math.inf}
    for kind in KINDS:
        for pair in (*PAIRS, "all, all"):
            ratios = [
                [b / t for b, t in zip(run[f"{kind}: {pair}"], run[f"true: {pair}"], strict=True)]
                for run in runs
            ]
            made["lowest"] = min(made["lowest"], *map(min, ratios))
            made[f"{kind}: {pair}"] = ratios
            made[f"{kind}: {pair}, mean"] = mean95([sum(map(math.log10, r)) / len(r) for r in ratios])
    for norm in ("post", "pre"):
        ratios = [run[f"block, {norm}"] for run in runs]
        made["lowest"] = min(made["lowest"], *map(min, ratios))
        made[f"block, {norm}"] = ratios
        made[f"block, {norm}, mean"] = mean95([sum(map(math.log10, r)) / len(r) for r in ratios])
    made["one token"] = mean95([run["one token"] for run in runs])
    made["value exponent"] = mean95([exponent(config.scales, run["value, outer"], 0, SMALL) for run in runs])
    return made


def judge(config: Bounds, made: dict[str, Any]) -> list[Finding]:
    theorem = "upper bounds: none is ever below the norm, up to rounding"
    found = [between("smallest bound over norm, of all", "≥ 1", made["lowest"], 1 - 1e-9, math.inf, theorem)]
    useful = "a bound that tells the order of magnitude: within a factor of ten"
    for kind, name in (("norms", "from norms (Theorem 1)"), ("kronecker", "from Kronecker factors")):
        ours = made[f"{kind}: all, all, mean"]
        what = f"log10 of bound over norm, attention, {name}"
        found.append(between(what, "–", ours, 0, 1, useful, main=kind == "kronecker", said=LOOSE))
    for norm in ("post", "pre"):
        what = f"log10 of bound over norm, block, {norm}-norm (Theorem 6)"
        found.append(between(what, "–", made[f"block, {norm}, mean"], 0, 1, useful, main=False, said=LOOSE))
    one = "‖A‖₂ ≤ 1, as in the proof, holds if the value block stays below the bound that follows"
    what, said = (
        "norm over the bound with ‖A‖₂ ≤ 1, all tokens to one",
        "a row-stochastic matrix has a spectral norm of up to √L, not 1: the constant of Theorem 1 errs",
    )
    found.append(between(what, "≤ 1", made["one token"], 0, 1, one, main=False, said=said))
    power = "the exact value block is β ‖M₁‖², quadratic in the tokens while attention does not change: 0.3"
    what, said = (
        f"exponent of the value block in the tokens, σ ≤ {SMALL}",
        "O(‖X‖⁴) is an upper bound that cannot be tight: the block goes as ‖X‖²",
    )
    found.append(near(what, 4, made["value exponent"], 0.3, power, main=False, said=said))
    return found


LOOSE = "each factor is bounded by itself, and their worst cases do not come together"


def figure(config: Bounds, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(3, width=3.0)
    for axis, kind, title in zip(axes.flat, KINDS, ("from norms", "from Kronecker factors"), strict=False):
        for i, pair in enumerate((*PAIRS, "all, all")):
            colour = "#222222" if pair.startswith("all") else f"C{i}"
            label = "all" if pair.startswith("all") else pair
            draw.curve(axis, config.scales, made[f"{kind}: {pair}"], label, colour)
        axis.set_ylim(0.7, max(3.0, 2 * max(map(max, made["norms: query, key"]))))
        draw.titled(axis, f"attention: {title}", "σ", "bound over norm")
    last = axes.flat[2]
    for norm, colour in (("post", "#c0392b"), ("pre", "#2471a3")):
        draw.curve(last, config.lengths, made[f"block, {norm}"], f"{norm}-norm", colour)
    draw.titled(last, "whole block", "tokens L", "bound over norm")
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axhline(1, color="0.6", lw=0.8)
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="B-bounds",
    title="Upper bounds of the spectral norm, and how tight they are",
    source="Paper B, Theorems 1 and 6",
    claim="The spectral norm of the Hessian of self-attention and of the block is bounded by products of norms.",
    presets={
        "smoke": Bounds(width=3, length=5, lengths=(3, 6), scales=(0.01, 0.1, 1.0, 10.0), repeats=2),
        "cpu": Bounds(repeats=10),
        "paper": Bounds(width=16, length=32, lengths=(8, 16, 32, 64)),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Bounds derived afresh, since the paper's proof takes ‖A‖₂ ≤ 1 for a row-stochastic matrix; each beside "
    "the true norm. Mean over σ (attention) and over lengths (block) of log10.",
)
