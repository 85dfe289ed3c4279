"""O-training: the Hessian of a block through training, with Adam and with SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlens import digits, nets
from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.growth_without_norm import seed_of
from curvlens.studies.study import Config, Finding, Study, between, mean95
from curvlens.studies.top_layer import next_tokens

RATES = {"Adam": 3e-3, "SGD": 0.1}
MEASURED = ("loss", "sharpness", "trace", "negative", "functional", "gradient in top")


@dataclass(frozen=True, kw_only=True)
class Training(Config):
    width: int = 10
    sequences: int = 16
    checkpoints: tuple[int, ...] = (0, 25, 50, 100, 200, 400, 800, 1600)
    top: int = 10
    repeats: int = 3


def units(config: Training) -> list[str]:
    return [f"{method}-{i}" for method in RATES for i in range(config.repeats)]


def measure(config: Training, unit: str) -> dict[str, Any]:
    """The exact Hessian of all weights of the block, on one fixed batch, at every checkpoint: its whole spectrum."""
    method, seed = unit.split("-")[0], seed_of(config, unit)
    net = network(config.width, seed, config.device, norm="pre")
    fixed = addition(config.sequences, seed + 500, config.device)
    kind = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[method]
    extra = {"momentum": 0.9} if method == "SGD" else {}
    optimizer = kind(net.parameters(), lr=RATES[method], **extra)
    stream = digits.stream(64, seed)
    made: dict[str, list[float]] = {name: [] for name in (*MEASURED, "overlap")}
    before: Tensor | None = None
    for start, end in zip((0, *config.checkpoints), config.checkpoints, strict=False):
        for ids, labels in islice(stream, end - start):
            loss = loss_of(net, ids.to(config.device), labels.to(config.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found, vectors = described(net, fixed, config.top)
        for name, value in found.items():
            made[name].append(value)
        if before is not None:
            made["overlap"].append((before.mT @ vectors).square().sum().item() / config.top)
        before = vectors
    return {**made, "weights": len(vectors)}


def loss_of(net: nets.GPT, ids: Tensor, labels: Tensor) -> Tensor:
    logits = net(ids)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=digits.IGNORED)


def described(net: nets.GPT, batch: digits.Batch, top: int) -> tuple[dict[str, float], Tensor]:
    """Numbers of the Hessian of the block's weights, and its eigenvectors largest by magnitude."""
    ids, labels = batch
    R = hessian(of_net(net), embedded(net, ids), next_tokens(labels), loss="cross-entropy")
    space = R.blocks.select("layer.0.*")
    H, H_f = R.total.block(space).dense(), R.functional.block(space).dense()
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    chosen = vectors[:, values.abs().argsort(descending=True)[:top]]
    g = gradient(net, ids, labels, space.names)
    return {
        "loss": loss_of(net, ids, labels).item(),
        "sharpness": values[-1].item(),
        "trace": values.sum().item(),
        "negative": -values.clamp(max=0).sum().item() / values.abs().sum().item(),
        "functional": (H_f.norm() / H.norm()).item(),
        "gradient in top": ((chosen.mT @ g).norm() / g.norm()).square().item(),
    }, chosen


