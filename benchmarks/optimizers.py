"""CurvatureAware beside SGD, AdamW, an Adam-mini-like and a Sophia-like optimizer: held-out loss at equal time.

    python benchmarks/optimizers.py cost        CPU time of a step of each, interleaved
    python benchmarks/optimizers.py tune        every rate of the grid, at a seed that is not used again
    python benchmarks/optimizers.py variants    the same for other settings of CurvatureAware
    python benchmarks/optimizers.py run         five seeds at each optimizer's best rate
    python benchmarks/optimizers.py show        table and picture

A one-layer GPT of width 16 learns digit addition or text of a small grammar. A run gets the CPU time of `STEPS` steps
of AdamW: the number of steps of the others follows from the cost of a step, so load on the machine changes nothing. All
have the same warm-up and cosine, batch and data of a seed; the same grid of rates, four of a factor √10 around each
one's usual rate. CurvatureAware measures at every 20th step: on a net so small the fixed cost of scaling takes the
default budget. Runs are kept in a file of JSON lines, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvlens as cl
from curvlens import digits, grammar
from curvlens.nets import GPT
from curvlens.training.curvature_aware import CurvatureAware

STEPS, BATCH, HELD, POINTS = 400, 32, 512, 12
TUNING, SEEDS = (100,), (0, 1, 2, 3, 4)
TASKS = ("addition", "text")
Make = Callable[[nn.Module, float, cl.Landscape], torch.optim.Optimizer]


class AdamMiniLike(torch.optim.Optimizer):
    """AdamW with one second moment a block: a head of the queries and keys, a row of an embedding, else a parameter."""

    def __init__(self, model: GPT, lr: float, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
        super().__init__(
            model.parameters(), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.shapes = {}  # how a parameter is seen, and over which dimensions its second moment is a mean
        for name, p in model.named_parameters():
            if name.endswith(("W_Q", "W_K")):
                heads = model.blocks[0].attn.heads
                self.shapes[p] = (p.shape[0], heads, -1), (0, 2)
            elif "token" in name or "position" in name:
                self.shapes[p] = tuple(p.shape), (1,)
            else:
                self.shapes[p] = (-1,), (0,)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                shape, mean = self.shapes[p]
                state = self.state[p]
                square = p.grad.view(shape).square().mean(mean, keepdim=True)
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(square))
                state["t"] += 1
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(square, 1 - second)
                scale = (state["v"] / (1 - second ** state["t"])).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                step = state["m"].view(shape) / scale / (1 - first ** state["t"])
                p.sub_(group["lr"] * step.view_as(p))


class SophiaLike(torch.optim.Optimizer):
    """`θ -= η clip(m / max(γ h, ε), 1)`, h the Gauss-Newton-Bartlett diagonal, taken anew every ten steps."""

    every = 10

    def __init__(self, model: nn.Module, lr: float, betas=(0.965, 0.99), gamma=0.05, weight_decay=0.1):
        super().__init__(
            model.parameters(), {"lr": lr, "betas": betas, "gamma": gamma, "weight_decay": weight_decay}
        )
        self.model, self.steps, self.generator = model, 0, torch.Generator().manual_seed(0)

    def curve(self, ids: Tensor, labels: Tensor) -> None:
        """`h` from the gradient at targets that the model itself draws, on the batch of this step."""
        if self.steps % self.every:
            return
        logits = self.model(ids)[:, :-1].flatten(0, 1)
        scored = labels[:, 1:].flatten() != digits.IGNORED
        logits = logits[scored]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=self.generator)[:, 0]
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = torch.autograd.grad(F.cross_entropy(logits, drawn), parameters)
        for p, g in zip(parameters, found, strict=True):
            h = self.state[p].setdefault("h", torch.zeros_like(p))
            h.lerp_(len(logits) * g.square(), 1 - self.param_groups[0]["betas"][1])

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            first, _ = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - first)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (m / (group["gamma"] * state["h"]).clamp(min=1e-12)).clamp(-1, 1))


def _sgd(model, rate):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adamw(model, rate):
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def _aware(make: Callable[..., Any], **settings: Any) -> Make:
    return lambda model, rate, land: CurvatureAware(make(model, rate), land, every=20, **settings)


# each with the middle of its grid
CONTENDERS: dict[str, tuple[float, Make]] = {
    "SGD": (0.3, lambda model, rate, land: _sgd(model, rate)),
    "AdamW": (3e-2, lambda model, rate, land: _adamw(model, rate)),
    "Adam-mini-like": (3e-2, lambda model, rate, land: AdamMiniLike(model, rate)),
    "Sophia-like": (3e-3, lambda model, rate, land: SophiaLike(model, rate)),
    "CurvatureAware(SGD)": (0.3, _aware(_sgd)),
    "CurvatureAware(AdamW)": (3e-2, _aware(_adamw)),
}
VARIANTS: dict[str, tuple[float, Make]] = {  # for the choice of the defaults, on the tuning seeds alone
    f"{name} power {power:g} limit {limit:g}": (middle, _aware(make, power=power, limit=limit))
    for name, make, middle in (("CurvatureAware(SGD)", _sgd, 0.3), ("CurvatureAware(AdamW)", _adamw, 3e-2))
    for power, limit in ((0.25, 4.0), (1.0, 4.0))
}


def rates(middle: float) -> list[float]:
    return [float(f"{middle * 10 ** (i / 2):.2g}") for i in range(-2, 2)]


def stream(task: str, seed: int, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    if task == "addition":
        return digits.stream(size, seed)
    return ((ids, ids) for ids in grammar.stream(size, seed=seed))


def net(task: str, seed: int) -> GPT:
    vocabulary, length = (
        (digits.VOCABULARY, digits.LENGTH) if task == "addition" else (grammar.VOCABULARY, grammar.LENGTH)
    )
    return GPT(
        vocabulary, length, 16, heads=2, norm="pre", activation="gelu", tied=True, bias=True, seed=seed
    )


def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=digits.IGNORED)


class Training:
    """One run, step by step."""

    def __init__(self, task: str, make: Make, rate: float, seed: int, steps: int):
        self.model = net(task, seed)
        self.held = next(stream(task, 999_983, HELD))
        land = cl.Landscape(self.model, [next(stream(task, 888_887))], loss="next-token")
        self.optimizer = make(self.model, rate, land)
        warm = steps // 10
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda t: min((t + 1) / warm, 0.05 + 0.95 * (1 + math.cos(math.pi * min(t, steps) / steps)) / 2),
        )
        self.data = stream(task, 10 * seed + 1)

    def step(self) -> None:
        ids, labels = next(self.data)
        if isinstance(self.optimizer, SophiaLike):
            self.optimizer.curve(ids, labels)
        self.optimizer.zero_grad()
        loss(self.model, ids, labels).backward()
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def value(self) -> float:
        found = loss(self.model, *self.held).item()
        return found if math.isfinite(found) else math.inf


def train(task: str, make: Make, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """The held-out loss along the run, at even shares of the time."""
    training = Training(task, make, rate, seed, steps)
    marks = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    curve = []
    for t in range(1, steps + 1):
        training.step()
        if t in marks:
            curve.append(training.value())
    made: dict[str, Any] = {"final": curve[-1], "curve": curve}
    optimizer = training.optimizer
    if isinstance(optimizer, CurvatureAware):
        share = optimizer.spent / (optimizer.spent + optimizer.trained)
        made |= {"share": share, "measurements": optimizer.measurements, "factors": optimizer.factors}
    return made


def cost(repeats: int = 9, chunk: int = 40) -> dict[str, float]:
    """CPU seconds of a step over that of AdamW: the median over interleaved chunks, after a chunk to warm up."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    runs = {
        name: Training("addition", make, middle / 10, 0, 10**6) for name, (middle, make) in CONTENDERS.items()
    }
    for number in range(repeats + 1):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(chunk):
                run.step()
            if number:
                found[name].append((time.process_time() - began) / chunk)
    means = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    print({name: f"{1e3 * value:.2f} ms" for name, value in means.items()})
    return {name: value / means["AdamW"] for name, value in means.items()}


