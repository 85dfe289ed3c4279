"""Traces and norms of the Hessian and of its two parts, by group, and the map of all pairs.

The parts are multiplied, `H_o v` and `H_f v`, and `H v` is their sum: nothing is lost to cancellation, and three
matrices cost the products of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import jackknife, mean_and_error
from curvlens.estimate.run import Run, identity
from curvlens.estimate.sampling import sample
from curvlens.report.data import PARTS, Column, Map, Number
from curvlens.report.groups import sums
from curvlens.report.stages.context import Context, Interrupted, Outcome, state_of


def traces(at: Context) -> Outcome:
    """Traces by group, the whole trace and the Frobenius norm, of H, H_o and H_f, from the same products."""
    return _exact_traces(at) if at.dense else _estimated_traces(at)


def norms(at: Context) -> Outcome:
    """The map `‖M_ab‖_F` over all pairs of rows, of H, H_o and H_f."""
    return _exact_norms(at) if at.dense else _estimated_norms(at)


# -- exact


def _exact_traces(at: Context) -> Outcome:
    members = sums(at.group_blocks, at.land.blocks)
    columns, numbers = {}, {}
    for part in PARTS:
        matrix = at.matrices[part].matrix.double()
        diagonal = matrix.diagonal()
        by_block = torch.stack([diagonal[span].sum() for span in at.land.blocks.ranges.values()])
        value = (members @ by_block).tolist()
        columns[part] = Column(value, [0.0] * len(value), True)
        numbers[f"trace.{part}"] = Number(f"trace of {part}", diagonal.sum().item())
        numbers[f"frobenius.{part}"] = Number(f"Frobenius norm of {part}", matrix.norm().item())
    return Outcome({"traces": columns, "numbers": numbers}, "exact")


def _exact_norms(at: Context) -> Outcome:
    members, spans = sums(at.rows, at.land.blocks), at.land.blocks.ranges.values()
    maps = {}
    for part in PARTS:
        matrix = at.matrices[part].matrix.double()
        squares = torch.stack([torch.stack([matrix[a, b].square().sum() for b in spans]) for a in spans])
        value = (members @ squares @ members.T).sqrt()
        maps[part] = Map(list(at.rows), value.tolist(), torch.zeros_like(value).tolist(), True)
    return Outcome({"maps": maps}, "exact")


# -- estimated


def _estimated_traces(at: Context) -> Outcome:
    """One product by each part a probe v: `v_aᵀ (M v)_a` for every group a, and `‖M v‖²`."""
    members, blocks = sums(at.group_blocks, at.land.blocks), at.land.blocks
    with Run("traces", identity(at.outer, seed=at.seed), **at.budget("traces")) as run:

        def measure(indices: range) -> Tensor:
            stack = probes_like(at.outer, indices, at.seed, "rademacher")
            images = _images(run, at, stack)
            return torch.stack(
                [
                    torch.cat(
                        [
                            vectors.block_dots(stack, image, blocks) @ members.T,
                            vectors.norm(image).square()[:, None],
                        ],
                        dim=1,
                    )
                    for image in images
                ],
                dim=1,
            )

        values, done = sample(run, measure, at.preset.traces, None, 2)
    if not len(values):
        raise Interrupted(state_of(run.stopped, False)[1])
    columns, numbers = {}, {}
    for i, part in enumerate(PARTS):
        by_group, squares = values[:, i, :-1], values[:, i, -1]
        value, error = mean_and_error(by_group)
        columns[part] = Column(value.tolist(), error.tolist(), False, len(values))
        whole, whole_error = mean_and_error(by_group.sum(1))
        norm, norm_error = jackknife(squares, torch.sqrt)
        for key, what, v, e in (
            ("trace", "trace", whole, whole_error),
            ("frobenius", "Frobenius norm", norm, norm_error),
        ):
            numbers[f"{key}.{part}"] = Number(
                f"{what} of {part}", v.item(), e.item(), False, done, len(values), run.products
            )
    return Outcome({"traces": columns, "numbers": numbers}, *state_of(run.stopped, done), run.products)


def _estimated_norms(at: Context) -> Outcome:
    """A probe on the columns of row b gives `‖(M v_b)_a‖²`, unbiased for `‖M_ab‖²_F`, for every a at once."""
    members, blocks = sums(at.rows, at.land.blocks), at.land.blocks
    columns = [blocks.select(*inside) for inside in at.rows.values()]
    size = len(columns)
    with Run("map", identity(at.outer, seed=at.seed, rows=list(at.rows)), **at.budget("norms")) as run:
        state = run.restore()
        shape = (at.preset.norms, len(PARTS), size, size)
        values = torch.full(shape, torch.nan, dtype=torch.float64) if state is None else state["values"]
        for probe in range(len(values)):
            for b, column in enumerate(columns):
                if not values[probe, 0, 0, b].isnan():
                    continue
                if not run.affordable(1, 2):
                    break
                images = _column_images(run, at, column, probe)
                for i, image in enumerate(images):
                    values[probe, i, :, b] = members @ vectors.block_dots(image, image, blocks)[0]
                run.step(lambda: {"values": values}, 2 * len(values) * size, list(at.rows)[b])
    full = int((~values.isnan().flatten(1).any(1)).sum())
    done = full == len(values)
    if values[0].isnan().all():
        raise Interrupted(state_of(run.stopped, False)[1])
    maps = {}
    for i, part in enumerate(PARTS):
        value, error = _roots(values[:, i], full)
        maps[part] = Map(list(at.rows), value.tolist(), error.tolist(), False, full)
    return Outcome({"maps": maps}, *state_of(run.stopped, done), run.products)


def _images(run: Run, at: Context, stack: Tensor) -> list[Tensor]:
    outer, rest = run.apply(at.outer, stack), run.apply(at.functional, stack)
    return [outer + rest, outer, rest]


def _column_images(run: Run, at: Context, column: Blocks, probe: int) -> list[Tensor]:
    outer, rest = (part.block(at.land.blocks, column) for part in (at.outer, at.functional))
    stack = probes_like(outer, [probe], at.seed, "rademacher")
    images = [run.apply(outer, stack), run.apply(rest, stack)]
    return [images[0] + images[1], *images]


def _roots(squares: Tensor, full: int) -> tuple[Tensor, Tensor]:
    """Norms and errors from `[probes, R, R]`; (a, b) and (b, a) are two estimates of one number, and pooled."""
    if full >= 2:
        whole = squares[:full]
        value, error = jackknife((whole + whole.mT) / 2, torch.sqrt)
        return value.clamp(min=0), error
    both = torch.cat([squares, squares.mT])
    return both.nanmean(0).sqrt(), torch.full(squares.shape[1:], torch.nan, dtype=torch.float64)
