"""A-4: histograms of the entries of the value and the query block, with softmax and without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvlens.studies import plot as draw
from curvlens.studies.entries import BINS, HIGHEST, LOWEST, Entries, described, diagonal_block, summary
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.study import Finding, Study, between, mean95, ratio

REFERENCE = {  # median, largest, Frobenius
    "value softmax": (1.60e-5, 2.32e-3, 2.67e-2),
    "query softmax": (5.13e-7, 9.00e-6, 2.60e-4),
    "value linear": (1.52e-5, 1.50e-3, 2.14e-2),
    "query linear": (2.67e-5, 1.91e-3, 2.65e-2),
}
KEYS = ("median", "largest", "norm")


def measure(config: Entries, unit: str) -> dict[str, Any]:
    seed = seed_of(config, unit)
    made = {}
    for name in REFERENCE:
        block, attention = name.split()
        made[name] = described(diagonal_block(config, seed, attention, block))
    return made


def numbers(config: Entries, measured: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: summary(measured, name) for name in REFERENCE}
    for attention in ("softmax", "linear"):
        for key in KEYS:
            made[f"value over query, {key}, {attention}"] = mean95(
                [
                    unit[f"value {attention}"][key] / unit[f"query {attention}"][key]
                    for unit in measured.values()
                ]
            )
    for name in REFERENCE:
        made[name]["runs"] = {key: [unit[name][key] for unit in measured.values()] for key in KEYS}
    return made


ONE_DRAW = (
    "the reference is one draw of weights and data, whose scatter over our repeats is a factor of up to two"
)


def judge(config: Entries, made: dict[str, Any]) -> list[Finding]:
    found = []
    if (config.width, config.sequences) == (16, 64):
        for name, values in REFERENCE.items():
            for key, value in zip(KEYS, values, strict=True):
                what = f"{key} of {name}"
                found.append(ratio(what, value, made[name][key], 2.0, ONE_DRAW, main=False))
    for key, paper in (("median", "31"), ("norm", "103")):
        low = "'two orders of magnitude': a factor between 10 and 1000"
        ours = made[f"value over query, {key}, softmax"]
        found.append(between(f"value over query, {key}, softmax", paper, ours, 10, 1000, low))
    for key, paper in (("median", "0.57"), ("norm", "0.81")):
        alike = "'largely similar': within half an order of magnitude"
        ours = made[f"value over query, {key}, linear"]
        found.append(between(f"value over query, {key}, linear", paper, ours, 10**-0.5, 10**0.5, alike))
    psd = "without softmax the diagonal blocks are positive semidefinite (§4.1), up to rounding of the largest entry"
    lowest = made["query linear"]["smallest eigenvalue"][0] / made["query linear"]["norm"][0]
    found.append(
        between("smallest eigenvalue over norm, query linear", "not negative", lowest, -1e-12, 1, psd)
    )
    lowest = made["query softmax"]["smallest eigenvalue"][0] / made["query softmax"]["norm"][0]
    clear = "with softmax they are indefinite: a negative eigenvalue of a hundredth of the norm or more"
    found.append(
        between("smallest eigenvalue over norm, query softmax", "negative", lowest, -1, -0.01, clear)
    )
    return found


def figure(config: Entries, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.6)
    width = (HIGHEST - LOWEST) / BINS
    edges = [LOWEST + i * width for i in range(BINS)]
    for axis, block, colour in zip(axes.flat, ("value", "query"), ("#2471a3", "#c0392b"), strict=True):
        for attention, alpha in (("softmax", 0.85), ("linear", 0.3)):
            counts = made[f"{block} {attention}"]["counts"]
            axis.bar(edges, counts, width, align="edge", color=colour, alpha=alpha, label=attention)
        axis.set_xlim(-11, -1.5)
        draw.titled(
            axis, f"{block} block", "log10 |entry|", "entries, all repeats" if block == "value" else ""
        )
        draw.legend(axis, loc="upper left")
    return drawing


STUDY = Study(
    name="A-4",
    title="Softmax makes the sizes of entries heterogeneous",
    source="Paper A, Figure 4 and §4.1",
    claim="With softmax the entries of the query block are two orders of magnitude smaller than those of the value "
    "block; without softmax the two are largely similar, and the diagonal blocks lose their negative eigenvalues.",
    presets={
        "smoke": Entries(width=8, sequences=8, repeats=4),
        "cpu": Entries(),
        "paper": Entries(),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="Exact, dense. 'Two orders of magnitude' is a factor of 31 in the median and 103 in the norm. Linear "
    "attention keeps the causal mask, as in the authors' code.",
)
