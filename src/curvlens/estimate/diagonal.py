"""The diagonal of an operator from products: XDiag (Epperly, Tropp, Webber 2024, section 2.4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import Estimate
from curvlens.estimate.run import Run, identity
from curvlens.estimate.trace import RangeSketch, error_of_mean, left_out, require_square
from curvlens.operator import Operator


def diagonal(
    H: Operator,
    samples: int = 16,
    tol: float | None = None,
    seed: int = 0,
    chunk: int = 4,
    **budget: Any,
) -> Estimate:
    """Estimate the diagonal `[n]`, with an error for every entry; two products a probe.

    On the range that the other probes have seen the diagonal is exact; on the rest it is `v_i * ((I - P_i) H v_i)`
    for random signs v_i. With `tol` probes are added until the norm of the errors is at most `tol` times that of
    the diagonal. Keeps about four vectors a probe.
    """
    require_square(H, "a diagonal")
    with Run("diagonal", identity(H, seed=seed), **budget) as run:
        sketch = DiagonalSketch(H, run, seed)
        value, error, converged = sketch.until(samples, tol, chunk)
    return Estimate("diagonal", value, error, sketch.count, run.products, converged, run.stopped)


class DiagonalSketch(RangeSketch):
    """`Y = H Ω = Q R` and `Z = H^T Q`; leaving probe i out takes the direction `s_i` out of the basis."""

    kind = "rademacher"

    @property
    def second(self) -> Operator:
        return self.H.T

    def estimate(self) -> tuple[Tensor, Tensor]:
        inside = (self.basis * self.images).sum(0)
        if self.exhausted:
            return inside, torch.full_like(inside, self.tolerance * self.length / self.size**0.5)
        if self.count < 2:
            return torch.full_like(inside, torch.nan), torch.full_like(inside, torch.inf)
        return self._samples(inside)

    def _samples(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and error of the leave-one-out samples, as `leave_one_out_error`, without storing their pairs."""
        m = self.count
        directions = left_out(self.coefficients)
        overlap = directions @ directions.T
        lengths = (directions * self.coefficients).sum(1)  # |(I - P_i) y_i|, with its sign
        lost = vectors.combine(directions, self.basis)
        lost_images = vectors.combine(directions, self.images)
        omega = probes_like(self.H, range(m), self.seed, self.kind)
        values = lost * (lengths.to(lost)[:, None] * omega - lost_images)
        mean = values.mean(0)
        covariance = torch.zeros_like(inside)
        for i in range(m):
            for j in range(i):
                changes = 1.0
                for a, b in ((i, j), (j, i)):
                    # the second direction of the basis of {s_a, s_b}, and what taking it out changes in sample a
                    cosine = overlap[a, b].item()
                    sine = (1 - cosine**2) ** 0.5
                    second = (lost[b] - cosine * lost[a]) / sine
                    image = (lost_images[b] - cosine * lost_images[a]) / sine
                    changes = changes * second * (image + cosine / sine * lengths[a].item() * omega[a])
                covariance += changes
        covariance *= 2 / (m * (m - 1))
        return inside + mean, error_of_mean(values, covariance)
