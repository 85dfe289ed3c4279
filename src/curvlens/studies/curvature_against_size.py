"""B-scale: curvature against width, depth and data size of small GPTs, on digit addition and on text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curvlens.scaling.families import gpt
from curvlens.scaling.law import fit
from curvlens.scaling.sizes import MEASURES
from curvlens.studies import plot as draw
from curvlens.studies.study import Config, Finding, Study, between

TASKS = ("addition", "text")
MEASURED = ("loss", "sharpness", "trace", "frobenius", "condition")
AXES = ("width", "depth", "data")


@dataclass(frozen=True, kw_only=True)
class Sizes(Config):
    widths: tuple[int, ...] = (8, 12, 16, 24, 32)
    depths: tuple[int, ...] = (1, 2, 3, 4)
    data: tuple[int, ...] = (32, 128, 512, 2048)  # distinct training samples
    steps: int = 300
    measured: int = 64
    repeats: int = 3


def points(config: Sizes) -> list[tuple[str, int, int, int]]:
    """`(axis, width, depth, data)`: along each axis, the others at the middle width, one block and most data."""
    middle, most = config.widths[len(config.widths) // 2], config.data[-1]
    found = [("width", width, 1, most) for width in config.widths]
    found += [("depth", middle, depth, most) for depth in config.depths if depth > 1]
    return found + [("data", middle, 1, data) for data in config.data[:-1]]


def units(config: Sizes) -> list[str]:
    return [
        f"{task}-{axis}-{width}-{depth}-{data}-{i}"
        for task in TASKS
        for axis, width, depth, data in points(config)
        for i in range(config.repeats)
    ]


def measure(config: Sizes, unit: str) -> dict[str, Any]:
    """Loss, largest eigenvalue, trace, norm and `λ_1/λ_10` of a trained GPT, on samples that none was trained on."""
    task, _, *sizes = unit.split("-")
    width, depth, data, repeat = map(int, sizes)
    family = gpt(
        task, "width", config.steps, config.measured, depth=depth, device=config.device  # type: ignore[arg-type]
    )  # fmt: skip
    seed = 1000 * config.seed + repeat
    land = family(width, data, seed)
    made: dict[str, Any] = {"parameters": land.blocks.size}
    for name in MEASURED:
        value = MEASURES[name](land, seed)
        made[name] = [float(value), float(getattr(value, "stderr", 0.0))]
    return made


def along(
    config: Sizes, measured: Mapping[str, Any], task: str, axis: str, name: str
) -> tuple[list[float], list[float]]:
    """Sizes and values of all points on an axis, the shared ones with them."""
    middle, most = config.widths[len(config.widths) // 2], config.data[-1]
    x, y = [], []
    for unit, found in measured.items():
        of, _, *sizes = unit.split("-")
        width, depth, data, _ = map(int, sizes)
        others = {"width": (depth, data), "depth": (width, data), "data": (width, depth)}[axis]
        if of == task and others == {"width": (1, most), "depth": (middle, most), "data": (middle, 1)}[axis]:
            x.append(float({"width": width, "depth": depth, "data": data}[axis]))
            y.append(found[name][0])
    return x, y


def numbers(config: Sizes, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The law of every measure along every axis: exponent and its interval, and what the tests say of it."""
    made: dict[str, Any] = {}
    for task in TASKS:
        for axis in AXES:
            for name in MEASURED:
                x, y = along(config, measured, task, axis, name)
                made[f"{task}, {axis}: {name}"] = described(x, y, axis, name)
    return made


def described(x: list[float], y: list[float], axis: str, name: str) -> dict[str, Any]:
    """The fit, or why there is none: a trace that changes its sign follows no power law."""
    try:
        law = fit(x, y, axis, name)
    except ValueError as error:
        return {"x": x, "y": y, "exponent": None, "verdict": "no law", "statement": str(error)}
    value, low, high = law.exponent
    return {
        "x": x,
        "y": y,
        "exponent": [value, max(high - value, value - low)],
        "verdict": law.verdict,
        "statement": law.statement,
        "prefactor": law.prefactor.value,
    }


