"""How curvature passes through the sublayers, and what norms do to it."""

from __future__ import annotations

from curvlens.report.data import Finding, Report
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import Amount, amount, certainty, times


def sharpening_norms(report: Report) -> Finding | None:
    norms = report.norms
    found = [] if norms is None else [i for i, gain in enumerate(norms.gain) if gain > t.SHARPENING_NORM]
    if norms is None or not found:
        return None
    worst = max(found, key=norms.gain.__getitem__)
    return Finding(
        "sharpening-norm",
        "warning",
        f"{norms.names[worst]} divides by a small deviation and sharpens its block",
        f"What enters {norms.names[worst]} has a deviation of {number(norms.deviation[worst])}; scaled up it "
        "multiplies "
        f"gradients by {number(norms.gain[worst])} and curvature by the square of that.",
        [
            f"{norms.names[i]}: σ = {number(norms.deviation[i])}, γ/σ = {number(norms.gain[i])}"
            for i in found[:6]
        ],
        "Exact on the data given: the root mean square over all tokens.",
        "Enlarge what enters (initial scale of embeddings, or of the branch before), lower the norm's weight, "
        "or raise "
        "its ε; a lower learning rate for this block is the plaster.",
        "Closing the Curvature Gap 2025, Theorems 2 and 3",
        [norms.names[i] for i in found],
    )


def epsilon_bound(report: Report) -> Finding | None:
    norms = report.norms
    found = [] if norms is None else [i for i, share in enumerate(norms.epsilon) if share > t.EPSILON]
    if norms is None or not found:
        return None
    worst = max(found, key=norms.epsilon.__getitem__)
    return Finding(
        "epsilon-bound-norm",
        "notice",
        f"In {norms.names[worst]} ε is no longer small beside the variance",
        f"ε makes up {100 * norms.epsilon[worst]:.0f} % of what the norm divides by: it does not normalise, but "
        "scales.",
        [f"{norms.names[i]}: ε is {number(norms.epsilon[i], 2)} of var + ε" for i in found[:6]],
        "Exact on the data given: the mean over all tokens.",
        "If that is not meant, enlarge what enters the norm; dead embeddings or padding tokens are a usual cause.",
        "Closing the Curvature Gap 2025, Theorem 2, with ε",
        [norms.names[i] for i in found],
    )


def created_curvature(report: Report) -> Finding | None:
    """Sublayers whose own nonlinearity adds more than they pass down."""
    found = []
    for step in report.depth:
        if "frobenius" in step.created and "frobenius" in step.passed:
            ratio = amount(step.created["frobenius"]) / amount(step.passed["frobenius"])
            if ratio.above(t.CREATED):
                found.append((step, ratio))
    if not found:
        return None
    step, ratio = max(found, key=lambda pair: pair[1].value)
    return Finding(
        "created-curvature",
        "notice",
        f"{step.name} creates more curvature than it passes down",
        f"{len(found)} of {len(report.depth)} sublayers add more by their own second derivatives than reaches "
        "them from "
        f"above; {step.name} {times(ratio.value)} times as much.",
        [f"{s.name}: created over passed, in norm, {r}" for s, r in found[:6]],
        certainty(*(r for _, r in found)),
        "Look at this sublayer for what makes the loss hard: the softmax of an attention, or a norm with a small "
        "variance; the terms above it are not the cause.",
        "Closing the Curvature Gap 2025, Theorem 5 (curvature propagation)",
        [s.name for s, _ in found],
    )


def amplified_curvature(report: Report) -> Finding | None:
    """The curvature by the stream at a sublayer's start, over that at its end."""
    found: list[tuple[str, Amount]] = []
    for lower, upper in zip(report.depth, report.depth[1:], strict=False):
        if "frobenius" in lower.total and "frobenius" in upper.total:
            below, above = amount(lower.total["frobenius"]), amount(upper.total["frobenius"])
            if above.value > 0 and (below / above).above(t.AMPLIFIED):
                found.append((lower.name, below / above))
    if not found:
        return None
    name, ratio = max(found, key=lambda pair: pair[1].value)
    return Finding(
        "amplified-curvature",
        "warning",
        f"{name} amplifies the curvature that passes through it",
        f"The loss's curvature by the stream is {times(ratio.value)} times as large before {name} as behind it. "
        "Everything below, embeddings included, becomes as much sharper.",
        [f"{n}: {r}" for n, r in found[:6]],
        certainty(*(r for _, r in found)),
        "Scale the sublayer's output down at initialisation, normalise its input, or use pre-norm, in which "
        "the stream "
        "passes by the sublayer.",
        "Closing the Curvature Gap 2025, Theorems 5 and 6; Xiong et al. 2020",
        [n for n, _ in found],
    )


RULES = (amplified_curvature, sharpening_norms, created_curvature, epsilon_bound)
