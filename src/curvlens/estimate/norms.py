"""Frobenius norms and traces, of an operator and of all its blocks, from few products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import BlockMap, Estimate, mean_and_error, shown_pm, students
from curvlens.estimate.run import Run, identity
from curvlens.estimate.sampling import PATIENCE, require_counts, sample
from curvlens.estimate.trace import nothing, require_square
from curvlens.operator import Operator


def frobenius(
    H: Operator,
    samples: int = 32,
    tol: float | None = None,
    seed: int = 0,
    probe: str = "rademacher",
    chunk: int = 4,
    **budget: Any,
) -> Estimate:
    """Estimate `||H||_F`, one product a probe.

    `||H v||^2` is an unbiased estimate of the squared norm. The root of its mean, and the root's error, are those
    of the jackknife, which takes out the bias of first order that a root brings.
    """
    with Run("frobenius", identity(H, seed=seed, probe=probe), **budget) as run:

        def measure(indices: range) -> Tensor:
            return vectors.norm(run.apply(H, probes_like(H, indices, seed, probe))).square()

        values, converged = sample(run, measure, samples, tol, chunk, summary=_root)
    if not len(values):
        return nothing("frobenius", run)
    value, error = _root(values)
    return Estimate(
        "frobenius", value.item(), error.item(), len(values), run.products, converged, run.stopped
    )


def block_traces(
    H: Operator,
    samples: int = 32,
    tol: float | None = None,
    seed: int = 0,
    probe: str = "rademacher",
    chunk: int = 4,
    **budget: Any,
) -> BlockMap:
    """Estimate `tr H_bb` for every block b, from one set of probes on all parameters: `v_b^T (H v)_b`.

    One product a probe whatever the number of blocks; other blocks add variance. For one block that must be
    sharp, `trace(H.block(name))`.
    """
    require_square(H, "block traces")
    names = H.domain.names
    with Run("block traces", identity(H, seed=seed, probe=probe), **budget) as run:

        def measure(indices: range) -> Tensor:
            stack = probes_like(H, indices, seed, probe)
            return vectors.block_dots(stack, run.apply(H, stack), H.domain)

        values, converged = sample(run, measure, samples, tol, chunk)
    count = len(values)
    values = values if count else torch.full((1, len(names)), float("nan"), dtype=torch.float64)
    value, error = mean_and_error(values)
    return BlockMap("block traces", names, None, value, error, count, run.products, converged, run.stopped)


def block_norms(
    H: Operator,
    samples: int = 8,
    tol: float | None = None,
    seed: int = 0,
    probe: str = "rademacher",
    chunk: int = 4,
    **budget: Any,
) -> BlockMap:
    """Estimate `||H_ab||_F` for every pair of blocks, by B products a probe.

    A probe `v_b` supported on block b gives `||(H v_b)_a||^2`, unbiased for `||H_ab||_F^2`, for every a at once.
    For a symmetric operator (a, b) and (b, a) are one number, and the samples of both are pooled. Roots and errors are
    those of the jackknife, as in `frobenius`. Only the products with block b's columns are taken, so engines that can
    skip work do. With `tol`, after `samples` probes of every block, the block that takes part in most of the entries
    whose error is still above `tol` times the value gets the next probes. The state is saved after every block.
    """
    require_counts(samples, tol, chunk)
    pooled = H.symmetric and H.domain == H.codomain
    columns = [H.block(H.codomain, Blocks([block])) for block in H.domain]
    with Run("block norms", identity(H, seed=seed, probe=probe, chunk=chunk), **budget) as run:
        state = run.restore()
        # samples of squared norms [m, A, B], NaN where a block has fewer probes than another
        values = torch.empty(0, len(H.codomain), len(columns)).double() if state is None else state["values"]
        while (b := _next(values, samples, tol, pooled)) is not None:
            known = _counts(values)
            lagging = int((known == known.min()).sum()) if known[b] < samples else 1
            count = min(chunk, samples - int(known[b])) if known[b] < samples else chunk
            # a map that is whole with few probes, before one with more of them in a part
            if not (count := run.affordable(count, lagging) or run.affordable(1)):
                break
            indices = range(int(known[b]), int(known[b]) + count)
            images = run.apply(columns[b], probes_like(columns[b], indices, seed, probe))
            if indices.stop > len(values):
                rest = torch.full((indices.stop - len(values), *values.shape[1:]), torch.nan).double()
                values = torch.cat([values, rest])
            values[indices.start : indices.stop, :, b] = vectors.block_dots(images, images, H.codomain)
            total = samples * len(columns) if tol is None else None
            shown = shown_pm(*(x.nan_to_num(posinf=torch.inf) for x in _roots(values, pooled)))
            run.step(lambda values=values: {"values": values}, total, shown)  # type: ignore[misc]
        value, error = _roots(values, pooled)
        converged = b is None and (tol is None or bool((error <= tol * value).all()))
        if b is None:
            run.stopped = "tolerance" if converged and tol is not None else "samples"
    return BlockMap(
        "block norms",
        H.codomain.names,
        H.domain.names,
        value,
        error,
        int(_counts(values).min()),
        run.products,
        converged,
        run.stopped,
    )


def _counts(values: Tensor) -> Tensor:
    """The number of probes of every block, `[B]`."""
    return (~values[:, 0].isnan()).sum(0)


def _next(values: Tensor, samples: int, tol: float | None, pooled: bool) -> int | None:
    """The block whose probes are to come next; None when there are enough, or too many."""
    known = _counts(values)
    if known.min() < samples:
        return int(known.argmin())
    if tol is None:
        return None
    value, error = _roots(values, pooled)
    lacking = (error > tol * value).sum(0)
    lacking[known >= PATIENCE * samples] = 0
    return int(lacking.argmax()) if lacking.any() else None


def _roots(values: Tensor, pooled: bool) -> tuple[Tensor, Tensor]:
    """Norms and errors from squared norms `[m, A, B]`; NaN where nothing was measured."""
    if pooled:
        other = values.mT.clone()
        other.diagonal(dim1=1, dim2=2).fill_(torch.nan)  # the same numbers, not further ones
        value, error = _root(torch.cat([values, other]))
        return (value + value.T) / 2, (error + error.T) / 2  # sums in another order
    return _root(values)


def _root(squares: Tensor) -> tuple[Tensor, Tensor]:
    """The jackknife (see `result`) of the root of the mean over dimension 0; NaN marks a sample not taken."""
    count = (~squares.isnan()).sum(0)
    total = squares.nansum(0)
    whole = (total / count).sqrt()
    without = ((total - squares).clamp(min=0) / (count - 1)).sqrt()
    centre = without.nansum(0) / count
    variance = (count - 1) / count * (without - centre).square().nansum(0)
    value = torch.where(count > 1, count * whole - (count - 1) * centre, whole)
    error = torch.where(count > 1, variance.sqrt() * students(count), torch.inf)
    return value.clamp(min=0), error
