"""What the stages of an analysis share: the landscape, its operators, the budget, and what was found before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlens.curvature import functional, gauss_newton, hessian
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.run import Run, identity
from curvlens.landscape import Landscape
from curvlens.operator import Operator, free_memory
from curvlens.report.data import Group, Status
from curvlens.report.groups import groups, rows_of_a_map
from curvlens.report.presets import Preset
from curvlens.structured import Dense

EXACT = 1e-6  # relative residual of eigenvectors of a matrix that is there; its eigenvalues are exact
SHARE = 0.25  # of the memory that vectors of eigenvalues and spectra may take
COLUMNS = 128  # of a dense matrix between two looks at the budget


class Outcome(NamedTuple):
    """What a stage found: fields of the report, and how sure it is of them."""

    fields: dict[str, Any]
    status: Status = "estimated"
    why: str = ""
    products: int = 0


class Skip(Exception):
    """There is nothing to measure here; the reason."""


class Interrupted(Exception):
    """A stage ended by Ctrl-C or the budget before it had anything; the reason."""


@dataclass
class Context:
    land: Landscape
    preset: Preset
    seed: int
    optimizer: torch.optim.Optimizer | None = None
    folder: Path | None = None
    max_products: int | None = None
    deadline: float | None = None  # of time.monotonic()
    progress: bool | None = None
    spent: int = 0  # products of finished stages
    found: dict[str, Any] = field(default_factory=dict)  # fields of the report so far

    # -- operators

    @cached_property
    def H(self) -> Operator:
        return self.matrices["H"] if self.dense else hessian(self.land)

    @cached_property
    def outer(self) -> Operator:
        return self.matrices["H_o"] if self.dense else gauss_newton(self.land)

    @cached_property
    def functional(self) -> Operator:
        return self.matrices["H_f"] if self.dense else functional(self.land)

    @cached_property
    def dense(self) -> bool:
        """Whether the whole matrices are formed: where they are small, that costs no more than estimates."""
        size = self.land.blocks.size
        return size <= self.preset.dense and (self.max_products is None or 3 * size <= self.max_products)

    @cached_property
    def matrices(self) -> dict[str, Dense]:
        """H_o and H_f, exact, column by column, and their sum."""
        outer = self._formed("outer-product part", gauss_newton(self.land), "H_o")
        rest = self._formed("functional part", functional(self.land), "H_f")
        blocks = self.land.blocks
        return {"H": Dense(outer + rest, blocks), "H_o": Dense(outer, blocks), "H_f": Dense(rest, blocks)}

    @cached_property
    def pairs(self) -> Eigenpairs:
        """Eigenpairs from both ends; where they were found before, their state costs no product."""
        k = min(self.preset.eigenpairs, self.land.blocks.size)
        tol = EXACT if self.dense else self.preset.tol
        settings = self.budget("eigenvalues")
        basis = None if self.dense else max(k + 4, min(max(4 * k, 40), self.room))
        return eigsh(self.H, k, "both", tol, seed=self.seed, basis=basis, copies=not self.dense, **settings)

    @cached_property
    def room(self) -> int:
        """How many vectors of all parameters may be kept: a share of the whole memory, and not of what is free now, so
        that a run that goes on elsewhere in time goes on alike."""
        return int(
            SHARE * total_memory(self.land.device) / (self.land.blocks.size * self.land.dtype.itemsize)
        )

    @cached_property
    def eigenvalues(self) -> Tensor:
        """All of them, of the dense matrix."""
        return torch.linalg.eigvalsh(self.matrices["H"].matrix.double())

    def _formed(self, what: str, operator: Operator, name: str) -> Tensor:
        size = operator.shape[0]
        with Run(what, identity(operator), **self.budget(f"dense.{name}")) as run:
            state = run.restore()
            matrix = torch.zeros(size, size, dtype=operator.dtype) if state is None else state["matrix"]
            done = 0 if state is None else int(state["done"])
            while done < size:
                count = run.affordable(min(COLUMNS, size - done))
                if not count:
                    break
                stack = torch.zeros(count, size, dtype=operator.dtype, device=operator.device)
                stack[torch.arange(count), torch.arange(done, done + count)] = 1
                matrix[done : done + count] = run.apply(operator, stack).cpu()
                done += count
                run.step(lambda done=done: {"matrix": matrix, "done": done}, size)  # type: ignore[misc]
        if done < size:
            raise Interrupted(f"{run.stopped} after {done} of {size} columns of the {what}")
        self.spent += run.products
        return (matrix + matrix.T) / 2

    # -- the budget

    def budget(self, name: str) -> dict[str, Any]:
        """Settings of an estimator: what is left of products and minutes, where its state is kept."""
        left = None if self.max_products is None else max(1, self.max_products - self.spent)
        minutes = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) / 60
        checkpoint = None if self.folder is None or self.preset is None else self.folder / f"{name}.pt"
        return {
            "max_products": left,
            "max_minutes": minutes,
            "checkpoint": checkpoint,
            "progress": self.progress,
        }

    # -- what is analysed

    @cached_property
    def groups(self) -> list[Group]:
        return groups(self.land.blocks)

    @cached_property
    def group_blocks(self) -> dict[str, list[str]]:
        return {group.name: group.blocks for group in self.groups}

    @cached_property
    def rows(self) -> dict[str, list[str]]:
        """The rows of the maps, as fine as the preset allows."""
        return rows_of_a_map(self.groups, self.preset.rows)

    @cached_property
    def gradient(self) -> Tensor:
        return self.land.gradient()

    @cached_property
    def parts(self) -> list[Landscape]:
        """Landscapes of disjoint parts of the data."""
        return self.land.parts(self.preset.parts)


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return free_memory(device)


Measure = Callable[[Context], Outcome]


def state_of(stopped: str, done: bool) -> tuple[Status, str]:
    """The status of an estimate: whether it is all that was asked for."""
    words = {
        "max_products": "the budget of products was used up",
        "max_minutes": "the time was used up",
        "interrupted": "interrupted",
        "samples": "the tolerance was not reached",
    }
    return ("estimated", "") if done else ("partial", words.get(stopped, stopped))
