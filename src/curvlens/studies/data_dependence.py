"""A-table1: what the Hessian of a linear MLP and of linear attention takes from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from curvlens.exact.attention import SelfAttention
from curvlens.exact.mlp import LinearMLP
from curvlens.exact.result import Result, hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import exponent, logarithmic
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, mean95, near

LAWS = {  # powers of the covariance Σ_XX and of the residual in Table 1, as powers of σ and of the residual's size
    "MLP outer": (2, 0),
    "MLP functional": (1, 1),
    "attention outer": (6, 0),
    "attention functional": (3, 1),
}
NAMES = {
    "MLP outer": "O(Σ)",
    "MLP functional": "O(Ω)",
    "attention outer": "O(Σ³)",
    "attention functional": "O(Ω Σ)",
}


@dataclass(frozen=True, kw_only=True)
class Dependence(Config):
    width: int = 16
    length: int = 18
    repeats: int = 10
    scales: tuple[float, ...] = logarithmic(-2, 1, 13)


def measure(config: Dependence, unit: str) -> dict[str, Any]:
    """Norms of every block while the tokens are scaled and the residual is held, and the other way round."""
    generator = torch.Generator().manual_seed(seed_of(config, unit))
    d = config.width

    def draw_matrix(rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    weights = [draw_matrix(d, d, d**-0.5) for _ in range(3)]
    X, residual = draw_matrix(config.length, d), draw_matrix(config.length, d)
    layers: dict[str, Any] = {
        "MLP": LinearMLP(weights[:2]),
        "attention": SelfAttention(*weights, activation="linear"),
    }
    norms: dict[str, list[float]] = {}

    def note(kind: str, dial: str, R: Result) -> None:
        names = R.blocks.names
        for part in ("outer", "functional"):
            for i, row in enumerate(names):
                for column in names[i:]:
                    value = float(getattr(R, part).block(row, column).frobenius())
                    norms.setdefault(f"{dial}: {kind} {part}: {row},{column}", []).append(value)

    c = 2 / (config.length * d)
    for scale in config.scales:
        for kind, layer in layers.items():
            note(kind, "tokens", hessian(layer, scale * X, g=c * residual, B=c))
            note(kind, "residual", hessian(layer, X, g=scale * c * residual, B=c))
    return norms


def numbers(config: Dependence, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Exponents in either dial, of all blocks that are not zero; the names of the blocks that are."""
    made: dict[str, Any] = {"zero": []}
    runs: dict[str, list[float]] = {}
    for name in next(iter(measured.values())):
        curves = [norms[name] for norms in measured.values()]
        if not any(map(any, curves)):
            if name.startswith("tokens"):
                made["zero"].append(name.removeprefix("tokens: "))
            continue
        law = ": ".join(name.split(": ")[:2])
        runs.setdefault(law, []).extend(exponent(config.scales, curve, 0, 1e9) for curve in curves)
        made[name] = curves[0]
    for law, exponents in runs.items():
        made[law] = [*mean95(exponents), min(exponents), max(exponents)]
    return made


def judge(config: Dependence, made: dict[str, Any]) -> list[Finding]:
    exact = "each block is homogeneous in the tokens and in the residual: rounding alone is left"
    found = []
    for name, (tokens, residual) in LAWS.items():
        for dial, power in (("tokens", tokens), ("residual", residual)):
            _, _, low, high = made[f"{dial}: {name}"]
            for end, value in (("smallest", low), ("largest", high)):
                what = f"{name} {NAMES[name]}: {end} exponent of a block in the {dial}"
                found.append(near(what, power, value, 1e-9, exact))
    hollow = [f"{kind} functional: {a},{a}" for kind, names in BLOCKS.items() for a in names]
    zero = sum(name in made["zero"] for name in hollow)
    why = "the functional Hessian of both is block-hollow"
    return [*found, near("functional diagonal blocks that are zero", len(hollow), zero, 0, why)]


BLOCKS = {"MLP": ("W1", "W2"), "attention": ("query", "key", "value")}


def figure(config: Dependence, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(4, width=2.4)
    for axis, name in zip(axes.flat, LAWS, strict=True):
        for key, curve in made.items():
            if key.startswith(f"tokens: {name}: "):
                axis.plot(config.scales, curve, ".-", lw=1, ms=3, label=key.rpartition(": ")[2])
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.titled(axis, f"{name}, {NAMES[name]}", "scale of the tokens", "")
        draw.legend(axis)
    axes[0, 0].set_ylabel(r"$\Vert\cdot\Vert_F$", fontsize=8)
    return drawing


STUDY = Study(
    name="A-table1",
    title="Data in the Hessian: linear MLP against linear attention",
    source="Paper A, Table 1 and Remark 4.1",
    claim="A linear MLP's H_o is O(Σ_XX) and its H_f O(Ω_XY); linear attention's are O(Σ_XX³) and O(Ω_XY Σ_XX), with "
    "Σ_XX the covariance of the tokens and Ω_XY their covariance with the residual.",
    presets={
        "smoke": Dependence(width=4, length=5, repeats=2, scales=(0.1, 1.0, 10.0)),
        "cpu": Dependence(),
        "paper": Dependence(width=64, repeats=20),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact, with the residual held while the tokens are scaled and the other way round: Σ_XX goes as σ², Ω_XY "
    "as σ times the residual. The residual's own growth is left out, as in the table.",
)
