"""The ends of the spectrum, where their directions live, and how they lie to the gradient."""

from __future__ import annotations

from curvlens.estimate import vectors
from curvlens.report.data import Eigenpair, Number
from curvlens.report.groups import sums
from curvlens.report.stages.context import Context, Interrupted, Outcome, state_of


def measure(at: Context) -> Outcome:
    """Eigenpairs from both ends, the share of each group in their vectors, and the curvature along the gradient."""
    pairs = at.pairs
    products = 0 if at.dense else pairs.products
    if not len(pairs):
        raise Interrupted(state_of(pairs.stopped, False)[1])
    values = pairs.values
    g = at.gradient
    norm = vectors.norm(g[None])[0].item()
    members = sums(at.group_blocks, at.land.blocks)
    rows = pairs.vectors.T.contiguous()
    mass = vectors.block_dots(rows, rows, at.land.blocks) @ members.T
    cosines = (vectors.gram(rows, g[None])[:, 0] / max(norm, 1e-300)).square()
    order = values.argsort(descending=True).tolist()
    found = [
        Eigenpair(values[i].item(), pairs.residuals[i].item(), mass[i].tolist(), cosines[i].item(), at.dense)
        for i in order
    ]
    numbers = {}
    for key, end, label in (("lambda_max", -1, "largest"), ("lambda_min", 0, "smallest")):
        if at.dense:
            numbers[key] = Number(f"{label} eigenvalue of H", at.eigenvalues[end].item())
        else:
            i = order[-1 - end]  # descending
            numbers[key] = Number(
                f"{label} eigenvalue of H",
                values[i].item(),
                pairs.residuals[i].item(),
                False,
                pairs.converged,
                products=products,
                note="± its residual",
            )
    image = at.H.apply(g[None])
    along = vectors.dot(g[None], image)[0].item() / max(norm**2, 1e-300)
    numbers["gradient_curvature"] = Number("curvature along the gradient, gᵀHg / gᵀg", along)
    numbers["gradient_alignment"] = Number(
        f"share of the gradient in the {len(pairs)} eigenvectors of the ends",
        cosines.sum().item(),
        exact=at.dense,
        stderr=0.0,
        converged=pairs.converged,
        samples=len(pairs),
    )
    if along > 0:
        numbers["best_step"] = Number(
            "step along the gradient that lowers the quadratic model most, gᵀg / gᵀHg", 1 / along
        )
    status, why = state_of(pairs.stopped, pairs.converged)
    status = "exact" if at.dense else status
    return Outcome({"eigenpairs": found, "numbers": numbers}, status, why, products + (not at.dense))
