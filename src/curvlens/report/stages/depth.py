"""Curvature by depth: what each sublayer passes down of the curvature above it, and what it creates."""

from __future__ import annotations

from curvlens.estimate.result import Estimate
from curvlens.exact.stream import ExtentEstimate, find_steps, stream_propagation
from curvlens.report.data import Depth, Number
from curvlens.report.stages.context import Context, Outcome, Skip


def measure(at: Context) -> Outcome:
    try:
        find_steps(at.land.model)
    except ValueError as error:
        raise Skip(str(error)) from error
    found = stream_propagation(
        at.land, samples=at.preset.depth, eigenvalues=at.preset.depth_eigenvalues, seed=at.seed
    )
    rows = [
        Depth(step.name, _numbers(step.passed), _numbers(step.created), _numbers(step.total))
        for step in found.sublayers
    ]
    return Outcome({"depth": rows}, "estimated", "", 2 * at.preset.depth * len(rows))


def _numbers(extent: ExtentEstimate) -> dict[str, Number]:
    parts = {
        "trace": extent.trace,
        "frobenius": extent.frobenius,
        "smallest": extent.smallest,
        "largest": extent.largest,
    }
    return {name: _number(name, part) for name, part in parts.items() if part is not None}


def _number(label: str, found: Estimate) -> Number:
    # an operator that is zero has no error: the sublayer creates nothing
    exact = found.value == 0 and found.stderr == 0
    return Number(label, found.value, found.stderr, exact, found.converged, found.samples, found.products)
