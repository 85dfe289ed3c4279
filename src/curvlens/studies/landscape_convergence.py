"""B-converge: the loss landscape settles as samples are added, beside the bound and beside losses without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvlens.studies import plot as draw
from curvlens.studies.growth_without_norm import units
from curvlens.studies.landscape_of_digits import Landscapes, landscape, middle, shared, thinned
from curvlens.studies.study import Finding, Study, between, mean95, near


def measure(config: Landscapes, unit: str) -> dict[str, Any]:
    """Differences at θ and at a distance, the bound at both with the largest curvature of all samples, and the null."""
    made = landscape(config, unit)
    here = made.changes.abs() / made.bound()
    there = made.delta1.sampled / made.bound(made.distance)
    return {
        **shared(made),
        "away": thinned(made.delta1.sampled),
        "bound": thinned(made.bound()),
        "bound away": thinned(made.bound(made.distance)),
        "null": thinned(made.null.mean),
        "slope": made.slope,
        "null slope": made.null.slope,
        "null slopes": list(made.null.slopes),
        "largest share": max(here.max().item(), there.max().item()),
        "share": middle(here),
        "share away": middle(there),
        "curvature of the spread": made.terms.share(made.sigma),
        "curvature matters": made.terms.matters,
        "curvature": made.constants.curvature,
        "loss": made.means[-1].item(),
        "distance": made.distance,
    }


def numbers(config: Landscapes, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"runs": runs}
    for name in ("slope", "share", "share away", "curvature of the spread"):
        made[name] = mean95([run[name] for run in runs])
    made["slope less null"] = mean95([run["slope"] - run["null slope"] for run in runs])
    made["null half"] = max((run["null slopes"][1] - run["null slopes"][0]) / 2 for run in runs)
    made["largest share"] = max(run["largest share"] for run in runs)
    made["matters"] = mean95([math.log10(run["curvature matters"]) for run in runs])
    return made


def judge(config: Landscapes, made: dict[str, Any]) -> list[Finding]:
    scatter = (
        "the slope of one run of independent losses strays by this (95 %): nearer to −1 nothing can be told"
    )
    theorem = "a theorem, with the largest curvature, gradient and loss of all samples"
    useful = "a bound that says the size of what it bounds is met to within a factor of ten"
    rules = (
        "'the Hessian governs how fast': at least half of the spread of the samples' losses is curvature's"
    )
    return [
        near("slope of |L_{k+1} − L_k|", -1.0, made["slope"], made["null half"], scatter),
        near(
            "the same less that of losses without a model",
            0.0,
            made["slope less null"],
            made["null half"],
            scatter,
        ),
        between("largest difference over its bound", "≤ 1", made["largest share"], 0, 1, theorem),
        between(
            "median of differences over the bound, at θ",
            "–",
            made["share"],
            0.1,
            1,
            useful,
            main=False,
            said=LOOSE,
        ),
        between(
            "median of differences over the bound, away",
            "–",
            made["share away"],
            0.1,
            1,
            useful,
            main=False,
            said=LOOSE,
        ),
        between(
            f"curvature's part of the spread, σ = {config.sigma:g}",
            "–",
            made["curvature of the spread"],
            0.5,
            1,
            rules,
            main=False,
            said=NULL,
        ),
    ]


LOOSE = "the bound holds with the worst sample's loss and curvature, and most samples are far from the worst"
NULL = (
    "the differences near the minimum are those of the samples' losses themselves, which need no Hessian: losses "
    "drawn without a model fall alike. Curvature would make half of the spread at a σ some tens of times as large"
)


def figure(config: Landscapes, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, width=3.4)
    for axis, (ours, bound), title in zip(
        axes.flat,
        (("differences", "bound"), ("away", "bound away")),
        ("at θ", f"at distance {made['runs'][0]['distance']:.2g}"),
        strict=True,
    ):
        k = made["runs"][0]["k"]
        draw.curve(axis, k, [run[ours] for run in made["runs"]], r"$|L_{k+1}-L_k|$", draw.COLOURS["total"])
        draw.curve(axis, k, [run[bound] for run in made["runs"]], "bound", draw.COLOURS["outer"])
        draw.curve(axis, k, [run["null"] for run in made["runs"]], "losses without a model", "#27ae60")
        first = sum(run[bound][0] for run in made["runs"]) / len(made["runs"])
        draw.trend(axis, k, (k[0], first * 3), -1, "$1/k$")
        axis.set_xscale("log")
        axis.set_yscale("log")
        draw.titled(axis, title, "samples k", "")
    draw.legend(axes[0, 0])
    return drawing


STUDY = Study(
    name="B-converge",
    title="The loss landscape settles as samples are added",
    source="Paper B, Theorem 7 and its experiment",
    claim="|L_{k+1} − L_k| falls as 1/k, within a bound that the Hessian's norm sets.",
    presets={
        "smoke": Landscapes(width=4, steps=5, samples=16, repeats=2, draws=4, dims=2),
        "cpu": Landscapes(samples=256, repeats=20, draws=8, dims=4),
        "paper": Landscapes(width=32, depth=2, steps=2000, samples=1000, repeats=10, draws=64),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="A ViT on scikit-learn's 8 × 8 digits in place of MNIST, measured on digits it was not trained on. "
    "`L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k + 1)` is an identity: independent losses whatever fall as 1/k, so the slope "
    "is shown beside that of Gaussian losses of the same mean and spread and no model. The bound holds around any "
    "point, with the samples' gradients in it; away: `σ√P` from θ, in random directions.",
)
