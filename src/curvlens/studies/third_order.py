"""O-third: how the third derivatives of attention's loss grow with the scale of the tokens, as equation 5 goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations
from typing import Any

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.result import hessian
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import exponent, logarithmic
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Config, Finding, Study, between, mean95

NAMES = ("query", "key", "value")
TRIPLES = tuple(combinations_with_replacement(NAMES, 3))
STEP = 1e-4  # of the finite difference that confirms


@dataclass(frozen=True, kw_only=True)
class Third(Config):
    width: int = 4
    length: int = 6
    repeats: int = 10
    scales: tuple[float, ...] = logarithmic(-3, 1, 17)
    small: float = 0.05  # the laws are fitted up to this σ


def laws(triple: tuple[str, ...]) -> dict[str, int | None]:
    """The powers of σ that rule at small σ; None for zero.

    A score is of order σ², and so is its derivative by a query weight, by a key weight, or by one of each. Every group
    of derivatives that falls on one score raises the order of the attention's cumulant by one: with `m` groups at the
    least a derivative of the output goes as `σ^(1 + 2m)`, by value or not. In `Σ J ⊗ ∂²F` two such orders add up.
    """

    def output(names: tuple[str, ...]) -> int | None:
        if names.count("value") > 1:
            return None
        return 1 + 2 * max(names.count("query"), names.count("key"))

    sums = []
    for first, *rest in permutations(triple):
        pair = output(tuple(rest))
        alone = output((first,))
        if pair is not None and alone is not None:
            sums.append(alone + pair)
    return {"functional": output(triple), "mixed": min(sums) if sums else None}


def measure(config: Third, unit: str) -> dict[str, Any]:
    """Norms of every block of both parts over σ; and two ways to confirm them at σ = 1."""
    generator = torch.Generator().manual_seed(seed_of(config, unit))
    d, L = config.width, config.length

    def drawn(rows: int, columns: int, size: float) -> Tensor:
        made = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return (size * made).to(config.device)

    W = {name: drawn(d, d, d**-0.5) for name in NAMES}
    X, Y, v = drawn(L, d, 1.0), drawn(L, d, 1.0), drawn(3, d * d, 1.0)
    made: dict[str, Any] = {}
    for scale in config.scales:
        for part, tensor in third(W, scale * X, Y).items():
            for triple in TRIPLES:
                made.setdefault(f"{part} {','.join(triple)}", []).append(
                    block(tensor, triple, d).norm().item()
                )
    J, parts = derivatives(W, X), third(W, X, Y)
    made["cumulants"] = distance(J[2][:, : d * d, : d * d, : d * d], by_cumulants(W, X))
    made["finite difference"] = distance(
        along(W, X, Y, v), (parts["functional"] + parts["mixed"]) @ v.flatten()
    )
    return made


def forward(W: dict[str, Tensor], X: Tensor) -> Tensor:
    scores = X @ W["query"] @ W["key"].mT @ X.mT * W["query"].shape[1] ** -0.5
    return scores.softmax(-1) @ X @ W["value"]


def derivatives(W: dict[str, Tensor], X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`∂F`, `∂²F`, `∂³F`, `[outputs, P, …]`, by automatic differentiation."""
    d = W["query"].shape[0]

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.view(3, d, d)
        return forward(dict(zip(NAMES, parts, strict=True)), X).flatten()

    at = torch.cat([W[name].flatten() for name in NAMES])
    first = torch.func.jacrev(outputs)
    second = torch.func.jacfwd(first)  # forward over reverse: the fastest by far
    return first(at), second(at), torch.func.jacfwd(second)(at)


def third(W: dict[str, Tensor], X: Tensor, Y: Tensor) -> dict[str, Tensor]:
    """`∂³ℓ = Σ_m g_m ∂³F_m + c Σ (J ⊗ ∂²F, in three orders)` for the mean squared error, whose own third is zero."""
    J, second, F3 = derivatives(W, X)
    c = 2 / Y.numel()
    g = c * (forward(W, X) - Y).flatten()
    mixed = c * torch.einsum("ma,mbc->abc", J, second)
    mixed = mixed + mixed.permute(1, 0, 2) + mixed.permute(1, 2, 0)
    return {"functional": torch.einsum("m,mabc->abc", g, F3), "mixed": mixed}


def block(tensor: Tensor, triple: tuple[str, ...], d: int) -> Tensor:
    spans = [slice(NAMES.index(name) * d * d, (NAMES.index(name) + 1) * d * d) for name in triple]
    return tensor[tuple(spans)]


