"""A-eq5: equation 5 for all six pairs of blocks, at another temperature and with one query-key matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from typing import Any

from curvlens.exact.attention import SelfAttention
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, embed, exponent, local_slopes, logarithmic, network
from curvlens.studies.growth_without_norm import PARTS, seed_of, units
from curvlens.studies.study import Config, Finding, Study, mean95, near
from curvlens.studies.top_layer import of_network

PAIRS = tuple(combinations_with_replacement(("query", "key", "value"), 2))
SINGLE = (("query_key", "query_key"), ("query_key", "value"), ("value", "value"))
LAWS: dict[str, dict[tuple[str, str], int]] = {  # the term that rules at small σ
    "outer": {("query", "query"): 6, ("query", "key"): 6, ("key", "key"): 6, ("query", "value"): 4,
              ("key", "value"): 4, ("value", "value"): 2, ("query_key", "query_key"): 6, ("query_key", "value"): 4},
    "functional": {("query", "query"): 5, ("query", "key"): 3, ("key", "key"): 5, ("query", "value"): 3,
                   ("key", "value"): 3, ("query_key", "query_key"): 5, ("query_key", "value"): 3},
}  # fmt: skip
VARIANTS = ("softmax", "temperature", "one matrix")


@dataclass(frozen=True, kw_only=True)
class AllBlocks(Config):
    width: int = 32
    sequences: int = 16
    repeats: int = 20
    scales: tuple[float, ...] = logarithmic(-3, 1, 17)
    temperature: float = 4.0
    small: float = 0.05  # the laws are fitted up to this σ


def pairs_of(variant: str) -> tuple[tuple[str, str], ...]:
    return SINGLE if variant == "one matrix" else PAIRS


def measure(config: AllBlocks, unit: str) -> dict[str, Any]:
    """The exact norms of all blocks at every scale, in the three variants of one network."""
    seed = seed_of(config, unit)
    ids, labels = addition(config.sequences, seed, config.device)
    scale = config.width**-0.5
    usual = network(config.width, seed, config.device)
    warm = network(config.width, seed, config.device, scale=scale / config.temperature)
    attn: Any = usual.blocks[0].attn
    W_Q, W_K, W_V, W_O = (W.detach() for W in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
    single = SelfAttention(W_QK=W_Q @ W_K.T, W_V=W_V, W_O=W_O, scale=scale, causal=True)
    norms: dict[str, list[float]] = {}
    for sigma in config.scales:
        for variant in VARIANTS:
            net = warm if variant == "temperature" else usual
            embed(net, sigma, seed)
            layer = of_network(net, ids, labels, single if variant == "one matrix" else None)
            for part in PARTS:
                for pair in pairs_of(variant):
                    norms.setdefault(f"{variant}: {part} {','.join(pair)}", []).append(
                        layer.norm(part, *pair)
                    )
    return norms


def numbers(config: AllBlocks, measured: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in next(iter(measured.values())):
        runs = [norms[name] for norms in measured.values()]
        if not any(any(run) for run in runs):
            made[name] = None
            continue
        mean = [sum(values) / len(runs) for values in zip(*runs, strict=True)]
        made[name] = {
            "runs": runs,
            "slopes": local_slopes(config.scales, mean),
            "small": mean95([exponent(config.scales, run, 0, config.small) for run in runs]),
        }
    for block in ("functional query,key", "functional query,query", "outer query,query"):
        usual, warm = (made[f"{variant}: {block}"]["runs"] for variant in VARIANTS[:2])
        made[f"ratio {block}"] = mean95([a[0] / b[0] for a, b in zip(usual, warm, strict=True)])
    return made


def judge(config: AllBlocks, made: dict[str, Any]) -> list[Finding]:
    why = "the next term is smaller by a factor of about σ, so that an exponent over σ ≤ 0.05 is off by less than 0.05"
    found = []
    for variant in VARIANTS:
        for part, laws in LAWS.items():
            for pair in pairs_of(variant):
                name = f"{variant}: {part} {','.join(pair)}"
                if pair in laws:
                    found.append(near(f"exponent, {name}", laws[pair], made[name]["small"], 0.05, why))
                else:
                    value = 0.0 if made[name] is None else max(map(max, made[name]["runs"]))
                    found.append(near(f"largest norm, {name}", 0, value, 0, "zero in closed form"))
    t = config.temperature
    for block, power in (
        ("outer query,query", 2),
        ("functional query,query", 2),
        ("functional query,key", 1),
    ):
        why = "at the smallest σ attention is uniform at any temperature, up to corrections of order σ² = 1e-6; 1 %"
        ratio = made[f"ratio {block}"]
        found.append(near(f"{block} at t = 1 over t = {t:g}", t**power, ratio, 0.01 * t**power, why))
    return found


def figure(config: AllBlocks, made: dict[str, Any]) -> Any:
    """Norms of the six pairs, the local slopes below each; the law's powers dashed."""
    drawing, axes = draw.panels(3, 4, height=2.1)
    middles = [(a * b) ** 0.5 for a, b in pairwise(config.scales)]
    for i, pair in enumerate(PAIRS):
        axis, below = axes[2 * (i // 3), i % 3], axes[2 * (i // 3) + 1, i % 3]
        for part in ("total", "outer", "functional"):  # H lies on the larger of the two: wide, and below them
            look: Any = {"lw": 3.0, "alpha": 0.3} if part == "total" else {"lw": 1.1}
            for variant, style in (("softmax", "-"), ("temperature", ":")):
                curve = made[f"{variant}: {part} {','.join(pair)}"]
                if curve is None:
                    continue
                means = [sum(v) / len(v) for v in zip(*curve["runs"], strict=True)]
                look |= {"linestyle": style, "color": draw.COLOURS[part]}
                axis.plot(config.scales, means, label=draw.LABELS[part] if style == "-" else None, **look)
                if style == "-":
                    below.plot(middles, curve["slopes"], **look)
            law = LAWS.get(part, {}).get(pair)
            if law is not None:
                below.axhline(law, color="0.6", ls="--", lw=0.8)
        for each in (axis, below):
            each.set_xscale("log")
        axis.set_yscale("log")
        below.set_ylim(0, 7)
        draw.titled(axis, ", ".join(pair), "", r"$\Vert\cdot\Vert_F$" if i % 3 == 0 else "")
        draw.titled(below, "", "σ", "local slope" if i % 3 == 0 else "")
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-eq5",
    title="All six blocks, temperature, one query-key matrix",
    source="Paper A, equation 5, Lemma 4.1, Remark D.1 and §4.3",
    claim="H_o grows as σ⁶ in the query and key blocks, σ⁴ between them and value, σ² in value; H_f as σ⁵, σ³ between "
    "query and key and with value, and is zero in value. A temperature t divides H_f between query and key by t, the "
    "other query-key blocks by t²; one matrix W_QK keeps the laws and loses the σ³ term between query and key.",
    presets={
        "smoke": AllBlocks(width=4, sequences=3, repeats=4, scales=(1e-3, 1e-2, 1.0)),
        "cpu": AllBlocks(repeats=5),
        "paper": AllBlocks(width=128, sequences=64),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact norms inside the network with cross-entropy, whose gradient at small σ is the same at all σ; the "
    "residual adds no growth there. Dotted: temperature 4.",
)