CLAIMS = (  # axis, measure, what the article says, the range of the exponent that it leaves, and whether it is said so
    ("data", "condition", "∝ 1/√D: −0.5", -0.6, -0.4, "'condition ∝ 1/√D': an exponent within 0.1"),
    (
        "data",
        "sharpness",
        "smoother: < 0",
        -math.inf,
        -0.05,
        "'smoother with more data': falls, by more than D^−0.05",
    ),
    ("width", "condition", "wider spectrum: > 0", 0.05, math.inf, "'larger models: the spectrum widens'"),
    ("depth", "frobenius", "grows: > 0", 0.05, math.inf, "'the Hessian's norm grows with depth'"),
)


def judge(config: Sizes, made: dict[str, Any]) -> list[Finding]:
    found = []
    for axis, name, paper, low, high, why in CLAIMS:
        for task in TASKS:
            law = made[f"{task}, {axis}: {name}"]
            what = f"exponent of {name} in {axis}, {task} ({law['verdict']})"
            found.append(between(what, paper, law["exponent"], low, high, why, said=SAID))
    why = "what rests on power laws needs them: of all 30 fits at least half pass the tests of a law with a trend"
    share = sum(law["verdict"] == "a power law" for law in made.values()) / len(made)
    found.append(
        between("share of fits that are power laws", "all", share, 0.5, 1, why, main=False, said=FEW)
    )
    return found


SAID = "asserted in the article, not derived; measured here on trained nets of up to some tens of thousand weights"
FEW = (
    "over these sizes most measures have no trend beyond their scatter, or slopes that change: exponents are those of "
    "the range, not laws"
)


def figure(config: Sizes, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(len(AXES), len(MEASURED) - 1, width=2.9, height=2.0)
    for row, name in zip(axes, MEASURED[1:], strict=True):
        for axis, by in zip(row, AXES, strict=True):
            for task, colour in zip(TASKS, (draw.COLOURS["outer"], draw.COLOURS["functional"]), strict=True):
                law = made[f"{task}, {by}: {name}"]
                axis.plot(law["x"], law["y"], ".", color=colour, ms=4)
                if law["exponent"] is None:
                    axis.plot([], [], color=colour, label=f"{task}: of either sign")
                    continue
                sizes = sorted(set(law["x"]))
                value, error = law["exponent"]
                line = [law["prefactor"] * x**value for x in sizes]
                style = "-" if law["verdict"] == "a power law" else ":"
                axis.plot(sizes, line, style, color=colour, lw=1, label=f"{task}: {value:.2f} ± {error:.2f}")
            axis.set_xscale("log")
            axis.set_yscale(
                "symlog" if min(min(made[f"{task}, {by}: {name}"]["y"]) for task in TASKS) <= 0 else "log"
            )
            axis.margins(y=0.35)
            draw.titled(axis, name if by == AXES[0] else "", by if name == MEASURED[-1] else "", "")
            draw.legend(axis)
    return drawing


STUDY = Study(
    name="B-scale",
    title="Curvature against width, depth and data",
    source="The article on paper B, §7; paper B's implications for scaling laws",
    claim="More data makes the landscape smoother and better conditioned, as 1/√D; larger models have wider spectra, "
    "deeper ones larger Hessians: power laws in width, depth and data.",
    presets={
        "smoke": Sizes(widths=(4, 6, 8), depths=(1, 2, 3), data=(8, 16, 32), steps=2, measured=4, repeats=1),
        "cpu": Sizes(),
        "paper": Sizes(widths=(16, 32, 64, 128, 256), depths=(1, 2, 4, 8, 16), data=(128, 512, 2048, 8192, 32768),
                       steps=5000, measured=256, repeats=5),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Pre-norm GPTs with GELU, trained with Adam; curvature on sequences that none of them was trained on, the "
    "same for all. Text is that of the package's own grammar. Condition: λ₁/λ₁₀ of the Gauss-Newton matrix, since the "
    "full ratio of a singular matrix is no number. Each law is tested for a change of slope and for means that stray "
    "from the line; a dotted line failed, or shows no trend.",
)  # fmt: skip