def by_cumulants(W: dict[str, Tensor], X: Tensor) -> Tensor:
    """`∂³F_i/∂W_Q³ = s³ X_i ⊗ X_i ⊗ X_i` times the fourth cumulant of keys and values: the moment less three pairs."""
    d = X.shape[1]
    s = d**-0.5
    A = (X @ W["query"] @ W["key"].mT @ X.mT * s).softmax(-1)
    centred = X[None] - (A @ X)[:, None]  # [i, j, d]
    u, w = s * centred @ W["key"], centred @ W["value"]
    moment = torch.einsum("ij,ijo,ija,ijb,ijc->ioabc", A, w, u, u, u)
    ou, uu = torch.einsum("ij,ijo,ija->ioa", A, w, u), torch.einsum("ij,ija,ijb->iab", A, u, u)
    for pairs in ("ioa,ibc->ioabc", "iob,iac->ioabc", "ioc,iab->ioabc"):
        moment = moment - torch.einsum(pairs, ou, uu)
    whole = torch.einsum("ioabc,ix,iy,iz->ioxaybzc", moment, X, X, X)
    return whole.reshape(len(X) * d, d * d, d * d, d * d)


def along(W: dict[str, Tensor], X: Tensor, Y: Tensor, v: Tensor) -> Tensor:
    """The change of the closed form of the Hessian along `v`, by central differences."""

    def at(step: float) -> Tensor:
        moved = [W[name] + step * part.view_as(W[name]) for name, part in zip(NAMES, v, strict=True)]
        return hessian(SelfAttention(*moved), X, Y).total.dense()

    return (at(STEP) - at(-STEP)) / (2 * STEP)


def distance(x: Tensor, true: Tensor) -> float:
    return ((x - true).norm() / true.norm()).item()


def numbers(config: Third, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {key: max(run[key] for run in runs) for key in ("cumulants", "finite difference")}
    for name in runs[0]:
        if name in made:
            continue
        curves = [run[name] for run in runs]
        made[name] = None
        if any(map(any, curves)):
            fits = [exponent(config.scales, curve, 0, config.small) for curve in curves]
            made[name] = {"runs": curves, "small": mean95(fits)}
    return made


def judge(config: Third, made: dict[str, Any]) -> list[Finding]:
    found = []
    why = "the next term is smaller by a factor of about σ, so that an exponent over σ ≤ 0.05 is off by less than 0.05"
    zero = "the output is linear in the value"
    for triple in TRIPLES:
        for part, law in laws(triple).items():
            curve = made[f"{part} {','.join(triple)}"]
            what = f"{part}, {' '.join(triple)}"
            if law is None:
                largest = 0.0 if curve is None else max(map(max, curve["runs"]))
                found.append(between(f"largest norm, {what}", "0", largest, 0, 0, zero))
            else:
                found.append(
                    between(
                        f"exponent, {what}", f"predicted {law}", curve["small"], law - 0.05, law + 0.05, why
                    )
                )
    same = "two ways to the same tensor in float64"
    what = "query block thrice by the fourth cumulant, less autodiff"
    found.append(between(what, "0", made["cumulants"], 0, 1e-12, same))
    difference = "a central difference of the closed form's Hessian: its own error is of the order of 1e-8"
    found.append(
        between(
            "autodiff less difference of the Hessian", "0", made["finite difference"], 0, 1e-6, difference
        )
    )
    return found


def figure(config: Third, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(5, 2, width=2.3, height=2.3)
    colours = {"functional": draw.COLOURS["functional"], "mixed": draw.COLOURS["outer"]}
    labels = {"functional": "g · ∂³F", "mixed": "B J ∂²F"}
    for axis, triple in zip(axes.flat, TRIPLES, strict=True):
        for part, law in laws(triple).items():
            curve = made[f"{part} {','.join(triple)}"]
            if law is None or curve is None:
                continue
            draw.curve(axis, config.scales, curve["runs"], f"{labels[part]}: $\\sigma^{law}$", colours[part])
            level = sum(run[0] for run in curve["runs"]) / len(curve["runs"])
            draw.trend(axis, config.scales, (config.scales[0], level), law)
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.titled(axis, ", ".join(triple), "σ" if triple in TRIPLES[5:] else "", "")
        if axis.lines:
            draw.legend(axis)
        else:
            axis.text(0.5, 0.5, "zero", transform=axis.transAxes, ha="center", fontsize=9, color="0.4")
            axis.set_axis_off()
    return drawing


STUDY = Study(
    name="O-third",
    title="Third-order growth: equation 5 goes on",
    source="An open question after paper A, equation 5",
    claim="Each further derivative by a query or a key raises the order of attention's cumulant by one: the third "
    "derivatives of the loss grow up to σ⁷ from the output's own and σ⁸ from its products, and as little as σ³ "
    "between query, key and value.",
    presets={
        "smoke": Third(width=2, length=4, repeats=3, scales=(1e-3, 1e-2, 1.0)),
        "cpu": Third(),
        "paper": Third(width=6, length=12, repeats=20),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="No paper has these powers: they were derived first, by counting the scores that derivatives fall on (see "
    "`third_order.laws`), and measured after. Autodiff in float64, confirmed by the fourth cumulant in closed "
    "form and "
    "by differences of the closed form of the Hessian. One layer, mean squared error with fixed targets.",
)
