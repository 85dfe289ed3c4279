"""Z-adam: SGD against Adam, on quadratics whose blocks are alike or unlike, and on small nets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlens import digits, nets
from curvlens.studies import images
from curvlens.studies import plot as draw
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95, near

QUADRATICS = {  # the same nine eigenvalues in three blocks, as in the paper
    "heterogeneous": ((1, 2, 3), (99, 100, 101), (4998, 4999, 5000)),
    "homogeneous": ((1, 99, 4998), (2, 100, 4999), (3, 101, 5000)),
}
NETS = ("Transformer, addition", "ViT, digits", "CNN, digits")
RATES = {
    "SGD": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
}
QUADRATIC_DRAWS = 20  # turns and starts in a repeat
CURVE = 20  # steps over which a loss is averaged


@dataclass(frozen=True, kw_only=True)
class Optimizers(Config):
    quadratic_steps: int = 300
    steps: int = 600
    width: int = 32
    depth: int = 2
    vit: int = 16
    channels: int = 12
    repeats: int = 10


def measure(config: Optimizers, unit: str) -> dict[str, Any]:
    seed = seed_of(config, unit)
    made: dict[str, Any] = {}
    for name, spectra in QUADRATICS.items():
        drawn = [quadratic(spectra, config.quadratic_steps, 100 * seed + i) for i in range(QUADRATIC_DRAWS)]
        made[name] = {key: averaged_logs([draw[key] for draw in drawn]) for key in drawn[0]}
    for name in NETS:
        for method, rates in RATES.items():
            curves = {rate: trained(config, name, method, rate, seed) for rate in rates}
            rate = min(curves, key=lambda r: last(curves[r]))
            made[f"{name}: {method}"] = averaged(curves[rate])
            made[f"{name}: {method} rate"] = rate
    return made


def averaged_logs(draws: list[list[float]]) -> list[float]:
    """Geometric means."""
    logs = torch.tensor(draws, dtype=torch.float64).clamp(min=1e-30).log()
    return logs.mean(0).exp().tolist()


def quadratic(spectra: Sequence[Sequence[float]], steps: int, seed: int) -> dict[str, list[float]]:
    """`½ wᵀHw`, `H` of turned diagonal blocks: condition numbers, and losses with each method's best rate.

    With `β₁ = 0`, `β₂ = 1` Adam divides by the first gradient, `w ← w − η D⁻¹Hw`, and its rate of convergence is set by
    `κ(D^{-1/2} H D^{-1/2})` as that of gradient descent is by `κ(H)`.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for values in spectra:
        Q, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        blocks.append(Q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ Q.mT)
    H = torch.block_diag(*blocks)
    w = torch.randn(len(H), generator=generator, dtype=torch.float64)
    root = (H @ w).abs().rsqrt()
    descent, adam = (torch.linalg.eigvalsh(matrix) for matrix in (H, root[:, None] * H * root))
    return {
        "descent": [(descent[-1] / descent[0]).item()],
        "adam": [(adam[-1] / adam[0]).item()],
        "losses, descent": iterated(H, w, torch.ones_like(w), 2 / (descent[-1] + descent[0]), steps),
        "losses, adam": iterated(H, w, root**2, 2 / (adam[-1] + adam[0]), steps),
    }


def iterated(H: Tensor, w: Tensor, scale: Tensor, rate: Tensor, steps: int) -> list[float]:
    """Losses of `w ← w − η S H w` over its first one, at powers of ten and at the end."""
    first, kept = (w @ H @ w).item(), []
    for _ in range(steps + 1):
        kept.append((w @ H @ w).item() / first)
        w = w - rate * scale * (H @ w)
    return [kept[i] for i in shown(steps)]


def shown(steps: int) -> list[int]:
    return sorted({0, steps, *(round(steps ** (i / 15)) for i in range(16))})


def trained(config: Optimizers, name: str, method: str, rate: float, seed: int) -> list[float]:
    """The losses of one run: the same net and batches for every method and rate."""
    if name == NETS[0]:
        net: nn.Module = nets.GPT(
            digits.VOCABULARY,
            digits.LENGTH,
            config.width,
            config.depth,
            2,
            norm="pre",
            activation="gelu",
            seed=seed,
        ).to(config.device)
        batches = islice(digits.stream(64, seed), config.steps)
        return addition(net, batches, optimizer(net, method, rate), config.device)
    kind = name.split(",")[0]
    size = {"channels": config.channels} if kind == "CNN" else {"width": config.vit}
    net = images.classifier(kind, seed, config.device, **size)
    data = [t.to(config.device) for t in images.handwritten(seed)]
    return images.train(net, data[0], data[1], config.steps, optimizer(net, method, rate), seed)


