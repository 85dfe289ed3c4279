"""Frobenius norms and traces, of an operator and of all its blocks, from few products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import BlockMap, Estimate, jackknife, mean_and_error
from curvlens.estimate.run import Run, identity
from curvlens.estimate.sampling import PATIENCE, sample
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
    values = values if len(values) else torch.full((1, len(names)), float("nan"), dtype=torch.float64)
    value, error = mean_and_error(values)
    return BlockMap(
        "block traces", names, None, value, error, len(values), run.products, converged, run.stopped
    )


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
    For a symmetric operator the entries (a, b) and (b, a) are two estimates of one number, and pooled. Roots and
    errors are those of the jackknife, as in `frobenius`. Only the products with block b's columns are taken, so
    engines that can skip work do. The state is saved after every block.
    """
    pooled = H.symmetric and H.domain == H.codomain
    columns = [H.block(H.codomain, Blocks([block])) for block in H.domain]
    with Run("block norms", identity(H, seed=seed, probe=probe, chunk=chunk), **budget) as run:
        state = run.restore()
        shape = (0, len(H.codomain), len(columns))
        values = torch.empty(shape, dtype=torch.float64) if state is None else state["values"]
        converged = False
        while not converged:
            full = _full(values)
            if full >= samples and (tol is None or _within(values, pooled, tol)):
                converged, run.stopped = True, "samples" if tol is None else "tolerance"
            elif full >= (limit := samples if full < samples else PATIENCE * samples):
                run.stopped = "samples"
                break
            else:
                if full == len(values):  # begin a group of probes: all of them block by block
                    count = run.affordable(min(chunk, limit - full), len(columns))
                    if not count and full:
                        break
                    count = max(1, count)  # a part of the first map is better than none
                    values = torch.cat([values, torch.full((count, *shape[1:]), torch.nan).double()])
                if not _fill(run, columns, values[full:], range(full, len(values)), seed, probe, values):
                    break
        value, error = _roots(values, pooled)
    return BlockMap(
        "block norms",
        H.codomain.names,
        H.domain.names,
        value,
        error,
        _full(values),
        run.products,
        converged,
        run.stopped,
    )


def _fill(
    run: Run,
    columns: list[Operator],
    group: Tensor,
    indices: range,
    seed: int,
    probe: str,
    values: Tensor,
) -> bool:
    """Measure the blocks that a group of probes still lacks; False when the budget ends before."""
    for j, column in enumerate(columns):
        if not group[0, 0, j].isnan():
            continue
        if not run.affordable(1, len(indices)):
            return False
        images = run.apply(column, probes_like(column, indices, seed, probe))
        group[:, :, j] = vectors.block_dots(images, images, column.codomain)
        run.step(lambda: {"values": values}, values.numel() // len(values[0]), column.domain.names[0])
    return True


def _full(values: Tensor) -> int:
    """The number of probes with every block measured."""
    return int((~values.isnan().any(2).any(1)).sum())


def _within(values: Tensor, pooled: bool, tol: float) -> bool:
    value, error = _roots(values, pooled)
    return bool((error <= tol * value).all())


def _roots(values: Tensor, pooled: bool) -> tuple[Tensor, Tensor]:
    """Norms and errors from squared norms `[m, A, B]`; NaN where nothing was measured."""
    full = _full(values)
    if full >= 2:
        values = values[:full]
        return _root((values + values.mT) / 2 if pooled else values)
    squares = torch.cat([values, values.mT]) if pooled else values
    return squares.nanmean(0).sqrt(), torch.full(values.shape[1:], torch.inf, dtype=torch.float64)


def _root(squares: Tensor) -> tuple[Tensor, Tensor]:
    value, error = jackknife(squares, torch.sqrt)
    return value.clamp(min=0), error