def gradient(net: nets.GPT, ids: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """Of the block's weights, in the order of its Hessian's rows."""
    block: Any = net.blocks[0]
    a, m, n1, n2 = block.attn, block.mlp, block.norm1, block.norm2
    weights = {"attn.query": a.W_Q, "attn.key": a.W_K, "attn.value": a.W_V, "attn.out": a.W_O,
               "mlp.up": m.W_1, "mlp.down": m.W_2,
               "norm1": n1.weight, "norm1.bias": n1.bias, "norm2": n2.weight, "norm2.bias": n2.bias}  # fmt: skip
    wanted = [weights[name.removeprefix("layer.0.")] for name in names]
    found = torch.autograd.grad(loss_of(net, ids, labels), wanted)
    return torch.cat([part.flatten() for part in found])


def numbers(config: Training, measured: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for method in RATES:
        runs = [run for unit, run in measured.items() if unit.startswith(method)]
        for name in (*MEASURED, "overlap"):
            made[f"{method}: {name}"] = [run[name] for run in runs]
        overlaps = [run["overlap"] for run in runs]
        made[f"{method}: settles"] = mean95([o[-1] - o[0] for o in overlaps])
        made[f"{method}: last overlap"] = mean95([o[-1] for o in overlaps])
        changes = [[abs(math.log2(b / a)) for a, b in pairwise(run["sharpness"])] for run in runs]
        made[f"{method}: slows"] = mean95([c[0] - c[-1] for c in changes])
        made[f"{method}: in top"] = mean95(
            [sum(run["gradient in top"][1:]) / (len(run["loss"]) - 1) for run in runs]
        )
        made[f"{method}: left negative"] = mean95([run["negative"][-1] / run["negative"][0] for run in runs])
    made["weights"] = next(iter(measured.values()))["weights"]
    return made


def judge(config: Training, made: dict[str, Any]) -> list[Finding]:
    found = []
    rapid = "'initial phase: rapid changes, later: stabilisation': doublings of sharpness, first interval less last"
    turn = "'stabilisation': the top directions overlap more over the last doubling of steps than over the first steps"
    chance = f"directions by chance share {config.top} of {made['weights']}; a tenth is far above"
    tiny = "'gradient descent happens in a tiny subspace' (Gur-Ari et al.): more than half of the squared gradient"
    flat = "training leads away from saddles: the share of negative curvature falls"
    for method in RATES:
        rows: list[tuple[str, str, Any, float, float, str, bool]] = [
            ("how sharpness slows down", "> 0", made[f"{method}: slows"], 0, math.inf, rapid, True),
            ("gain of overlap", "> 0", made[f"{method}: settles"], 0, 1, turn, True),
            ("overlap over the last doubling", "–", made[f"{method}: last overlap"], 0.1, 1, chance, True),
            ("gradient in the top directions", "> 1/2", made[f"{method}: in top"], 0.5, 1, tiny, False),
            (
                "negative curvature, end over start",
                "< 1",
                made[f"{method}: left negative"],
                0,
                1,
                flat,
                False,
            ),
        ]
        for what, paper, ours, low, high, why, main in rows:
            found.append(between(f"{what}, {method}", paper, ours, low, high, why, main=main))
    return found


def figure(config: Training, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(3, 2, width=2.9, height=2.3)
    titles = {
        "loss": "loss",
        "sharpness": "largest eigenvalue",
        "functional": r"$\Vert H_f\Vert / \Vert H\Vert$",
        "negative": "share of negative curvature",
        "gradient in top": f"squared gradient in top {config.top}",
        "overlap": "overlap of top directions, one to next",
    }
    colours = {"Adam": draw.COLOURS["functional"], "SGD": draw.COLOURS["outer"]}
    for axis, (name, title) in zip(axes.flat, titles.items(), strict=True):
        for method, colour in colours.items():
            steps = [step + 10 for step in config.checkpoints[1 if name == "overlap" else 0 :]]
            draw.curve(axis, steps, made[f"{method}: {name}"], method, colour)
        axis.set_xscale("log")
        if name in ("sharpness", "functional"):
            axis.set_yscale("log")
        draw.titled(
            axis, title, "step + 10" if name in ("negative", "gradient in top", "overlap") else "", ""
        )
    draw.legend(axes[0, 0])
    return drawing


STUDY = Study(
    name="O-training",
    title="The Hessian through training",
    source="An open question of the article on paper B, §7.2: time-varying Hessians",
    claim="Curvature changes rapidly at first and stabilises later: sharpness slows down, and the sharpest directions "
    "turn less and less.",
    presets={
        "smoke": Training(width=3, sequences=4, checkpoints=(0, 2, 4), top=2, repeats=2),
        "cpu": Training(),
        "paper": Training(
            width=32, sequences=64, checkpoints=(0, 50, 100, 200, 400, 800, 1600, 3200, 6400), repeats=10
        ),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact: the whole spectrum of the Hessian of all weights of one pre-norm block, on one batch that is never "
    "trained on. Adam with rate 3e-3, SGD with 0.1 and momentum 0.9, digit addition. Checkpoints double, so that each "
    "interval is as long as all before it.",
)