def optimizer(net: nn.Module, method: str, rate: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, Adam with its defaults, neither with weight decay."""
    if method == "SGD":
        return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    return torch.optim.Adam(net.parameters(), lr=rate)


def addition(net: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    losses = []
    for ids, labels in batches:
        logits = net(ids.to(device))[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels.to(device)[:, 1:].flatten(), ignore_index=digits.IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def last(losses: list[float]) -> float:
    """The mean of the last losses; infinite for a run that broke."""
    mean = math.fsum(losses[-CURVE:]) / len(losses[-CURVE:])
    return mean if math.isfinite(mean) else math.inf


def averaged(losses: list[float]) -> list[float]:
    """Means over every twenty steps."""
    return [last(losses[i : i + CURVE]) for i in range(0, len(losses), CURVE)]


def numbers(config: Optimizers, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"runs": runs}
    for name in QUADRATICS:
        made[name] = {
            "condition": max(abs(run[name]["descent"][0] / 5000 - 1) for run in runs),
            "gain": mean95([math.log10(run[name]["descent"][0] / run[name]["adam"][0]) for run in runs]),
        }
    for name in NETS:
        gaps = [(run[f"{name}: SGD"][-1] - run[f"{name}: Adam"][-1]) / run[f"{name}: SGD"][0] for run in runs]
        made[name] = mean95(gaps)
    return made


def judge(config: Optimizers, made: dict[str, Any]) -> list[Finding]:
    found = []
    exact = "both have the eigenvalues 1 to 5000: rounding in float64"
    faster = (
        "'Adam outperforms on heterogeneous blocks': a condition number smaller by a factor of ten or more"
    )
    no_better = "'not on homogeneous ones': by less than half an order of magnitude"
    for name, (low, high, why) in {
        "heterogeneous": (1.0, math.inf, faster),
        "homogeneous": (-math.inf, 0.5, no_better),
    }.items():
        found.append(
            near(
                f"condition number of H over 5000, less one, {name}", 0, made[name]["condition"], 1e-9, exact
            )
        )
        what = f"log10 of Adam's gain in condition, {name} blocks"
        found.append(between(what, "≥ 1" if low > 0 else "none", made[name]["gain"], low, high, why))
    worse = "'significantly worse': the gap is a tenth of the first loss or more"
    par = "'on par': the gap is less than a twentieth of the first loss"
    for name in NETS:
        low, high, why = (-0.05, 0.05, par) if name.startswith("CNN") else (0.1, 1.0, worse)
        what = f"loss of SGD less Adam's over the first, {name}"
        found.append(
            between(what, "≈ 0" if high < 0.1 else "> 0", made[name], low, high, why, main=False, said=SMALL)
        )
    return found


SMALL = (
    "nets this small on tasks this easy leave SGD little to lose, once its rate is tuned; the paper's gap is that of "
    "deep Transformers"
)


def figure(config: Optimizers, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(5, width=2.5)
    colours = {"descent": draw.COLOURS["outer"], "adam": draw.COLOURS["functional"]}
    colours |= {"SGD": colours["descent"], "Adam": colours["adam"]}
    for axis, name in zip(axes.flat, QUADRATICS, strict=False):
        for method, label in (("descent", "gradient descent"), ("adam", "Adam, β = (0, 1)")):
            means = averaged_logs([run[name][f"losses, {method}"] for run in made["runs"]])
            steps = [step + 1 for step in shown(config.quadratic_steps)]
            axis.plot(steps, means, color=colours[method], label=label, lw=1.2)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1e-12, 3)
        draw.titled(axis, f"quadratic, {name}", "step + 1", "loss over the first")
    for axis, name in zip(axes.flat[2:], NETS, strict=True):
        for method in RATES:
            runs = [run[f"{name}: {method}"] for run in made["runs"]]
            steps = [min((i + 1) * CURVE, config.steps) for i in range(len(runs[0]))]
            draw.curve(axis, steps, runs, method, colours[method])
        axis.set_yscale("log")
        draw.titled(axis, name, "step", "loss")
    for axis in axes.flat:
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="Z-adam",
    title="SGD against Adam, blocks alike and unlike",
    source="Zhang et al., Why Transformers need Adam, §3 and §4",
    claim="With one spectrum in all, Adam is faster than gradient descent where the blocks' spectra are unlike and not "
    "where they are alike; so SGD is worse than Adam on Transformers and on par on CNNs.",
    presets={
        "smoke": Optimizers(quadratic_steps=20, steps=4, width=4, depth=1, vit=4, channels=2, repeats=2),
        "cpu": Optimizers(steps=400, repeats=4),
        "paper": Optimizers(steps=5000, width=128, depth=6, vit=64, channels=32),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Quadratics: exact condition numbers of what either method iterates, Adam with β₁ = 0 and β₂ = 1 as in the "
    "paper's theory; the curves use the best constant rate. Nets: the best rate of a grid for each method, fresh "
    "batches of digit addition, digits of scikit-learn in place of ImageNet.",
)
