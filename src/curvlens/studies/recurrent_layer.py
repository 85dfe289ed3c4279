"""O-recurrent: a linear RNN and a selective state space, as in Mamba, in the frame of equation 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlens.exact.attention import SelfAttention
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import exponent, logarithmic
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95

Weights = dict[str, Tensor]
PARTS = ("outer", "functional")


@dataclass(frozen=True, kw_only=True)
class Recurrent(Config):
    width: int = 4
    length: int = 8
    repeats: int = 10
    scales: tuple[float, ...] = logarithmic(-3, 1, 17)
    small: float = 0.05  # the laws are fitted up to this σ


def linear_rnn(W: Weights, X: Tensor) -> Tensor:
    """`h_t = a ∘ h_{t−1} + W_inᵀ x_t`, `y_t = W_outᵀ h_t`, `a = sigmoid(decay)`."""
    h, rows = X.new_zeros(X.shape[1]), []
    for x in X:
        h = W["decay"].sigmoid() * h + x @ W["in"]
        rows.append(h @ W["out"])
    return torch.stack(rows)


def selective(W: Weights, X: Tensor) -> Tensor:
    """`S_t = exp(−Δ_t) S_{t−1} + Δ_t k_t v_tᵀ`, `y_t = S_tᵀ q_t`, with `Δ_t = softplus(x_t · w)`.

    Mamba's input-dependent step, and its `B`, `C` and input, by the names that they have in attention: key, query and
    value. With `Δ = 1` and no decay it is causal linear attention.
    """
    S, rows = X.new_zeros(X.shape[1], X.shape[1]), []
    for x in X:
        delta = F.softplus(x @ W["gate"])
        S = torch.exp(-delta) * S + delta * torch.outer(x @ W["key"], x @ W["value"])
        rows.append((x @ W["query"]) @ S)
    return torch.stack(rows)


def ungated(W: Weights, X: Tensor) -> Tensor:
    """Causal linear attention, as a recurrence."""
    S, rows = X.new_zeros(X.shape[1], X.shape[1]), []
    for x in X:
        S = S + torch.outer(x @ W["key"], x @ W["value"])
        rows.append((x @ W["query"]) @ S)
    return torch.stack(rows)


LAYERS: dict[str, tuple[Callable[[Weights, Tensor], Tensor], tuple[str, ...]]] = {
    "linear RNN": (linear_rnn, ("decay", "in", "out")),
    "linear attention": (ungated, ("query", "key", "value")),
    "selective state space": (selective, ("query", "key", "value", "gate")),
}
# Powers of σ at small σ; None: zero. A gate's derivative holds one token more than what it gates.
LAWS: dict[str, dict[str, tuple[int, int | None]]] = {
    "linear RNN": {"decay": (2, 1), "in": (2, None), "out": (2, None)},
    "linear attention": {"query": (6, None), "key": (6, None), "value": (6, None)},
    "selective state space": {"query": (6, None), "key": (6, None), "value": (6, None), "gate": (8, 5)},
}


def measure(config: Recurrent, unit: str) -> dict[str, Any]:
    """Norms of the diagonal blocks of both parts over σ, and linear attention against its closed form."""
    generator = torch.Generator().manual_seed(seed_of(config, unit))
    d = config.width

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (size * made).to(config.device)

    W = {name: drawn(d, d, size=d**-0.5) for name in ("query", "key", "value", "in", "out")}
    W |= {"decay": drawn(d), "gate": drawn(d)}
    X, Y = drawn(config.length, d), drawn(config.length, d)
    made: dict[str, Any] = {}
    for kind, (layer, names) in LAYERS.items():
        for scale in config.scales:
            H = parts(layer, {name: W[name] for name in names}, scale * X, Y)
            for part in PARTS:
                for name in names:
                    made.setdefault(f"{kind}: {part} {name}", []).append(H[part, name].norm().item())
    R = hessian(
        SelfAttention(W["query"], W["key"], W["value"], activation="linear", causal=True, scale=1.0), X, Y
    )
    H = parts(ungated, {name: W[name] for name in ("query", "key", "value")}, X, Y)
    made["closed form"] = max(
        (H["outer", name] - R.outer.block(name, name).dense()).norm().item() / H["outer", name].norm().item()
        for name in ("query", "key", "value")
    )
    return made


def parts(
    layer: Callable[[Weights, Tensor], Tensor], W: Weights, X: Tensor, Y: Tensor
) -> dict[tuple[str, str], Tensor]:
    """Diagonal blocks `c Jᵀ J` and `Σ_m g_m ∂²F_m` by automatic differentiation, for the mean squared error."""
    c = 2 / Y.numel()
    g = c * (layer(W, X) - Y).flatten()
    found = {}
    for name, weight in W.items():

        def outputs(flat: Tensor, name: str = name, weight: Tensor = weight) -> Tensor:
            return layer({**W, name: flat.view_as(weight)}, X).flatten()

        first = torch.func.jacrev(outputs)
        J = first(weight.flatten())
        second = torch.func.jacrev(first)(weight.flatten())
        found["outer", name] = c * J.mT @ J
        found["functional", name] = torch.einsum("m,mab->ab", g, second)
    return found


def numbers(config: Recurrent, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"closed form": max(run["closed form"] for run in runs)}
    for name in runs[0]:
        if name in made:
            continue
        curves = [run[name] for run in runs]
        made[name] = None
        if any(map(any, curves)):
            fits = [exponent(config.scales, curve, 0, config.small) for curve in curves]
            made[name] = {"runs": curves, "small": mean95(fits)}
    return made


def judge(config: Recurrent, made: dict[str, Any]) -> list[Finding]:
    why = "the next term is smaller by a factor of about σ, so that an exponent over σ ≤ 0.05 is off by less than 0.05"
    zero = "the output is linear in each of these weights alone; rounding of autodiff, over the outer block"
    found = []
    for kind, rules in LAWS.items():
        for name, powers in rules.items():
            for part, law in zip(PARTS, powers, strict=True):
                curve = made[f"{kind}: {part} {name}"]
                what = f"{part} {name}, {kind}"
                if law is None:
                    scale = max(map(max, made[f"{kind}: outer {name}"]["runs"]))
                    largest = 0.0 if curve is None else max(map(max, curve["runs"]))
                    found.append(between(f"largest norm of {what}", "0", largest / scale, 0, 1e-12, zero))
                else:
                    found.append(
                        between(
                            f"exponent of {what}",
                            f"predicted {law}",
                            curve["small"],
                            law - 0.05,
                            law + 0.05,
                            why,
                        )
                    )
    same = "the recurrence without gate is causal linear attention: two ways to one matrix in float64"
    what = "linear attention as a recurrence, less its closed form"
    return [*found, between(what, "0", made["closed form"], 0, 1e-12, same)]


def figure(config: Recurrent, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(len(LAYERS), width=3.0)
    for axis, (kind, rules) in zip(axes.flat, LAWS.items(), strict=True):
        for i, (name, powers) in enumerate(rules.items()):
            for part, law, style in zip(PARTS, powers, ("-", ":"), strict=True):
                curve = made[f"{kind}: {part} {name}"]
                if law is None or curve is None:
                    continue
                means = [sum(v) / len(v) for v in zip(*curve["runs"], strict=True)]
                label = f"{draw.LABELS[part]} {name}: $\\sigma^{law}$"
                axis.plot(config.scales, means, style, color=f"C{i}", lw=1.3, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.titled(axis, kind, "σ", r"$\Vert\cdot\Vert_F$" if kind == "linear RNN" else "")
        draw.legend(axis)
    return drawing


STUDY = Study(
    name="O-recurrent",
    title="A linear RNN and a selective state space in the same frame",
    source="An open question after paper A, §4.1",
    claim="A linear RNN is as an MLP, σ² in all blocks; a selective state space is as linear attention, σ⁶ with a "
    "block-hollow functional part, but for the gate: it grows as σ⁸ and brings a functional block, σ⁵, back.",
    presets={
        "smoke": Recurrent(width=2, length=4, repeats=3, scales=(1e-3, 1e-2, 1.0)),
        "cpu": Recurrent(),
        "paper": Recurrent(width=8, length=16, repeats=20),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="No paper has these powers: they were derived first, by counting tokens in each derivative, and measured "
    "after. Autodiff in float64; the recurrence without its gate agrees with the closed form of linear attention. The "
    "gate is what makes the blocks of a state space unlike, as softmax does in attention.",
)
