"""A-5: the curves of A-3a on linear axes, where the largest σ of a range rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import exponent
from curvlens.studies.growth_without_norm import LAWS, Growth, measure, units
from curvlens.studies.growth_without_norm import numbers as curves
from curvlens.studies.study import Finding, Study, between, mean95

PRACTICAL, WIDE = 1.0, 10.0
SCALES = (*(i / 10 for i in range(1, 11)), *(float(i) for i in range(2, 11)))


def numbers(config: Growth, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The curves, with the exponent over the upper half of each range: what the eye sees on linear axes."""
    made = curves(config, measured)
    for curve in made.values():
        if curve is not None:
            for end in (PRACTICAL, WIDE):
                fits = [exponent(config.scales, run, end / 2, end) for run in curve["runs"]]
                curve[f"up to {end:g}"] = mean95(fits)
    return made


def judge(config: Growth, made: dict[str, Any]) -> list[Finding]:
    why = "a curve and its dashed trend part by less than a fifth over half of the axis if exponents agree to 0.25"
    found = []
    for name, law in LAWS.items():
        for end in (PRACTICAL, WIDE):
            found.append(
                between(
                    f"exponent of {name}, σ from {end / 2:g} to {end:g}",
                    str(law),
                    made[name][f"up to {end:g}"],
                    law - 0.25,
                    law + 0.25,
                    why,
                    main=end == PRACTICAL,
                    said=BENT,
                )
            )
    return found


BENT = (
    "attention is no longer close to uniform there: its first moment turns from a mean of tokens towards one of them "
    "and grows faster than σ; further on, probabilities saturate and all growth slows"
)


def figure(config: Growth, made: dict[str, Any]) -> Any:
    drawing, axes = draw.panels(2, 2)
    for row, end in zip(axes, (PRACTICAL, WIDE), strict=True):
        for axis, block in zip(row, ("value", "query"), strict=True):
            chosen = [i for i, scale in enumerate(config.scales) if scale <= end]
            scales = [config.scales[i] for i in chosen]
            for part in ("total", "outer", "functional"):
                curve = made[f"{part} {block}"]
                if curve is None:
                    continue
                runs = [[run[i] for i in chosen] for run in curve["runs"]]
                draw.curve(axis, scales, runs, draw.LABELS[part], draw.COLOURS[part], wide=part == "total")
                law = LAWS.get(f"{part} {block}")
                if law is not None:
                    middle = chosen[len(chosen) // 2]
                    level, x0 = curve["norms"][middle], config.scales[middle]
                    top = [level * (x / x0) ** law for x in scales]
                    axis.plot(scales, top, "--", color="0.55", lw=0.9, label=f"$\\sigma^{law}$")
            axis.set_ylim(0, 1.15 * max(made[f"total {block}"]["norms"][i] for i in chosen))
            draw.titled(axis, f"{block} block", "σ", r"$\Vert\cdot\Vert_F$")
            draw.legend(axis)
    return drawing


STUDY = Study(
    name="A-5",
    title="Growth on linear axes",
    source="Paper A, Figure 5",
    claim="The growth of equation 5 describes the value and query blocks in the practical range σ < 1 and beyond it, "
    "up to σ = 10.",
    presets={
        "smoke": Growth(width=8, sequences=4, repeats=2, scales=(0.5, 0.7, 1.0, 5.0, 7.0, 10.0)),
        "cpu": Growth(repeats=3, scales=(*SCALES[1:10:2], *SCALES[10::2])),
        "paper": Growth(scales=SCALES),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="The measurement of A-3a at evenly spaced σ.",
)
