"""The trace of an operator from products.

- Hutchinson 1989: mean of `v^T H v`; error of the mean; any square operator, two vectors of memory.
- XTrace (Epperly, Tropp, Webber 2024, Alg. 1): the trace on the range seen by all other probes is exact, only the
  rest is estimated; any square operator.
- XNysTrace (the same, Alg. 2): with a Nyström approximation; half the products; positive semidefinite ones only.
The last two store their vectors (two, or one, a probe) and gain where the spectrum decays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens.estimate import vectors
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import Estimate, mean_and_error, shown_pm, student
from curvlens.estimate.run import Run, identity
from curvlens.estimate.sampling import PATIENCE, require_counts, sample
from curvlens.operator import Operator, free_memory

METHODS = ("xtrace", "xnystrace", "hutchinson")


def trace(
    H: Operator,
    samples: int = 32,
    tol: float | None = None,
    seed: int = 0,
    method: str = "xtrace",
    probe: str = "rademacher",
    chunk: int = 4,
    **budget: Any,
) -> Estimate:
    """Estimate `tr H`.

    `samples` is the number of probes: one product each, two for "xtrace". With `tol` probes are added until the
    error is at most `tol |value|`. `probe` is the kind for "hutchinson"; the other two use Gaussian ones.
    `budget`: `max_products`, `max_minutes`, `checkpoint`, `progress` (see `Run`).
    """
    require_square(H, "a trace")
    if method not in METHODS:
        raise ValueError(f"expected a method of {', '.join(METHODS)}, got {method!r}")
    kind = probe if method == "hutchinson" else "gaussian"
    with Run("trace", identity(H, method=method, seed=seed, probe=kind), **budget) as run:
        if method == "hutchinson":

            def measure(indices: range) -> Tensor:
                stack = probes_like(H, indices, seed, kind)
                return vectors.dot(stack, run.apply(H, stack))

            values, converged = sample(run, measure, samples, tol, chunk)
            if not len(values):
                return nothing("trace", run)
            value, error = mean_and_error(values)
            count = len(values)
        else:
            sketch = (RangeSketch if method == "xtrace" else NystromSketch)(H, run, seed)
            value, error, converged = sketch.until(samples, tol, chunk)
            count = sketch.count
    return Estimate("trace", value.item(), error.item(), count, run.products, converged, run.stopped)


def require_square(H: Operator, what: str) -> None:
    if H.domain != H.codomain:
        raise ValueError(f"expected an operator with the same rows and columns for {what}, got {H}")


def nothing(what: str, run: Run) -> Estimate:
    """The result of a budget that allows no sample at all."""
    return Estimate(what, float("nan"), float("inf"), 0, run.products, False, run.stopped)


class Sketch:
    """Vectors kept from all probes so far, and the leave-one-out samples of the trace that follow from them."""

    vectors_a_probe = 1
    kind = "gaussian"

    def __init__(self, H: Operator, run: Run, seed: int):
        self.H, self.run, self.seed = H, run, seed
        self.size = H.domain.size
        self.epsilon = torch.finfo(H.dtype).eps
        self.count = 0

    def until(self, samples: int, tol: float | None, chunk: int) -> tuple[Tensor, Tensor, bool]:
        """Add probes until there are enough: value, error, and whether they are."""
        require_counts(samples, tol, chunk)
        self._require_room(samples)
        self._load(self.run.restore())
        # with as many probes as dimensions the sketch is the operator
        most = min(samples if tol is None else PATIENCE * samples, self.size)
        target, shown, seen = min(samples, most), "", 1
        while target < self.count:  # the same looks at the tolerance as in a run without a break
            target = min(most, target + max(chunk, target // 4))
        while True:
            if self.count >= target or self.exhausted:
                value, error = self.estimate()
                shown = shown_pm(value, error)
                done = self.exhausted or tol is None or bool(error.norm() <= tol * value.norm())
                if done or self.count >= most:
                    self.run.stopped = "samples" if tol is None or not done else "tolerance"
                    return value, error, done
                target = min(most, target + max(chunk, target // 4))
            count = self.run.affordable(min(chunk, target - self.count), self.vectors_a_probe)
            if count <= 0:
                return (*self.estimate(), False)
            self.add(probes_like(self.H, range(self.count, self.count + count), self.seed, self.kind))
            if self.run.shows and self.count >= 2 * seen:
                seen, shown = self.count, shown_pm(*self.estimate())
            self.run.step(self._state, most * self.vectors_a_probe if tol is None else None, shown)

    @property
    def exhausted(self) -> bool:
        return False

    def add(self, omega: Tensor) -> None:
        raise NotImplementedError

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Mean and error of the leave-one-out samples."""
        if self.count < 2:  # nothing is left when one is left out
            return torch.tensor(float("nan")), torch.tensor(float("inf"))
        return leave_one_out_error(*self.leave_one_out())

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """The samples `[m]`, `t_i` from probe i beside all others, and `[m, m]`, `t_ij` beside all but j."""
        raise NotImplementedError

    def _against_probes(self, stacks: list[Tensor], chunk: int = 4) -> list[Tensor]:
        """Inner products of all probes with stacks `[r, n]`: one `[m, r]` each; probes are drawn again."""
        parts: list[list[Tensor]] = [[] for _ in stacks]
        for start in range(0, self.count, chunk):
            omega = probes_like(self.H, range(start, min(start + chunk, self.count)), self.seed, self.kind)
            for part, stack in zip(parts, stacks, strict=True):
                part.append(vectors.gram(omega, stack))
        return [torch.cat(part) for part in parts]

    def _require_room(self, samples: int) -> None:
        count = min(samples, self.size)
        need = count * self.vectors_a_probe * self.size * self.H.dtype.itemsize
        free = free_memory(self.H.device)
        if need > free:
            raise MemoryError(
                f"{count} probes keep {need / 2**30:,.1f} GiB of vectors and {free / 2**30:,.1f} GiB are free; "
                'take fewer samples, or method="hutchinson", which keeps none'
            )

    def _load(self, state: dict[str, Any] | None) -> None:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        raise NotImplementedError


