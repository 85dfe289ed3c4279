"""Stochastic Lanczos quadrature: the recurrences, of one operator or of many blocks in lockstep.

From a probe v of length 1, m steps of Lanczos give a tridiagonal T with `v^T f(H) v ≈ e_1^T f(T) e_1`, exact for
polynomials up to degree 2m - 1 (Golub, Meurant). Orthogonalisation is full and done twice, T is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.run import Run
from curvlens.operator import Operator, free_memory


@dataclass
class Recurrence:
    """K probes on an operator whose diagonal blocks are followed, each on its own.

    With one group of entries that is plain Lanczos, K times. With several, the off-diagonal blocks between the
    groups must be zero: then one product takes a step in all of them.
    """

    H: Operator
    spans: list[slice]
    basis: Tensor  # [K, steps, n]; of each group its own orthonormal vectors
    tridiagonal: Tensor  # [K, B, steps, steps]
    counts: Tensor  # [K, B]: basis vectors so far
    complete: Tensor  # [K, B]: whether they span all that the probe can reach; then the quadrature is exact
    moments: Tensor  # [K, B, 2]: v^T H v and |H v|^2, measured directly
    step: int = 0

    @classmethod
    def begin(cls, H: Operator, groups: Blocks | None, indices: range, steps: int, seed: int) -> Recurrence:
        spans = [slice(0, H.domain.size)] if groups is None else list(groups.ranges.values())
        shape = (len(indices), steps, H.domain.size)
        need, free = shape[0] * steps * shape[2] * H.dtype.itemsize, free_memory(H.device)
        if need > free:
            raise MemoryError(
                f"{steps} vectors for each of {shape[0]} probes take {need / 2**30:,.1f} GiB and "
                f"{free / 2**30:,.1f} GiB are free; take fewer steps, or a smaller chunk"
            )
        basis = torch.zeros(shape, dtype=H.dtype, device=H.device)
        start = probes_like(H, indices, seed, "rademacher")
        for span in spans:
            basis[:, 0, span] = start[:, span] / (span.stop - span.start) ** 0.5
        small = (len(indices), len(spans))
        return cls(
            H,
            spans,
            basis,
            torch.zeros(*small, steps, steps, dtype=torch.float64),
            torch.ones(small, dtype=torch.long),
            torch.zeros(small, dtype=torch.bool),
            torch.zeros(*small, 2, dtype=torch.float64),
        )

    @property
    def finished(self) -> bool:
        return self.step == self.basis.shape[1] or bool(self.complete.all())

    def advance(self, run: Run) -> None:
        """One product for each probe: the next column of every T, and the next vectors."""
        j, last = self.step, self.basis.shape[1] - 1
        images = run.apply(self.H, self.basis[:, j])
        epsilon = torch.finfo(self.H.dtype).eps
        for k, image in enumerate(images):
            for b, span in enumerate(self.spans):
                if self.complete[k, b]:
                    continue
                rest = image[None, span].clone()
                known = self.basis[k, : j + 1, span]
                length = vectors.norm(rest)[0]
                if j == 0:
                    direct = vectors.dot(known, rest)[0]
                    self.moments[k, b] = torch.stack([direct, length.square()])
                entries = vectors.project_out(rest, known)[0]
                T = self.tridiagonal[k, b]
                T[j, j] = entries[j]
                beta = vectors.norm(rest)[0]
                scale = max(T.diagonal().abs().max(), length)
                if j + 1 == span.stop - span.start or beta <= 10 * epsilon * scale:
                    self.complete[k, b] = True
                elif j < last:
                    T[j, j + 1] = T[j + 1, j] = beta
                    self.basis[k, j + 1, span] = rest[0] / beta.item()
                    self.counts[k, b] = j + 2
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {
            "basis": self.basis[:, : self.step + 1].clone(),
            "tridiagonal": self.tridiagonal,
            "counts": self.counts,
            "complete": self.complete,
            "moments": self.moments,
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.basis[:, : state["basis"].shape[1]] = state["basis"]
        self.tridiagonal, self.counts = state["tridiagonal"], state["counts"]
        self.complete = state["complete"]
        self.moments, self.step = state["moments"], state["step"]

    def result(self) -> dict[str, Tensor]:
        """The quadratures so far: `[K, B, ...]` each, with the number of rows of T that are filled."""
        return {
            "tridiagonal": self.tridiagonal,
            "counts": self.counts.clamp(max=self.step),
            "complete": self.complete,
            "moments": self.moments,
        }
