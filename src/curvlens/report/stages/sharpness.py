"""Sharpness, raw and as the optimizer sees it, beside the threshold of stability."""

from __future__ import annotations

import math

from curvlens.estimate import sharpness
from curvlens.estimate.sharpness import Sharpness as Found
from curvlens.report.data import Number, Sharpness
from curvlens.report.stages.context import Context, Outcome, Skip, state_of


def measure(at: Context) -> Outcome:
    """The raw one is the largest eigenvalue, found before; with an optimizer, `λ_max(P^{-1/2} H P^{-1/2})` too."""
    rows = []
    top = at.found.get("numbers", {}).get("lambda_max")
    if top is not None:
        stable = 2 / top.value if top.value > 0 else math.inf
        rows.append(Sharpness("raw, as gradient descent sees it", top, math.nan, "2 / η", math.nan, stable))
    if at.optimizer is None:
        if not rows:
            raise Skip("no largest eigenvalue, and no optimizer was given")
        return Outcome({"sharpness": rows}, "exact" if top is not None and top.exact else "estimated")
    from curvlens.curvature import hessian

    H = hessian(at.land)  # with its landscape, which knows the optimizer's parameters
    found = sharpness(H, at.optimizer, tol=at.preset.tol, seed=at.seed, **at.budget("sharpness"))
    rows.append(_row(at, found))
    return Outcome({"sharpness": rows}, *state_of(found.pairs.stopped, found.converged), found.products)


def _row(at: Context, found: Found) -> Sharpness:
    assert at.optimizer is not None
    rate = max(float(group["lr"]) for group in at.optimizer.param_groups)
    threshold = math.nan if found.threshold is None else found.threshold
    label = f"as {type(at.optimizer).__name__} sees it"
    value = Number(label, found.value, found.stderr, False, found.converged, 1, found.products)
    largest = rate * threshold / found.value if found.value > 0 else math.inf
    return Sharpness(label, value, threshold, found.rule, rate, largest)
