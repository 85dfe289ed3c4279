"""What the eigenvalues say: conditioning, negative curvature, the Gauss-Newton part, where the gradient lies."""

from __future__ import annotations

from curvlens.report.data import Finding, Report
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import Amount, amount, certainty, mean_of_logs, of, times


def ill_conditioned(report: Report) -> Finding | None:
    """`λ_max` over the mean eigenvalue of `H_o`: how far the sharpest direction stands out."""
    top, trace = report.numbers.get("lambda_max"), report.numbers.get("trace.H_o")
    if top is None or trace is None or trace.value <= 0:
        return None
    mean = amount(trace) / Amount(float(report.meta.parameters))
    ratio = amount(top) / mean
    if not ratio.above(t.ILL_CONDITIONED):
        return None
    evidence = [f"λ_max = {amount(top)}", f"mean eigenvalue tr H_o / P = {mean}", f"ratio {ratio}"]
    condition, rank = report.numbers.get("condition"), report.numbers.get("effective_rank")
    if condition is not None and condition.exact:
        evidence.append(f"λ_max over the median positive eigenvalue {amount(condition)}")
    if rank is not None:
        evidence.append(f"effective rank {amount(rank)}, of {report.meta.parameters:,} dimensions")
    return Finding(
        "ill-conditioned",
        "warning",
        "The loss is ill-conditioned: one direction is far sharper than the mean",
        f"The sharpest direction curves {times(ratio.value)} times as much as the mean one. The step that is "
        "stable there hardly moves the model along the others.",
        evidence,
        certainty(ratio),
        "Use an optimizer that scales its steps (Adam, Shampoo) or a preconditioner; plain gradient descent needs a "
        f"learning rate below 2/λ_max = {number(2 / top.value)}.",
        "Ormaniec, Dangel, Singh 2025, §4; Ghorbani, Krishnan, Xiao 2019",
    )