class RangeSketch(Sketch):
    """XTrace: `Y = H Ω = Q R`, `Z = H Q`; rows are vectors, so `y_i = R_i Q`.

    Gram-Schmidt nests: Q of the first probes is the first part of Q, so adding probes loses no product.
    """

    vectors_a_probe = 2

    def __init__(self, H: Operator, run: Run, seed: int):
        super().__init__(H, run, seed)
        self.basis = torch.empty(0, self.size, dtype=H.dtype, device=H.device)
        self.images = self.basis
        self.coefficients = torch.empty(0, 0, dtype=torch.float64)
        self.length = 0.0  # of the longest image, about the Frobenius norm

    @property
    def second(self) -> Operator:
        """What is applied to the basis."""
        return self.H

    @property
    def tolerance(self) -> float:
        return 100 * self.epsilon  # an image shorter than this outside of the range is rounding

    @property
    def exhausted(self) -> bool:
        """An image in the range of the others: the range is complete, and the trace on it exact."""
        return len(self.basis) < self.count or len(self.basis) == self.size

    def add(self, omega: Tensor) -> None:
        images = self.run.apply(self.H, omega)
        fresh, rows, _ = vectors.extend(self.basis, images, self.tolerance)
        if len(fresh):
            self.images = torch.cat([self.images, self.run.apply(self.second, fresh)])
            self.basis = torch.cat([self.basis, fresh])
        grown = torch.zeros(self.count + len(omega), len(self.basis), dtype=torch.float64)
        grown[: self.count, : self.coefficients.shape[1]] = self.coefficients
        grown[self.count :] = rows
        self.coefficients = grown
        self.length = max(self.length, vectors.norm(images).max().item())
        self.count += len(omega)

    def estimate(self) -> tuple[Tensor, Tensor]:
        if self.exhausted:
            inner = vectors.dot(self.basis, self.images).sum()
            return inner, torch.tensor(self.tolerance * self.length, dtype=torch.float64)
        return super().estimate()

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        m = self.count
        self._inner = vectors.gram(self.basis, self.images)  # Q^T H Q
        # Q^T ω_i and (H Q)^T ω_i
        self._on_basis, self._on_images = self._against_probes([self.basis, self.images])
        self._squared = torch.cat([self._squares(i) for i in range(0, m, 4)])
        single = left_out(self.coefficients)[:, None]
        pairs = torch.stack([self._without(_with(single, j)) for j in range(m)], dim=1)
        return self._without(single), pairs

    def _without(self, removed: Tensor) -> Tensor:
        """Samples i of the trace with the directions `removed[i]`, orthonormal `[m, k, m]`, out of the basis.

        `tr(P H P) + c u^T H u`, with P the projection on the rest of the basis and `u = (I - P) ω_i`. The part of
        a Gaussian outside of the basis has a random direction; its length is replaced by the known mean.
        """
        probe = self._on_basis
        overlap = torch.einsum("ikr,ir->ik", removed, probe)
        rest = probe - torch.einsum("ik,ikr->ir", overlap, removed)
        squared = self._squared - probe.square().sum(1) + overlap.square().sum(1)
        scale = (self.size - self.count + removed.shape[1]) / squared
        outside = (
            (probe * self.coefficients).sum(1)
            - ((self._on_images + self.coefficients) * rest).sum(1)
            + ((rest @ self._inner) * rest).sum(1)
        )
        return self._inner.trace() - ((removed @ self._inner) * removed).sum((1, 2)) + scale * outside

    def _squares(self, start: int) -> Tensor:
        omega = probes_like(self.H, range(start, min(start + 4, self.count)), self.seed, self.kind)
        return vectors.norm(omega).square()

    def _load(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.basis = state["basis"].to(self.H.device)
            self.images = state["images"].to(self.H.device)
            self.coefficients, self.length, self.count = (
                state["coefficients"],
                state["length"],
                state["count"],
            )

    def _state(self) -> dict[str, Any]:
        return {
            "basis": self.basis,
            "images": self.images,
            "coefficients": self.coefficients,
            "length": self.length,
            "count": self.count,
        }


def leave_one_out_error(values: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the leave-one-out samples `t_i` and its error, `[m, ...]` and `[m, m, ...]` to `[...]`.

    The `t_i` share their bases, so they are correlated, and `s^2/m` alone is too small, by two for a flat
    spectrum. Given all other probes `t_i` has no error on average, and neither has `t_ij`, without probe j. So
    `cov(t_i, t_j) = E (t_i - t_ij)(t_j - t_ji)`: the other three terms vanish. With it the variance is unbiased.
    """
    m = len(values)
    change = values[:, None] - pairs
    change[range(m), range(m)] = 0
    covariance = (change * change.transpose(0, 1)).sum((0, 1)) / (m * (m - 1))
    return values.mean(0), error_of_mean(values, covariance)


def error_of_mean(values: Tensor, covariance: Tensor) -> Tensor:
    """The error of the mean of samples `[m, ...]` with an estimate of their mean covariance.

    Near a complete range that estimate is mostly noise: cut at zero it would add to the variance on average, not cut
    at all it would leave variances near zero. So it may take away a quarter.
    """
    own = values.var(0) / len(values)
    return (own + torch.maximum(covariance, -own / 4)).sqrt() * student(len(values))


def _with(single: Tensor, j: int) -> Tensor:
    """Orthonormal bases `[m, 2, m]` of the directions i and j; row j is of no meaning."""
    first, second = single[:, 0], single[j, 0]
    second = second - (first @ second)[:, None] * first
    return torch.stack([first, second / second.norm(dim=1, keepdim=True)], dim=1)


def left_out(coefficients: Tensor) -> Tensor:
    """Unit vectors `[m, m]`, row i orthogonal to every row of the coefficients but the i-th."""
    identity = torch.eye(len(coefficients), dtype=coefficients.dtype)
    columns = torch.linalg.solve_triangular(coefficients, identity, upper=False)
    return (columns / columns.norm(dim=0)).T


class NystromSketch(Sketch):
    """XNysTrace: with `Y = H Ω` and `C C^T = Ω^T Y`, `H ≈ B^T B`, `B = C^{-1} Y` (rows are vectors)."""

    def __init__(self, H: Operator, run: Run, seed: int):
        super().__init__(H, run, seed)
        self.images = torch.empty(0, self.size, dtype=H.dtype, device=H.device)

    def add(self, omega: Tensor) -> None:
        self.images = torch.cat([self.images, self.run.apply(self.H, omega)])
        self.count += len(omega)

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        m, n = self.count, self.size
        (core,) = self._against_probes([self.images])
        probe_gram = self._probe_gram()
        shift, root = self._factor((core + core.T) / 2, probe_gram)
        weights = torch.linalg.solve_triangular(root, torch.eye(m, dtype=root.dtype), upper=False)  # C^{-1}
        # the Gram matrix of B, formed from B itself: from that of Y it would lose all digits
        factors = vectors.combine(weights, self._shifted(shift))
        gram = vectors.gram(factors, factors)
        # without the probes J the approximation loses K_JJ^{-1} in their own quadratic forms, L_JJ K_JJ^{-1} in trace
        K = weights.T @ weights
        L = weights.T @ gram @ weights
        outside = torch.linalg.inv(probe_gram)
        whole = gram.trace() - shift * n
        k, l, o = K.diagonal(), L.diagonal(), outside.diagonal()
        # the part of a Gaussian that the others have not seen, scaled to the length that it has on average
        values = whole - l / k + (n - m + 1) * o / k
        det_k = k[:, None] * k - K.square()
        det_o = o[:, None] * o - outside.square()
        lost = (k[None] * l[:, None] - 2 * K * L + k[:, None] * l[None]) / det_k
        pairs = whole - lost + (n - m + 2) * (k[None] / det_k) / (o[None] / det_o)
        return values, pairs

    def _shifted(self, shift: float) -> Tensor:
        """The images under `H + shift I`, whose trace is larger by `shift n`."""
        shifted = self.images.clone()
        for i in range(self.count):
            shifted[i] += shift * probes_like(self.H, [i], self.seed, self.kind)[0]
        return shifted

    def _probe_gram(self) -> Tensor:
        rows = []
        for start in range(0, self.count, 4):
            omega = probes_like(self.H, range(start, min(start + 4, self.count)), self.seed, self.kind)
            rows.append(self._against_probes([omega])[0].T)
        return torch.cat(rows)

    def _factor(self, core: Tensor, probe_gram: Tensor) -> tuple[float, Tensor]:
        """The smallest shift, at rounding, that makes the core positive definite, and its Cholesky factor."""
        length = vectors.norm(self.images).max().item() or 1.0
        shift = self.epsilon * length / self.size**0.5
        for _ in range(6):
            root, failed = torch.linalg.cholesky_ex(core + shift * probe_gram)
            if not failed:
                return shift, root
            shift *= 10
        raise ValueError(
            "expected a positive semidefinite operator for XNysTrace, got one with negative curvature; "
            'use method="xtrace"'
        )

    def _load(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.images, self.count = state["images"].to(self.H.device), state["count"]

    def _state(self) -> dict[str, Any]:
        return {"images": self.images, "count": self.count}
