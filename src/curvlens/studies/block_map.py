"""B-blocks: the absolute Hessian of a whole block, norms included, entry by entry, untrained and trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens import digits, nets
from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.heat_map import FLOOR, pixels
from curvlens.studies.study import Config, Finding, Study, between, mean95
from curvlens.studies.top_layer import next_tokens

STATES = ("initial", "trained")
ATTENTION = ("attn.query", "attn.key", "attn.value", "attn.out")
FEED = ("mlp.up", "mlp.down")
NORMS = ("norm1", "norm1.bias", "norm2", "norm2.bias")
GROUPS = (*ATTENTION, *NORMS[:2], *FEED, *NORMS[2:])  # in the order of a post-norm block


@dataclass(frozen=True, kw_only=True)
class Blocks(Config):
    width: int = 12
    sequences: int = 64
    steps: int = 1500
    repeats: int = 5
    pixels: int = 96
    norm: str = "post"  # the block of paper B


def measure(config: Blocks, unit: str) -> dict[str, Any]:
    """The dense Hessian of the block before and after training on digit addition: norms of all pairs, spectrum, map."""
    seed = seed_of(config, unit)
    net = network(config.width, seed, config.device, norm=config.norm)
    made: dict[str, Any] = {}
    for state in STATES:
        if state == "trained":
            stream = (
                (ids.to(config.device), labels.to(config.device))
                for ids, labels in digits.stream(64, seed + 1)
            )
            made["loss"] = digits.train(net, stream, config.steps, lr=3e-3)[-1]
        H, at = dense(net, *addition(config.sequences, seed, config.device))
        values = torch.linalg.eigvalsh(H)
        made[state] = {
            "pairs": [[H[a, b].norm().item() for b in at.values()] for a in at.values()],
            "zero": (H == 0).double().mean().item(),
            "empty": sum(not H[a, b].any() for a in at.values() for b in at.values()),
            "asymmetry": ((H - H.mT).abs().max() / H.abs().max()).item(),
            "negative": (values < -1e-9 * values.abs().max()).double().mean().item(),
        }
        if unit == units(config)[0]:
            made[state]["map"] = pixels(H, config.pixels)
    return made


def dense(net: nets.GPT, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, slice]]:
    R = hessian(of_net(net), embedded(net, ids), next_tokens(labels), loss="cross-entropy")
    space = R.blocks.select(*(f"layer.0.{name}" for name in GROUPS))
    H = R.total.block(space).dense()
    at = {name.removeprefix("layer.0."): span for name, span in space.ranges.items()}
    if tuple(at) != GROUPS:
        raise ValueError(f"expected the weights in the order {', '.join(GROUPS)}, got {', '.join(at)}")
    return H, at


def share(
    pairs: list[list[float]], rows: tuple[str, ...], columns: tuple[str, ...], names: list[str]
) -> float:
    """The share of the squared norm in some pairs of blocks, both orders."""
    total = sum(value**2 for row in pairs for value in row)
    part = sum(
        pairs[i][j] ** 2
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if (a in rows and b in columns) or (b in rows and a in columns)
    )
    return part / total


def numbers(config: Blocks, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    names = list(GROUPS)
    made: dict[str, Any] = {"runs": runs, "loss": mean95([run["loss"] for run in runs])}
    for state in STATES:
        pairs = [run[state]["pairs"] for run in runs]
        made[f"{state}: map"] = runs[0][state]["map"]
        made[f"{state}: pairs"] = torch.tensor(pairs).mean(0).tolist()
        made[f"{state}: diagonal"] = mean95(
            [sum(p[i][i] ** 2 for i in range(len(p))) / sum(v**2 for row in p for v in row) for p in pairs]
        )
        made[f"{state}: coupling"] = mean95([share(p, ATTENTION, FEED, names) for p in pairs])
        made[f"{state}: norms"] = mean95([share(p, NORMS, (*ATTENTION, *FEED), names) for p in pairs])
        made[f"{state}: value over query"] = mean95([p[2][2] / p[0][0] for p in pairs])
        for key in ("empty", "zero", "negative"):
            made[f"{state}: {key}"] = mean95([run[state][key] for run in runs])
        made[f"{state}: asymmetry"] = max(run[state]["asymmetry"] for run in runs)
    return made


def judge(config: Blocks, made: dict[str, Any]) -> list[Finding]:
    found = []
    pairs = len(GROUPS) ** 2
    many = "'sparse structure: many zero blocks': a tenth of the pairs of weights or more"
    rules = "'block diagonal dominance': more than half of the squared norm"
    apart = "'FFN and attention have relatively independent curvature': less than a tenth of the squared norm"
    coupled = "'cross-layer coupling through LayerNorm': not zero; a hundredth of the squared norm or more"
    exact = "a Hessian is symmetric, up to rounding in float64"
    for state in STATES:
        empty, error = made[f"{state}: empty"]
        rows: list[tuple[str, str, Any, float, float, str, bool]] = [
            ("share of zero blocks", "many", (empty / pairs, error / pairs), 0.1, 1, many, False),
            ("share of the diagonal blocks", "> 1/2", made[f"{state}: diagonal"], 0.5, 1, rules, True),
            ("share of attention with FFN", "small", made[f"{state}: coupling"], 0, 0.1, apart, False),
            ("share of norms with weights", "> 0", made[f"{state}: norms"], 0.01, 1, coupled, False),
            ("asymmetry over the largest entry", "0", made[f"{state}: asymmetry"], 0, 1e-12, exact, True),
        ]
        for what, paper, ours, low, high, why, main in rows:
            said = SAID.get(what, "")
            found.append(between(f"{what}, {state}", paper, ours, low, high, why, main=main, said=said))
    return found


SAID = {
    "share of zero blocks": "every two weights of a block meet in the loss; only the functional part has zero blocks",
}


def figure(config: Blocks, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.6, height=3.2)
    d = config.width
    sizes = [d * d] * 4 + [d] * 2 + [4 * d * d] * 2 + [d] * 2
    labels = ["Q", "K", "V", "O", "", "  LN", "up", "down", "LN", ""]
    total = sum(sizes)
    for axis, state in zip(axes.flat, STATES, strict=True):
        shown = made[f"{state}: map"]
        top = max(map(max, shown))
        image = axis.imshow(shown, extent=(0, 1, 1, 0), cmap="magma", vmin=max(top - 7, FLOOR), vmax=top)
        at, middles = 0.0, []
        for size in sizes:
            middles.append(at + size / 2 / total)
            at += size / total
            axis.axvline(at, color="w", lw=0.3)
            axis.axhline(at, color="w", lw=0.3)
        axis.set_xticks(middles, labels, fontsize=7)
        axis.set_yticks(middles, labels, fontsize=7)
        axis.tick_params(length=0)
        draw.titled(axis, state)
        bar = drawing.colorbar(image, ax=axis, shrink=0.8)
        bar.set_label("log10 of the mean |entry|", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    return drawing


STUDY = Study(
    name="B-blocks",
    title="The Hessian of a whole block, untrained and trained",
    source="Paper B, its figure of a block's entries; the article, §5.2",
    claim="The Hessian of a block is dominated by its diagonal blocks, attention and FFN curve apart from each other, "
    "LayerNorm couples them, and many blocks are zero.",
    presets={
        "smoke": Blocks(width=4, sequences=4, steps=3, repeats=2, pixels=48),
        "cpu": Blocks(),
        "paper": Blocks(width=32, steps=5000, repeats=10),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact, by products in closed form; post-norm, one head, ReLU, as in paper B, on digit addition. The "
    "weights of each norm stand after the sublayer it follows.",
)