def ill_conditioned_early(report: Report) -> Finding | None:
    """Largest over mean eigenvalue of each group's block, first third of the layers against the last."""
    by_layer = _conditions(report)
    if len(by_layer) < 2:
        return None
    layers = sorted(by_layer)
    third = max(1, len(layers) // 3)
    early, late = (
        mean_of_logs(c for layer in part for _, c in by_layer[layer])
        for part in (layers[:third], layers[-third:])
    )
    ratio = early / late
    if not (ratio.above(t.EARLY) and early.above(1.0)):
        return None
    where = [(name, c) for layer in layers[:third] for name, c in by_layer[layer]]
    worst = max(where, key=lambda pair: pair[1].value)
    return Finding(
        "ill-conditioned-early",
        "notice",
        "The first layers are the worst conditioned",
        f"Within a block of the first layers the sharpest direction stands {early} times above the mean one, "
        f"in the last layers {late} times.",
        [f"ratio early to late {ratio}", f"worst: {worst[0]}, {worst[1]}"],
        certainty(ratio) + " The largest eigenvalue of a block is a lower bound from Lanczos.",
        "An adaptive optimizer evens this out; with gradient descent give the first layers a smaller learning "
        "rate or "
        "a longer warm-up.",
        "Closing the Curvature Gap 2025, on convergence dynamics",
        [name for name, _ in where],
    )


def _conditions(report: Report) -> dict[int, list[tuple[str, Amount]]]:
    """`λ_max · size / trace` of the groups whose spectrum is known, by layer."""
    traces = report.traces.get("H_o")
    if report.spectra is None or traces is None:
        return {}
    found: dict[int, list[tuple[str, Amount]]] = {}
    curves = dict(zip(report.spectra.names, report.spectra.curves, strict=True))
    for i, group in enumerate(report.groups):
        curve = curves.get(group.name)
        if curve is None or group.layer is None or not curve.nodes or group.role == "norm":
            continue
        trace = of(traces.value[i], traces.stderr[i], traces.exact)
        top = max(curve.nodes)
        if trace.above(0) and top > 0:
            found.setdefault(group.layer, []).append((group.name, Amount(top * group.size) / trace))
    return found


def negative_curvature(report: Report) -> Finding | None:
    share, low, high = (report.numbers.get(k) for k in ("negative_curvature", "lambda_min", "lambda_max"))
    if share is None or low is None or high is None or high.value <= 0:
        return None
    edge = Amount(-low.value, amount(low).error) / amount(high)
    if not (amount(share).above(t.NEGATIVE_SHARE) or edge.above(t.NEGATIVE_EDGE)) or not amount(low).below(0):
        return None
    evidence = [f"λ_min = {amount(low)}", f"λ_max = {amount(high)}", f"{amount(share)} of Σ|λ| is negative"]
    along = report.numbers.get("gradient_curvature")
    if along is not None:
        evidence.append(f"curvature along the gradient {amount(along)}")
    return Finding(
        "negative-curvature",
        "notice",
        "The model stands at a saddle: the Hessian has negative curvature",
        "There are directions along which the loss bends down. They come from the functional part H_f alone, "
        "since H_o "
        "is positive semidefinite for a loss that is convex in the output.",
        evidence,
        certainty(amount(share), edge),
        "Early in training this is as it should be. Methods that invert the Hessian need damping of more than "
        f"|λ_min| = {number(-low.value)}, or the Gauss-Newton matrix in its place; momentum, or a step along the "
        "eigenvector, leaves the saddle; gradient clipping limits what such a step can do.",
        "Ormaniec, Dangel, Singh 2025, Theorem 3.2; Dauphin et al. 2014",
    )


def concave_along_gradient(report: Report) -> Finding | None:
    along = report.numbers.get("gradient_curvature")
    if along is None or not amount(along).below(0):
        return None
    return Finding(
        "concave-along-gradient",
        "notice",
        "Along the gradient the loss bends down",
        "A step along the negative gradient gains more than its first order says: to second order nothing limits it.",
        [f"gᵀHg / gᵀg = {amount(along)}"],
        certainty(amount(along)),
        "Do not choose the step from a quadratic model here: it has no minimum along the gradient. A line "
        "search, or a "
        "trust region, does.",
        "Nocedal and Wright 2006, ch. 4",
    )


def gauss_newton_misleads(report: Report) -> Finding | None:
    share = _functional_share(report)
    if share is None or not share.above(t.FUNCTIONAL_SHARE):
        return None
    parts = [f"‖{part}‖_F = {amount(report.numbers[f'frobenius.{part}'])}" for part in ("H_f", "H")]
    evidence = [*parts, f"share {share}"]
    return Finding(
        "gauss-newton-misleads",
        "warning",
        "Gauss-Newton leaves out much of the Hessian",
        f"In norm the functional part is {100 * share.value:.0f} % of the Hessian. What rests on H_o alone (K-FAC, "
        "Fisher, influence functions, OBS pruning) sees another matrix than the loss has.",
        evidence,
        certainty(share),
        "Take the Hessian itself where you can (products cost three gradients), or train further: H_f goes with the "
        "residual of the loss. Use the map of H_f to see which blocks are concerned.",
        "Ormaniec, Dangel, Singh 2025, equation 2 and Theorem 3.2; Schraudolph 2002",
        _most_functional(report),
    )


def gauss_newton_serves(report: Report) -> Finding | None:
    share = _functional_share(report)
    if share is None or not share.below(t.FUNCTIONAL_SMALL):
        return None
    return Finding(
        "gauss-newton-serves",
        "info",
        "Gauss-Newton is a good stand-in for the Hessian here",
        f"The functional part is {share} of the Hessian in norm. Blocks that are small may still differ: see "
        "the map.",
        [f"‖H_f‖_F / ‖H‖_F = {share}"],
        certainty(share),
        "Methods that use H_o, such as K-FAC or the Fisher matrix, see the large curvature rightly.",
        "Martens 2020, New insights on the natural gradient",
    )


def _functional_share(report: Report) -> Amount | None:
    rest, whole = report.numbers.get("frobenius.H_f"), report.numbers.get("frobenius.H")
    if rest is None or whole is None or whole.value <= 0:
        return None
    return amount(rest) / amount(whole)


def _most_functional(report: Report) -> list[str]:
    """Groups whose own block is more functional than not; the ten with the largest norm of it."""
    if "H_f" not in report.maps or "H" not in report.maps:
        return []
    rest, whole = report.maps["H_f"], report.maps["H"]
    rows = [
        (rest.value[i][i], name)
        for i, name in enumerate(rest.names)
        if rest.value[i][i] > 0.5 * whole.value[i][i] > 0
    ]
    return [name for _, name in sorted(rows, reverse=True)[:10]]


def gradient_in_sharp_directions(report: Report) -> Finding | None:
    share, norm = report.numbers.get("gradient_alignment"), report.numbers.get("gradient_norm")
    if share is None or norm is None or not norm.value or not share.converged:
        return None
    positive = sum(pair.gradient for pair in report.eigenpairs if pair.value > 0)
    if positive <= t.IN_SHARP_DIRECTIONS:
        return None
    return Finding(
        "gradient-in-sharp-directions",
        "notice",
        "The gradient lies in the few sharpest directions",
        f"{100 * positive:.0f} % of its square is in the top {sum(p.value > 0 for p in report.eigenpairs)} "
        "eigenvectors, "
        "which allow the smallest steps. The model moves between the walls of a valley rather than along it.",
        [f"Σ cos² over the eigenvectors with λ > 0: {number(positive)}"],
        "The eigenvectors have residuals as the table says; the gradient is exact."
        if not share.exact
        else "The numbers are exact, up to rounding, on the data given.",
        "A smaller learning rate, momentum, or a preconditioner damps this part and lets the rest progress.",
        "Gur-Ari, Roberts, Dyer 2018",
    )


RULES = (
    ill_conditioned,
    ill_conditioned_early,
    negative_curvature,
    concave_along_gradient,
    gauss_newton_misleads,
    gauss_newton_serves,
    gradient_in_sharp_directions,
)
