"""Where gradient descent goes from here, by the local quadratic, beside where it really goes.

On `L(θ + x) = L + g·x + ½ xᵀHx` gradient descent at rate η makes the gradient `(I − ηH)^t g` after t steps. In the
eigenvectors of H every mode goes by itself, and so with momentum, by the optimizer's own recurrence for a number:

    L_t = L + Σ_i w_i (x_i + ½ λ_i x_i²),   w_i = (v_i·g)²,   x_i the place along mode i in units of v_i·g.

By Lanczos from g, m products give m nodes `λ_i` and weights `w_i`, a Gauss quadrature: as `L_t` is a polynomial of
degree 2t − 1 in H, they give the first m steps exactly. The other way round, steps and the changes of the gradient that
go with them are products with H: the curvature can be read off a trajectory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.curvature import hessian
from curvlens.estimate import vectors
from curvlens.estimate.lanczos import eigsh
from curvlens.estimate.result import pm, table
from curvlens.landscape import Landscape
from curvlens.operator import Operator
from curvlens.progress import Progress
from curvlens.structured import Diagonal

TOLERANCE = 0.1  # the share of the change so far that a prediction may be off by
WAYS = ("lanczos", "eigen")
WINDOW = 20  # of the first steps, from which the curvature at the start is read
NEGLIGIBLE = 1e-3  # directions that the steps hardly took, as a share of the one they took most


@dataclass(frozen=True)
class Descent:
    """Gradient descent, with heavy-ball or Nesterov momentum from rest, as torch's SGD does it."""

    rate: float
    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0  # λ of ½ λ ‖θ‖², which is then part of the loss

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Descent:
        """The settings of an SGD, the same in all its groups."""
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(
                f"expected SGD or a rate, got {type(optimizer).__name__}; its steps are no fixed map of H"
            )
        found = {
            (
                float(g["lr"]),
                float(g["momentum"]),
                bool(g["nesterov"]),
                float(g["weight_decay"]),
                float(g["dampening"]),
            )
            for g in optimizer.param_groups
        }
        if len(found) > 1:
            raise ValueError("expected the same settings in all parameter groups, got different ones")
        rate, momentum, nesterov, decay, dampening = found.pop()
        if dampening:
            raise ValueError(f"expected SGD without dampening, got {dampening}")
        return cls(rate, momentum, nesterov, decay)

    def step(self, x: Tensor, gradient: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The next place and momentum."""
        buffer = self.momentum * buffer + gradient
        return x - self.rate * (gradient + self.momentum * buffer if self.nesterov else buffer), buffer


@dataclass(frozen=True)
class Modes:
    """The quadratic as its gradient sees it: eigenvalues (or Ritz values) and the gradient's squared parts there."""

    values: Tensor  # [m], float64
    weights: Tensor  # [m]
    exact: float  # the number of steps that follow without error but rounding's
    products: int

    def losses(self, descent: Descent, steps: int) -> Tensor:
        """`L_t − L_0` for t = 0 … steps."""
        x, buffer = torch.zeros_like(self.values), torch.zeros_like(self.values)
        found = [0.0]
        for _ in range(steps):
            x, buffer = descent.step(x, 1 + self.values * x, buffer)
            found.append((self.weights * (x + 0.5 * self.values * x.square())).sum().item())
        return torch.tensor(found, dtype=torch.float64)


@dataclass(frozen=True, repr=False)
class Recovered:
    """Curvature read off steps and changes of the gradient, without a product."""

    along: Tensor  # sᵀy / sᵀs of each step: the curvature along it, averaged over it
    values: Tensor  # eigenvalues of H in the span of the steps, ascending
    residual: float  # of the largest: on a quadratic, an eigenvalue of H lies within it

    @property
    def largest(self) -> float:
        return self.values[-1].item()

    def __repr__(self) -> str:
        return f"largest curvature {pm(self.largest, self.residual)} from {len(self.along)} steps"


@dataclass(frozen=True, repr=False)
class Trajectory:
    """Losses for t = 0 … T, predicted and true, and curvature before and as the trajectory shows it."""

    descent: Descent
    predicted: Tensor  # [T + 1]
    true: Tensor  # [T + 1]; infinite from where the loss overflows
    modes: Modes
    sharpness: float  # λ_max of H at the start
    sharpness_error: float
    recovered: Recovered | None  # None after a single step

    @property
    def errors(self) -> Tensor:
        return (self.predicted - self.true).abs()

    def horizon(self, tolerance: float = TOLERANCE) -> int:
        """The number of steps before the prediction is off by more than `tolerance` of the change so far."""
        moved = (self.true - self.true[0]).abs().cummax(0).values
        off = ~(self.errors <= tolerance * moved)
        off[0] = False
        return int(off.nonzero()[0].item()) - 1 if bool(off.any()) else len(off) - 1

    def __repr__(self) -> str:
        T = len(self.true) - 1
        at = sorted({0, *(round(T ** (i / 5)) for i in range(6))})
        rows = [["step", "predicted", "true"]]
        rows += [[str(t), f"{self.predicted[t].item():.6g}", f"{self.true[t].item():.6g}"] for t in at]
        d = self.descent
        momentum = f", momentum {d.momentum:g}{' (Nesterov)' if d.nesterov else ''}" if d.momentum else ""
        lines = [
            f"gradient descent at rate {d.rate:g}{momentum}, {T} steps, from {len(self.modes.values)} modes "
            f"({self.modes.products} products)",
            table(rows),
            f"  predicted to {TOLERANCE:.0%} for {self.horizon()} steps; largest curvature at the start "
            f"{pm(self.sharpness, self.sharpness_error)}",
        ]
        if self.recovered is not None:
            lines.append(f"  read off the trajectory: {self.recovered}")
        return "\n".join(lines)


def gradient_descent(
    land: Landscape,
    rate: float | torch.optim.Optimizer,
    steps: int = 50,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    by: str = "lanczos",
    k: int | None = None,
    seed: int = 0,
) -> Trajectory:
    """The losses of full-batch gradient descent from the present weights, on the local quadratic and in truth.

    `rate` is a number, or an SGD optimizer whose settings are taken (its momentum starts at rest). `by="lanczos"`: from
    `k` products with H, from the gradient on (default `min(steps, 30)`): the first k steps exactly, later ones nearly.
    `by="eigen"`: from the `k` eigenvectors of largest magnitude (default 10) and the rest of the gradient as one mode,
    at its mean curvature. The model is not moved. Cost: that, a gradient and a forward pass a step,
    and the largest eigenvalue.
    """
    if isinstance(rate, torch.optim.Optimizer):
        taken = Descent.of(rate)
    else:
        taken = Descent(float(rate), momentum, nesterov)
    if not taken.rate > 0 or steps < 1:
        raise ValueError(f"expected a positive rate and at least one step, got {taken.rate} and {steps}")
    if by not in WAYS:
        raise ValueError(f"expected by to be one of {', '.join(WAYS)}, got {by!r}")
    P = land.blocks.size
    start = land.blocks.from_parameters(land.parameters())
    H: Operator = hessian(land)
    if taken.decay:
        H = H + Diagonal(torch.full_like(start, taken.decay), land.blocks)
    gradient = land.gradient() + taken.decay * start
    if by == "lanczos":
        modes = krylov_modes(H, gradient, min(P, k or min(steps, 30)))
    else:
        modes = eigen_modes(H, gradient, min(P, k or 10), seed)
    top = eigsh(H, 1, "LA", start=gradient, copies=False, seed=seed, progress=False)
    losses, places, gradients = _followed(land, taken, start, gradient, steps)
    return Trajectory(
        taken,
        losses[0] + modes.losses(taken, steps),
        losses,
        modes,
        top.values[0].item(),
        top.residuals[0].item(),
        recovered(torch.stack(places), torch.stack(gradients)) if len(places) > 1 else None,
    )


def krylov_modes(H: Operator, gradient: Tensor, m: int) -> Modes:
    """Nodes and weights of the Gauss quadrature of `gᵀ f(H) g`, by m steps of Lanczos from g. Cost: m products."""
    length = gradient.double().norm().item()
    if length == 0:
        raise ValueError(
            "expected a gradient that is not zero: from a minimum, gradient descent goes nowhere"
        )
    basis = torch.empty(m, len(gradient), dtype=H.dtype, device=H.device)
    basis[0] = gradient / length
    T = torch.zeros(m, m, dtype=torch.float64)
    complete = False
    for j in range(m):
        image = (H @ basis[j])[None]
        size = vectors.norm(image)[0].item()
        entries = vectors.project_out(image, basis[: j + 1])
        T[j, j] = entries[0, j]
        rest = vectors.norm(image)[0].item()
        complete = rest <= 10 * torch.finfo(H.dtype).eps * max(size, T.diagonal().abs().max().item())
        if complete or j + 1 == m:
            T = T[: j + 1, : j + 1]
            break
        T[j, j + 1] = T[j + 1, j] = rest
        basis[j + 1] = image[0] / rest
    values, coordinates = torch.linalg.eigh(T)
    return Modes(values, length**2 * coordinates[0].square(), math.inf if complete else len(T), len(T))


def eigen_modes(H: Operator, gradient: Tensor, k: int, seed: int = 0) -> Modes:
    """The k eigenvectors of largest magnitude, and one mode for the rest r of the gradient, at `rᵀHr / rᵀr`."""
    P = len(gradient)
    if k == P:
        values, directions = torch.linalg.eigh(H.dense().double())
        return Modes(values, (directions.T @ gradient.to(directions)).square().cpu(), math.inf, P)
    pairs = eigsh(H, k, "LM", copies=False, seed=seed, progress=False)
    parts = pairs.vectors.T.double() @ gradient.double()
    rest = gradient - pairs.vectors @ parts.to(gradient)
    square = rest.double().square().sum()
    mean = rest.double() @ (H @ rest).double() / square.clamp(min=1e-300)
    values = torch.cat([pairs.values, mean[None].cpu()])
    return Modes(values, torch.cat([parts.square(), square[None]]).cpu(), 1, pairs.products + 1)


def _followed(
    land: Landscape, descent: Descent, start: Tensor, gradient: Tensor, steps: int
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The true losses, and the first places and gradients, of gradient descent from here."""
    losses = torch.full((steps + 1,), math.inf, dtype=torch.float64)
    place, buffer = start, torch.zeros_like(start)
    places, gradients = [place], [gradient]
    with Progress("gradient descent", steps) as progress:
        for t in range(steps + 1):
            try:
                there = land.at(place)
                losses[t] = there.value().item() + 0.5 * descent.decay * place.double().square().sum().item()
                if t:
                    gradient = there.gradient() + descent.decay * place
                if 0 < t <= WINDOW:
                    places.append(place)
                    gradients.append(gradient)
            except FloatingPointError:  # it diverged
                break
            place, buffer = descent.step(place, gradient, buffer)
            progress.update(t)
    return losses, places, gradients


def recovered(places: Tensor, gradients: Tensor) -> Recovered:
    """Curvature from the weights `[T + 1, P]` of a trajectory and the gradients there, of the same loss.

    With `S` the steps and `Y` the changes of the gradient, `Y = S H` on a quadratic; from the singular vectors
    `S = U Σ Vᵀ`, `V` spans the steps and `Yᵀ U Σ⁻¹ = H V`. Its eigenvalues in the span never exceed `λ_max`. On another
    function H is a mean over the steps. Directions that the steps hardly took are left out.
    """
    if len(places) < 2 or places.shape != gradients.shape:
        raise ValueError(
            f"expected places and gradients [T + 1, P] of at least one step, got {list(places.shape)} and "
            f"{list(gradients.shape)}"
        )
    S, Y = places.double().diff(dim=0).cpu(), gradients.double().diff(dim=0).cpu()
    moved = S.square().sum(1) > 0
    S, Y = S[moved], Y[moved]
    if not len(S):
        raise ValueError("expected steps that move, got none")
    left, sizes, right = torch.linalg.svd(S, full_matrices=False)
    kept = sizes > NEGLIGIBLE * sizes[0]
    left, sizes, right = left[:, kept], sizes[kept], right[kept]
    images = (left / sizes).T @ Y  # H V, by rows
    inside = images @ right.T
    values, coordinates = torch.linalg.eigh((inside + inside.T) / 2)
    top = coordinates[:, -1]
    residual = (top @ images - values[-1] * (top @ right)).norm().item()
    return Recovered((S * Y).sum(1) / S.square().sum(1), values, residual)
