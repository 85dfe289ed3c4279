"""A-heads: more heads make the functional Hessian sparse; the low-rank value of each head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvlens.exact.attention import SelfAttention
from curvlens.exact.result import hessian
from curvlens.operator import Operator
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, exponent, network
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near
from curvlens.studies.top_layer import of_network

KINDS = ("query", "key", "value", "out")
WITHIN = (
    14 / 16
)  # of the pairs of a head's four weights all but (value, value) and (out, out) have a functional part


@dataclass(frozen=True, kw_only=True)
class Heads(Config):
    width: int = 32
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    sequences: int = 16
    repeats: int = 20
    sigmas: tuple[float, ...] = (0.1, 1.0)
    scales: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)


def measure(config: Heads, unit: str) -> dict[str, Any]:
    """Share of entries with a functional part, and squared norms of both parts, for each number of heads."""
    seed = seed_of(config, unit)
    ids, labels = addition(config.sequences, seed, config.device)
    made: dict[str, Any] = {"filled": []}
    for sigma in config.sigmas:
        made[f"share {sigma:g}"] = []
    for count in config.counts:
        net = network(config.width, seed, config.device, heads=count)
        for sigma in config.sigmas:
            embed(net, sigma, seed)
            layer = of_network(net, ids, labels)
            outer, functional = (squared(layer.operator(part)) for part in ("outer", "functional"))
            made[f"share {sigma:g}"].append(outer / (outer + functional))
        made["filled"].append(filled(layer.operator("functional")))
    return made | low_rank(config, seed)


def squared(H: Operator) -> float:
    return float(H.frobenius()) ** 2


def filled(H: Any) -> float:
    """The share of entries in cells, pairs of heads, that are not zero."""
    entries = sum(cell.shape[0] * cell.shape[1] for _, _, cell in H.cells() if float(cell.frobenius()) > 0)
    return entries / (H.shape[0] * H.shape[1])


def low_rank(config: Heads, seed: int) -> dict[str, Any]:
    """One head with `W_V = W_O W_U`, mean squared error: norms of its value blocks while the first moment grows.

    The tokens are scaled and the scores divided by the square, so that the attention map stays and `M_1` alone grows;
    the targets are zero.
    """
    generator = torch.Generator().manual_seed(seed)
    d, rank = config.width, max(1, config.width // 4)

    def draw_matrix(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * rows**-0.5

    W_Q, W_K, W_U, W_O = (
        draw_matrix(d, rank),
        draw_matrix(d, rank),
        draw_matrix(d, rank),
        draw_matrix(rank, d),
    )
    X = draw_matrix(12, d) * 12**0.5
    made: dict[str, Any] = {
        f"low rank {part} {pair}": [] for part in ("outer", "functional") for pair in PAIRS
    }
    for scale in config.scales:
        layer = SelfAttention(W_Q, W_K, W_U, W_O=W_O, scale=rank**-0.5 / scale**2)
        R = hessian(layer, scale * X, 0 * X)
        for part in ("outer", "functional"):
            for pair in PAIRS:
                made[f"low rank {part} {pair}"].append(
                    float(getattr(R, part).block(*pair.split()).frobenius())
                )
    return made


PAIRS = ("value value", "out out", "value out")


def numbers(config: Heads, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"filled": runs[0]["filled"]}
    for sigma in config.sigmas:
        shares = [run[f"share {sigma:g}"] for run in runs]
        made[f"share {sigma:g}"] = shares
        made[f"gain {sigma:g}"] = mean95([share[-1] - share[0] for share in shares])
        made[f"last {sigma:g}"] = mean95([share[-1] for share in shares])
    for name in runs[0]:
        if name.startswith("low rank"):
            curves = [run[name] for run in runs]
            known = any(map(any, curves))
            made[name] = mean95([exponent(config.scales, c, 0, math.inf) for c in curves]) if known else None
    return made


def judge(config: Heads, made: dict[str, Any]) -> list[Finding]:
    found = []
    for count, share in zip(config.counts, made["filled"], strict=True):
        exact = (
            "H_f between heads is zero, within a head all blocks but (value, value) and (out, out) are filled"
        )
        found.append(
            near(
                f"share of entries with a functional part, {count} heads", WITHIN / count, share, 1e-12, exact
            )
        )
    for sigma in config.sigmas:
        grows = "the share ‖H_o‖² / (‖H_o‖² + ‖H_f‖²) grows with the number of heads: its gain is positive"
        gain, last = made[f"gain {sigma:g}"], made[f"last {sigma:g}"]
        what = f"gain of H_o's share from 1 to {config.counts[-1]} heads, σ = {sigma:g}"
        found.append(between(what, "> 0", gain, 0, math.inf, grows, main=False, said=SAID))
        what = f"H_o's share at {config.counts[-1]} heads, σ = {sigma:g}"
        found.append(
            between(what, "> 1/2", last, 0.5, 1, "'dominates': more than half", main=False, said=SAID)
        )
    for pair in ("value value", "out out"):
        why = "block-hollow, as of a two-layer linear MLP"
        hollow = made[f"low rank functional {pair}"]
        found.append(
            near(f"functional {pair} of a low-rank value", 0, 0.0 if hollow is None else 1.0, 0, why)
        )
    square = "quadratic in M_1 for targets of zero: rounding alone is left"
    for part in ("functional", "outer"):
        ours = made[f"low rank {part} value out"]
        found.append(near(f"exponent of M_1, {part} value and out", 2, ours, 1e-9, square))
    return found


SAID = (
    "the paper's argument counts entries, and those behave as it says; norms are another matter: what is left of H_f "
    "is not smaller for being in fewer entries"
)


def figure(config: Heads, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.4)
    left, right = axes.flat
    left.plot(config.counts, made["filled"], "o-", color=draw.COLOURS["functional"], ms=4, label="measured")
    left.plot(config.counts, [WITHIN / c for c in config.counts], "--", color="0.5", label="14/16 over heads")
    left.set_yscale("log", base=2)
    draw.titled(left, "entries with a functional part", "heads", "share")
    for i, sigma in enumerate(config.sigmas):
        draw.curve(right, config.counts, made[f"share {sigma:g}"], f"σ = {sigma:g}", f"C{i}")
    right.set_ylim(0, 1)
    draw.titled(right, r"$\Vert H_o\Vert^2\,/\,(\Vert H_o\Vert^2+\Vert H_f\Vert^2)$", "heads", "share")
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-heads",
    title="Heads: a sparse functional Hessian, a low-rank value",
    source="Paper A, Appendix E and E.1",
    claim="As heads grow in number the functional Hessian becomes sparse, since it is zero between heads, and most "
    "entries are fully defined by H_o, which comes to dominate; a low-rank value makes H_f block-hollow and quadratic "
    "in the first moment.",
    presets={
        "smoke": Heads(width=8, counts=(1, 2, 4), sequences=3, repeats=3),
        "cpu": Heads(repeats=10),
        "paper": Heads(width=64, counts=(1, 2, 4, 8, 16, 32, 64), sequences=64),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact. Heads of width d/H with a low-rank value (value and out), as models have them, inside the network "
    "of A-3a; query, key, value and out weights together.",
)
