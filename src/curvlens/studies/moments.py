"""A-moments: from dispersed to one-hot attention, block norms against attention moments; and through training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from curvlens import digits, nets
from curvlens.exact.moments import moments
from curvlens.exact.result import Tokens
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import embed, logarithmic, network
from curvlens.studies.growth_without_norm import seed_of
from curvlens.studies.study import Config, Finding, Study, between, mean95
from curvlens.studies.top_layer import TopLayer, next_tokens, of_network

MEASURED = ("entropy", "first", "second", "third", "outer value", "outer query", "functional query")


@dataclass(frozen=True, kw_only=True)
class Maps(Config):
    width: int = 16
    sequences: int = 64
    repeats: int = 20
    sharpness: tuple[float, ...] = logarithmic(-2, 4, 25)  # factors of the scores
    checkpoints: tuple[int, ...] = (0, 100, 200, 400, 800, 1600)
    trained: int = 3  # repeats of training
    trained_width: int = 32


def units(config: Maps) -> list[str]:
    return [
        *(f"repeat-{i}" for i in range(config.repeats)),
        *(f"training-{i}" for i in range(config.trained)),
    ]


def measure(config: Maps, unit: str) -> dict[str, Any]:
    """Entropy, norms of the moments and of the blocks over the factors of the scores, or over the steps of training.

    Norms of the query block are divided by the square of the scale of the scores: what is left depends on the scores
    by the map alone.
    """
    seed = seed_of(config, unit)
    made: dict[str, list[float]] = {name: [] for name in MEASURED}
    ids, labels = (t.to(config.device) for t in digits.batches(1, config.sequences, seed)[0])

    def note(net: nets.GPT) -> None:
        for name, value in described(of_network(net, ids, labels), next_tokens(labels)).items():
            made[name].append(value)

    if unit.startswith("repeat"):
        for factor in config.sharpness:
            net = network(config.width, seed, config.device, scale=factor * config.width**-0.5)
            embed(net, 1.0, seed)
            note(net)
        return made
    net = network(config.trained_width, seed, config.device)
    losses: list[float] = []
    stream = digits.stream(64, seed + 1)
    for before, after in zip((0, *config.checkpoints), config.checkpoints, strict=False):
        batches = [tuple(t.to(config.device) for t in batch) for batch in islice(stream, after - before)]
        if batches:
            losses += digits.train(net, batches, after - before, lr=3e-3)  # type: ignore[arg-type]
        note(net)
    return made | {"loss": [losses[max(0, step - 1)] for step in config.checkpoints]}


def described(layer: TopLayer, targets: Tensor) -> dict[str, float]:
    """Means over scored tokens of the entropy and of the norms of the moments; norms of blocks."""
    found: dict[str, list[float]] = {"entropy": [], "first": [], "second": [], "third": []}
    masks = layer.attention.masks(Tokens.of(layer.inputs))
    for x, wanted, mask in zip(layer.inputs, targets, masks, strict=True):
        A = layer.attention.activation.attend(layer.attention.score(x, 0), mask)
        seen = wanted != -100
        at = moments(A, x)
        found["entropy"].append(float(-(torch.special.xlogy(A, A)).sum(1)[seen].mean()))
        found["first"].append(float(at.first[seen].norm(dim=1).mean()))
        found["second"].append(float(at.second[seen].norm(dim=(1, 2)).mean()))
        found["third"].append(third_norm(A[seen], x))
    s = layer.attention.scale
    return {
        **{name: math.fsum(values) / len(values) for name, values in found.items()},
        "outer value": layer.norm("outer", "value"),
        "outer query": layer.norm("outer", "query") / s**2,
        "functional query": layer.norm("functional", "query") / s**2,
    }


def third_norm(A: Tensor, x: Tensor) -> float:
    """Mean over rows of the Frobenius norm of the third central moment: `‖M3‖² = Σ_jk A_j A_k (c_j·c_k)³`."""
    centred = x[None] - (A @ x)[:, None]
    cubes = (centred @ centred.mT) ** 3
    return float(torch.einsum("ij,ijk,ik->i", A, cubes, A).clamp(min=0).sqrt().mean())


def numbers(config: Maps, measured: Mapping[str, Any]) -> dict[str, Any]:
    maps = [run for unit, run in measured.items() if unit.startswith("repeat")]
    made: dict[str, Any] = {name: [run[name] for run in maps] for name in MEASURED}
    # from the map of most entropy to the sharpest one
    for name in MEASURED:
        made[f"left of {name}"] = mean95([run[name][-1] / run[name][0] for run in maps])
    made["outer over functional, dispersed"] = mean95(
        [run["outer query"][0] / run["functional query"][0] for run in maps]
    )
    trained = [run for unit, run in measured.items() if unit.startswith("training")]
    made["training"] = {name: [run[name] for run in trained] for name in (*MEASURED, "loss")}
    for block, moment in (("outer query", "second"), ("functional query", "third")):
        made[f"training: {block} with {moment}"] = [correlation(run[moment], run[block]) for run in trained]
    return made


def correlation(x: list[float], y: list[float]) -> float:
    """Of logarithms."""
    logs = torch.tensor([x, y], dtype=torch.float64).log()
    return float(torch.corrcoef(logs)[0, 1])


def judge(config: Maps, made: dict[str, Any]) -> list[Finding]:
    vanish = "'diminishes': below a tenth of the dispersed map's, at the sharpest map"
    found = [
        between(f"{name}, one-hot over dispersed", "→ 0", made[f"left of {name}"], 0, 0.1, vanish)
        for name in ("second", "third", "outer query", "functional query")
    ]
    stays = "the value block holds the first moment only, which does not vanish"
    found.append(
        between("outer value, one-hot over dispersed", "stays", made["left of outer value"], 0.5, 100, stays)
    )
    rules = "'if scores are highly dispersed the query-key outer-product Hessian will dominate': over H_f"
    ratio = made["outer over functional, dispersed"]
    found.append(
        between(
            "outer over functional query, dispersed", "> 1", ratio, 1, math.inf, rules, main=False, said=SAID
        )
    )
    for name, moment in (("outer query", "second"), ("functional query", "third")):
        for value in made[f"training: {name} with {moment}"]:
            follows = (
                "'can help to interpret its evolution during training': a correlation of logarithms above 1/2"
            )
            what = f"training: correlation of {name} with the {moment} moment"
            found.append(between(what, "> 0", value, 0.5, 1, follows, main=False, said=TRAINED))
    return found


SAID = (
    "both parts are at their largest for a dispersed map; which of the two is larger is decided by the scale of the "
    "tokens, not by the map: H_o goes as σ⁶, H_f as σ⁵ (A-3a)"
)
TRAINED = "weights and gradient change in training, too, and they are factors of the norm beside the moments"


def figure(config: Maps, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(3, width=3.0)
    curves, against, training = axes.flat
    colours = dict(
        zip(MEASURED[1:], ("#7f8c8d", "#27ae60", "#e67e22", "#111111", "#c0392b", "#2471a3"), strict=True)
    )
    for name, colour in colours.items():
        runs = [[value / run[0] for value in run] for run in made[name]]
        style = "moment" if name in MEASURED[1:4] else "block"
        draw.curve(curves, config.sharpness, runs, f"{name} {style}", colour)
    curves.set_ylim(1e-6, 10)
    draw.titled(curves, "from dispersed to one-hot", "factor of the scores", "over the dispersed map's")
    for block, moment in (("outer query", "second"), ("functional query", "third")):
        for x, y in zip(made[moment], made[block], strict=True):
            against.plot(x, y, ".", ms=3, color=colours[block], alpha=0.5)
        against.plot([], [], ".", color=colours[block], label=f"{block} against ‖{moment} moment‖")
    draw.titled(against, "norms against moments", "norm of the moment", "norm of the block over s²")
    for name in ("entropy", *MEASURED[2:]):
        for i, run in enumerate(made["training"][name]):
            steps = [step + 1 for step in config.checkpoints]
            training.plot(steps, [v / run[0] for v in run], ".-", lw=1, ms=3, color=colours.get(name, "#9b59b6"),
                          label=name if i == 0 else None)  # fmt: skip
    draw.titled(training, "training on digit addition", "step + 1", "over the start's")
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-moments",
    title="Attention moments and the query block",
    source="Paper A, §3.2",
    claim="The query block's H_o follows the second central moment of attention and its H_f the third: both diminish "
    "as attention becomes one-hot and the moments vanish, while the value block, which holds the first, stays.",
    presets={
        "smoke": Maps(width=4, sequences=3, repeats=3, sharpness=(0.01, 1.0, 100.0, 1e4), checkpoints=(0, 4),
                      trained=1, trained_width=4),
        "cpu": Maps(repeats=5),
        "paper": Maps(width=32, trained=10, trained_width=64),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact. Tokens, values and the loss are held while the scores are multiplied; norms of the query block are "
    "divided by the explicit square of the scale of the scores. Tokens of scale σ = 1.",
)  # fmt: skip
