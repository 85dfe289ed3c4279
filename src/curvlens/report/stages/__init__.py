"""The stages of an analysis, in their order: what later ones need comes first, then what people ask for first."""

from __future__ import annotations

from typing import NamedTuple

from curvlens.report.stages import (
    bounds,
    depth,
    eigenvalues,
    heads,
    noise,
    norms,
    parts,
    point,
    sharpness,
    spectrum,
)
from curvlens.report.stages.context import Context, Interrupted, Measure, Outcome, Skip


class Plan(NamedTuple):
    name: str
    title: str
    measure: Measure


STAGES = (
    Plan("point", "loss and gradient", point.measure),
    Plan("heads", "attention heads", heads.measure),
    Plan("traces", "traces and norms", parts.traces),
    Plan("eigenvalues", "eigenvalues", eigenvalues.measure),
    Plan("norms", "map of all pairs", parts.norms),
    Plan("depth", "curvature by depth", depth.measure),
    Plan("gains", "gains of the norms", norms.measure),
    Plan("sharpness", "sharpness", sharpness.measure),
    Plan("noise", "noise of the data", noise.measure),
    Plan("spectrum", "spectral density", spectrum.whole),
    Plan("spectra", "spectra of the groups", spectrum.by_group),
    Plan("bounds", "bounds beside truth", bounds.measure),
)

__all__ = ["STAGES", "Context", "Interrupted", "Outcome", "Plan", "Skip"]
