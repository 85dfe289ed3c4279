"""The spectral density, of the whole and of each group, and how unlike the groups' spectra are."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.estimate import Support, density, effective_rank, negative_fraction
from curvlens.estimate.density import Density, common_support
from curvlens.estimate.heterogeneity import divergence, heterogeneity
from curvlens.estimate.result import mean_and_error
from curvlens.report.data import Curve, Group, Number, Spectra
from curvlens.report.stages.context import Context, Interrupted, Outcome, Skip, state_of

BINS = 160  # of a density: what a figure shows
LEAST = 8  # steps of a probe, however little memory there is
ENDS = 32  # eigenvalues that are kept from each end of an exact spectrum


def whole(at: Context) -> Outcome:
    """The density of H with its band; from it the negative share, the effective rank, the condition number."""
    if at.dense:
        return _exact_whole(at)
    steps = min(at.preset.steps, max(LEAST, at.room))
    chunk = 2 if 2 * steps <= at.room else 1
    found = density(at.H, at.preset.probes, steps, seed=at.seed, chunk=chunk, **at.budget("spectrum"))
    if not found.samples:
        raise Interrupted(state_of(found.stopped, False)[1])
    numbers = {}
    for key, estimate in (
        ("negative_curvature", negative_fraction(found)),
        ("negative_count", negative_fraction(found, by="count")),
        ("effective_rank", effective_rank(found)),
    ):
        numbers[key] = Number(
            LABELS[key],
            estimate.value,
            estimate.stderr,
            False,
            found.converged,
            found.samples,
            found.products,
        )
    numbers |= _estimated_condition(found)
    fields = {"spectrum": curve(found, found.support(symlog=True, bins=BINS)), "numbers": numbers}
    return Outcome(fields, *state_of(found.stopped, found.converged), found.products)


def by_group(at: Context) -> Outcome:
    """The density of each group's diagonal block on one grid, and the Jensen-Shannon divergence of every two."""
    if at.dense:
        return _exact_by_group(at)
    chosen = _largest(at.groups, at.preset.spectra)
    if not chosen:
        raise Skip(f"the preset {at.preset.name!r} leaves it out; take 'standard' or 'thorough'")
    parts = {
        g.name: at.H.block(at.land.blocks.select(*g.blocks), at.land.blocks.select(*g.blocks)) for g in chosen
    }
    found, products = {}, 0
    probes, steps = max(2, at.preset.probes // 2), max(10, at.preset.steps // 2)
    for name, part in parts.items():
        found[name] = density(part, probes, steps, seed=at.seed, **at.budget(f"spectra.{name}"))
        products += found[name].products
        at.spent += found[name].products
        if not found[name].converged:
            break
    at.spent -= products
    last = found[name]
    found = {name: d for name, d in found.items() if d.samples == probes}
    if len(found) < 2:
        raise Interrupted(state_of(last.stopped, False)[1])
    unlike = heterogeneity(found)
    support = common_support(list(found.values()), symlog=True, bins=BINS)
    spectra = Spectra(
        list(found),
        [curve(d, support, name) for name, d in found.items()],
        unlike.value.tolist(),
        unlike.stderr.tolist(),
    )
    return Outcome({"spectra": spectra}, *state_of(last.stopped, last.converged), products)


def curve(found: Density, support: Support, name: str = "H") -> Curve:
    drawn = found.curve(support)
    return _curve(
        name,
        found.size,
        False,
        support,
        drawn.density,
        drawn.stderr,
        found.nodes[0],
        found.weights[0],
        found.samples,
    )


def _curve(
    name: str,
    size: int,
    exact: bool,
    support: Support,
    mass: Tensor,
    error: Tensor,
    nodes: Tensor,
    weights: Tensor,
    samples: int,
) -> Curve:
    step = (support.edges[1] - support.edges[0]).item()
    return Curve(
        name=name,
        size=size,
        exact=exact,
        eigenvalues=support.eigenvalues.tolist(),
        density=mass.tolist(),
        stderr=error.tolist(),
        threshold=support.threshold or 0.0,
        step=step,
        nodes=nodes.tolist(),
        weights=weights.tolist(),
        samples=samples,
    )


def _largest(found: list[Group], most: int) -> list[Group]:
    """The groups with a spectrum of their own: matrices before norms, large before small, in the model's order."""
    ranked = sorted(found, key=lambda g: (g.role in ("norm", "other"), -g.size))[:most]
    return [group for group in found if group in ranked]


# -- exact, from the dense matrix


def _exact_whole(at: Context) -> Outcome:
    values = at.eigenvalues
    size, magnitude = len(values), values.abs()
    share = magnitude / magnitude.sum().clamp(min=torch.finfo(torch.float64).tiny)
    floor = 1e-6 * magnitude.max()
    numbers = {
        "negative_curvature": ((-values).clamp(min=0).sum() / magnitude.sum()).item(),
        "negative_count": (values < -floor).double().mean().item(),
        "effective_rank": torch.exp(-torch.special.xlogy(share, share).sum()).item(),
    }
    found = {key: Number(LABELS[key], value) for key, value in numbers.items()}
    condition = _condition(values, torch.full((size,), 1 / size, dtype=torch.float64))
    if condition is not None:
        found["condition"] = Number(CONDITION, condition)
    support = _support([values])
    return Outcome({"spectrum": _exact_curve("H", values, support), "numbers": found}, "exact")


def _exact_by_group(at: Context) -> Outcome:
    matrix, blocks = at.matrices["H"].matrix.double(), at.land.blocks
    values = {}
    for group in at.groups:
        at_group = blocks.positions(blocks.select(*group.blocks))
        values[group.name] = torch.linalg.eigvalsh(matrix[at_group][:, at_group])
    support = _support(list(values.values()))
    curves = {name: _exact_curve(name, v, support) for name, v in values.items()}
    masses = (
        torch.tensor([c.density for c in curves.values()], dtype=torch.float64)
        * curves[next(iter(curves))].step
    )
    table = torch.stack([divergence(row, masses) for row in masses])
    spectra = Spectra(list(values), list(curves.values()), table.tolist(), torch.zeros_like(table).tolist())
    return Outcome({"spectra": spectra}, "exact")


def _support(values: list[Tensor]) -> Support:
    low = min(v.min().item() for v in values)
    high = max(v.max().item() for v in values)
    return Support(low, high, 1e-4 * (max(-low, high) or 1.0), BINS)


def _exact_curve(name: str, values: Tensor, support: Support) -> Curve:
    weights = torch.full((len(values),), 1 / len(values), dtype=torch.float64)
    step = (support.edges[1] - support.edges[0]).item()
    mass = support.masses(values[None], weights[None])[0] / step
    ends = torch.cat([values[:ENDS], values[ENDS:][-ENDS:]])  # ascending, so the outermost
    nothing = torch.zeros_like(mass)
    return _curve(name, len(values), True, support, mass, nothing, ends, weights[: len(ends)], 0)


LABELS = {
    "negative_curvature": "negative share of the curvature, Σ|λ| over λ < 0",
    "negative_count": "share of eigenvalues below −10⁻⁶ of the largest",
    "effective_rank": "effective rank of H",
}


CONDITION = "condition of the positive part: largest over median eigenvalue above 10⁻⁶ of the largest"


def _condition(nodes: Tensor, weights: Tensor) -> float | None:
    """Largest over median positive eigenvalue: the whole positive part, of which the smallest is rounding."""
    kept = (nodes > 1e-6 * nodes.abs().max()) & (weights > 0)
    if not kept.any():
        return None
    values, order = nodes[kept].sort()
    share = weights[kept][order].cumsum(0)
    median = values[int((share < share[-1] / 2).sum().clamp(max=len(values) - 1))].item()
    return values[-1].item() / median


def _estimated_condition(found: Density) -> dict[str, Number]:
    """The geometric mean over probes, with its error; the quadrature resolves a median near zero only roughly."""
    each = [_condition(nodes, weights) for nodes, weights in zip(found.nodes, found.weights, strict=True)]
    logs = torch.tensor([c for c in each if c is not None], dtype=torch.float64).log()
    if len(logs) < 2:
        return {}
    mean, error = mean_and_error(logs)
    value = mean.exp().item()
    return {
        "condition": Number(
            CONDITION, value, value * error.item(), False, found.converged, found.samples, found.products
        )
    }