class Kept:
    """Results by (task, optimizer, rate, seed), in a file of JSON lines."""

    def __init__(self, path: Path):
        self.path, self.rows = path, {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["task"], row["name"], row["rate"], row["seed"]] = row

    def run(self, task: str, name: str, make: Make, rate: float, seed: int, steps: int) -> dict[str, Any]:
        key = task, name, rate, seed
        if key not in self.rows:
            row = {"task": task, "name": name, "rate": rate, "seed": seed, "steps": steps}
            row |= train(task, make, rate, seed, steps)
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
            self.rows[key] = row
            print(f"{task:9s} {name:40s} rate {rate:<8g} seed {seed:3d}  {row['final']:.4f}", flush=True)
        return self.rows[key]

    def best(self, task: str, name: str, grid: list[float]) -> float:
        """The rate of the least mean loss over the tuning seeds."""
        return min(grid, key=lambda r: sum(self.rows[task, name, r, seed]["final"] for seed in TUNING))


def show(kept: Kept, costs: dict[str, float], picture: Path) -> None:
    import matplotlib.pyplot as plt
    from scipy.stats import t as student

    figure, axes = plt.subplots(1, len(TASKS), figsize=(10, 4))
    for axis, task in zip(axes, TASKS, strict=True):
        print(f"\n| {task} | time a step | steps | best rate | held-out loss | against AdamW, paired |")
        print("|---|---|---|---|---|---|")
        finals = {}
        best = {name: kept.best(task, name, rates(middle)) for name, (middle, _) in CONTENDERS.items()}
        # a benchmark that was broken off shows the seeds that all contenders have
        seeds = [s for s in SEEDS if all((task, name, rate, s) in kept.rows for name, rate in best.items())]
        for name, rate in best.items():
            rows = [kept.rows[task, name, rate, seed] for seed in seeds]
            finals[name] = torch.tensor([row["final"] for row in rows], dtype=torch.float64)
            curves = torch.tensor([row["curve"] for row in rows], dtype=torch.float64)
            x = torch.arange(1, POINTS + 1) / POINTS
            (line,) = axis.plot(x, curves.mean(0), label=name)
            axis.fill_between(
                x, curves.min(0).values, curves.max(0).values, alpha=0.15, color=line.get_color()
            )
        half = student.ppf(0.975, len(seeds) - 1) / math.sqrt(len(seeds))
        for name, found in finals.items():
            apart = found - finals["AdamW"]
            against = "" if name == "AdamW" else f"{apart.mean():+.4f} ± {half * apart.std():.4f}"
            steps = round(STEPS / costs[name])
            spread = f"{found.mean():.4f} ± {half * found.std():.4f}"
            print(f"| {name} | {costs[name]:.2f} | {steps} | {best[name]:g} | {spread} | {against} |")
        axis.set(
            title=f"{task}, {len(seeds)} seeds",
            xlabel="share of the time",
            ylabel="held-out loss",
            yscale="log",
        )
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "tune", "variants", "run", "show"))
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--keep", type=Path, default=Path("out/optimizers.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("benchmarks/optimizers.png"))
    settings = parser.parse_args()
    torch.set_num_threads(1)
    settings.keep.parent.mkdir(parents=True, exist_ok=True)
    costs_at = settings.keep.with_suffix(".cost.json")
    if settings.what == "cost":
        costs = cost()
        costs_at.write_text(json.dumps(costs))
        print(costs)
        return
    costs, kept = json.loads(costs_at.read_text()), Kept(settings.keep)
    if settings.what == "show":
        show(kept, costs, settings.picture)
        return
    contenders = CONTENDERS | (VARIANTS if settings.what == "variants" else {})
    seeds = SEEDS if settings.what == "run" else TUNING
    for task in settings.tasks:
        for seed in seeds:
            for name, (middle, make) in contenders.items():
                steps = round(STEPS / costs[name.split(" power")[0]])
                grid = rates(middle)
                for rate in [kept.best(task, name, grid)] if settings.what == "run" else grid:
                    kept.run(task, name, make, rate, seed, steps)


if __name__ == "__main__":
    main()
