"""What an analysis will cost, before it is run: products of each stage, time and memory from small trials."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from curvlens import families
from curvlens.curvature import functional, gauss_newton
from curvlens.engine.plan import Plan, plan
from curvlens.landscape import Landscape
from curvlens.operator import Operator
from curvlens.report.presets import Preset, named
from curvlens.report.stages import STAGES, Context
from curvlens.report.stages.context import COLUMNS

LANCZOS = (
    8  # products an eigenpair, about: it depends on the gaps of the spectrum, which nothing tells before
)
PARTS = ("hessian", "gauss-newton", "functional")


@dataclass(frozen=True)
class Cost:
    """Of one stage; `sure` says whether its number of products is fixed by the preset or a guess."""

    name: str
    title: str
    products: int
    seconds: float
    sure: bool


@dataclass(frozen=True)
class Forecast:
    preset: str
    stages: tuple[Cost, ...]
    plans: dict[str, Plan]
    dense: bool
    kept_bytes: int  # beside a product: the vectors of eigenvalues and spectra, or whole matrices
    leaves_out: tuple[str, ...]

    @property
    def products(self) -> int:
        return sum(stage.products for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak_bytes(self) -> int:
        return max(p.peak_bytes for p in self.plans.values()) + self.kept_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "products": self.products,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "exact": self.dense,
            "stages": [asdict(stage) for stage in self.stages],
            "plans": {name: asdict(p) for name, p in self.plans.items()},
            "leaves_out": list(self.leaves_out),
        }

    def __str__(self) -> str:
        rows = [f"{'stage':<26}{'products':>10}{'time':>12}"]
        for s in self.stages:
            mark = "" if s.sure else "about "
            rows.append(f"{s.title:<26}{mark + format(s.products, ','):>10}{time_words(s.seconds):>12}")
        rows.append(f"{'all':<26}{self.products:>10,}{time_words(self.seconds):>12}")
        rows += ["", *(f"{name}: {p}" for name, p in self.plans.items())]
        what = "the whole matrices" if self.dense else "the vectors of eigenvalues and spectra"
        rows.append(
            f"at most {self.peak_bytes / 2**30:.3g} GiB: a product, and {self.kept_bytes / 2**30:.3g} GiB for {what}"
        )
        rows += ["", "Not in it: " + "; ".join(self.leaves_out) + "."]
        return "\n".join(rows)


def plans_of(land: Landscape) -> dict[str, Plan]:
    """The plan of a product with each of the three matrices."""
    return {name: plan(land, quantity) for name, quantity in zip(("H", "H_o", "H_f"), PARTS, strict=True)}


def forecast(
    land: Landscape,
    preset: str | Preset = "standard",
    optimizer: torch.optim.Optimizer | None = None,
    plans: dict[str, Plan] | None = None,
) -> Forecast:
    """Runs a few small products to measure their time and memory, unless `plans` has them; nothing else."""
    chosen = named(preset)
    at = Context(land, chosen, 0, optimizer)
    plans = plans_of(land) if plans is None else plans
    H, pair = plans["H"].seconds, plans["H_o"].seconds + plans["H_f"].seconds
    if at.dense:  # columns of the whole matrices share what one pass costs
        pair = sum(_seconds_a_column(operator(land)) for operator in (gauss_newton, functional))
    found = [_cost(at, stage.name, stage.title, H, pair) for stage in STAGES]
    leaves_out = [
        "weights, data and what PyTorch itself takes",
        "the first product's checks",
        f"the exact norms of heads, up to the cost of {chosen.head_gradients:g} gradients",
        "other programs on the machine",
    ]
    if not at.dense:
        leaves_out.append("how many products the eigenvalues need: it depends on the spectrum")
    return Forecast(chosen.name, tuple(found), plans, at.dense, _kept(at), tuple(leaves_out))


def _seconds_a_column(operator: Operator) -> float:
    stack = torch.eye(
        min(COLUMNS, operator.shape[1]), operator.shape[1], dtype=operator.dtype, device=operator.device
    )
    operator.apply(stack[:1])
    began = time.perf_counter()
    operator.apply(stack)
    return (time.perf_counter() - began) / len(stack)


def products(at: Context, name: str) -> tuple[int, bool]:
    """Products of a stage, and whether that is sure."""
    p, size = at.preset, at.land.blocks.size
    lanczos = LANCZOS * min(p.eigenpairs, size)
    sublayers = 2 * len({g.layer for g in at.groups if g.layer is not None}) + 1
    groups = min(len(at.groups), p.spectra)
    counts = {
        "traces": (2 * size if at.dense else 2 * p.traces, True),
        "eigenvalues": (0, True) if at.dense else (lanczos + 1, False),
        "norms": (0 if at.dense else 2 * p.norms * len(at.rows), True),
        "depth": (2 * p.depth * sublayers if families.attention_sites(at.land.model) else 0, True),
        "sharpness": (0, True) if at.optimizer is None else (lanczos, False),
        "noise": (p.parts, True),
        "spectrum": (0 if at.dense else p.probes * p.steps, True),
        "spectra": (0 if at.dense else groups * max(2, p.probes // 2) * max(10, p.steps // 2), True),
    }
    return counts.get(name, (0, True))


def _cost(at: Context, name: str, title: str, H: float, pair: float) -> Cost:
    count, sure = products(at, name)
    each = {"traces": pair / 2, "norms": pair / 2, "noise": H / max(1, at.preset.parts)}.get(name, H)
    gradients = {"point": H / 3, "heads": H / 3, "gains": H / 9}.get(name, 0.0)
    return Cost(name, title, count, count * each + gradients, sure)


def _kept(at: Context) -> int:
    size, item = at.land.blocks.size, at.land.dtype.itemsize
    if at.dense:
        return 3 * size * size * item
    pairs = max(4 * at.preset.eigenpairs, 40)
    vectors = max(min(pairs, at.room), min(2 * at.preset.steps, at.room), at.preset.eigenpairs + 4)
    return vectors * size * item


def time_words(seconds: float) -> str:
    """`4 s`, `3 min`, `2.5 h`: as far as a forecast goes."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s" if seconds >= 1 else "< 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
