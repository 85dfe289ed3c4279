"""Loss-landscape convergence: how the mean loss settles as samples are added (paper B, Theorem 7, and its sources).

Everything is shown beside what it must be compared with: the differences beside the bound with the true curvature and
beside losses that have no model, the criterion in the sharpest directions beside random directions of the same number,
the closed form beside sampling. What is left is what curvature really says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlens.curvature import hessian
from curvlens.estimate.lanczos import eigsh
from curvlens.estimate.probes import probes
from curvlens.estimate.result import table
from curvlens.landscape import Landscape
from curvlens.progress import Progress
from curvlens.scaling import criteria
from curvlens.scaling.criteria import Criterion
from curvlens.scaling.difference import Null, differences, null, running_means, shares, slope, spread
from curvlens.scaling.need import Need, need
from curvlens.scaling.samples import Samples

TAYLOR = 0.1  # the relative error at which the Taylor polynomial is said to break
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
LADDER_DRAWS = 8


@dataclass(frozen=True)
class Constants:
    """What bounds the differences: `ℒ`, `G` and `M` over the samples, at θ."""

    loss: float  # the largest loss of a sample, by magnitude
    gradient: float  # the largest norm of a sample's gradient; zero at a minimum that all samples share
    curvature: float  # the largest spectral norm of a sample's Hessian
    taken: int  # from so many samples


@dataclass(frozen=True)
class Terms:
    """`S²(σ) = value + slope σ² + curvature σ⁴`: the spread of the samples' losses around θ, by Taylor's polynomial.

    `E (L_{k+1} − L_k)² ≈ S²/(k (k + 1))` for any order of the samples; of `S²` only the last two terms know the model.
    """

    value: float
    slope: float
    curvature: float

    def share(self, sigma: float) -> float:
        """The part of `S²(σ)` that is curvature's."""
        whole = self.value + self.slope * sigma**2 + self.curvature * sigma**4
        return self.curvature * sigma**4 / whole if whole > 0 else math.nan

    @property
    def matters(self) -> float:
        """The σ at which curvature's term is as large as the constant one."""
        return (self.value / self.curvature) ** 0.25 if self.curvature > 0 else math.inf


@dataclass(frozen=True)
class Taylor:
    """The error of the samples' loss increments by the Taylor polynomial, relative, for Gaussian steps of size σ."""

    sigmas: tuple[float, ...]
    full: tuple[float, ...]  # steps in all directions
    top: tuple[float, ...]  # steps in the sharpest directions

    def radius(self, errors: tuple[float, ...]) -> float | None:
        """The σ at which the error passes 10 %, between the steps of the ladder; None if it does not there."""
        for (s, low), (t, high) in pairwise(zip(self.sigmas, errors, strict=True)):
            if low <= TAYLOR and not high <= TAYLOR:
                finite = math.isfinite(high) and low > 0
                return s * (t / s) ** (math.log(TAYLOR / low) / math.log(high / low)) if finite else t
        return None


@dataclass(frozen=True, repr=False)
class LandscapeConvergence:
    """The result of `landscape_convergence`; tensors `[n − 1]` belong to k = 1 … n − 1."""

    losses: Tensor  # [n], of the samples at θ
    weights: Tensor  # [n], their scored tokens
    moved: Tensor  # [draws, n], losses at θ + z, z ~ N(0, σ² I)
    delta1: Criterion
    delta2: Criterion
    delta2_top: Criterion
    delta2_random: Criterion
    constants: Constants
    terms: Terms
    taylor: Taylor
    null: Null
    sigma: float
    distance: float  # ε of Δ₁: as far as the Gaussian steps of Δ₂ go
    eigenvalues: Tensor  # [D], of the mean loss, largest by magnitude
    parameters: int
    loss_name: str

    @property
    def steps(self) -> Tensor:
        """k = 1 … n − 1."""
        return torch.arange(1, len(self.losses), dtype=torch.float64)

    @property
    def means(self) -> Tensor:
        """`L_k`, k = 1 … n."""
        return running_means(self.losses, self.weights)

    @property
    def changes(self) -> Tensor:
        """`L_{k+1} − L_k` at θ."""
        return differences(self.losses, self.weights)

    @property
    def slope(self) -> float:
        """The slope of `log |L_{k+1} − L_k|` against `log k`; see `null.slopes` for what it is without a model."""
        return slope(self.steps, self.changes.abs())

    def ratio(self, criterion: Criterion) -> float:
        """A criterion in a subspace over Δ₂, in the median over k, both sampled."""
        return (criterion.sampled / self.delta2.sampled).median().item()

    @property
    def excess(self) -> float:
        """`(Δ₂^(D) − a²)` over the same in random directions, in the median over k, by the exact closed forms."""
        top, random = self.delta2_top.quadratic, self.delta2_random.quadratic
        assert top is not None
        assert random is not None
        own = self.changes.square()
        return ((top - own) / (random - own)).median().item()

    def bound(self, distance: float = 0.0, common_minimum: bool = False) -> Tensor:
        """`(2ℒ + 2G r + M r²) w_{k+1}/W_{k+1}` at distance r of θ, for the polynomials of second degree.

        `common_minimum` leaves out the gradients, as the theorem does. That needs a minimum that all samples share, or
        losses that are nowhere negative and curve nowhere by more than M: then `‖∇ℓ‖² ≤ 2Mℓ`, and
        `|ℓ_{k+1} − L_k| ≤ max ℓ_i(w) ≤ ℒ + √(2Mℒ) r + ½ M r² ≤ 2ℒ + M r²`.
        """
        c = self.constants
        first = 0.0 if common_minimum else 2 * c.gradient * distance
        return (2 * c.loss + first + c.curvature * distance**2) * shares(self.weights)

    def needed(
        self, tol: float, of: str = "step", around: bool = True, confidence: float = 0.95, seed: int = 0
    ) -> Need:
        """How many samples until more data moves the landscape by less than `tol`, root mean square.

        of="step": by one sample more, `S/√(k(k+1)) ≤ tol`; "rest": by all that could come, `S/√k ≤ tol`. `around`
        takes the mean over `N(θ, σ² I)`, else θ alone. Holds for independent samples, beyond the measured number too.
        """
        values = self.moved if around else self.losses[None]
        return need(values, self.weights, tol, of, confidence, seed)

    def findings(self) -> list[str]:
        """What the measurement says, and what it cannot say, in words."""
        low, high = self.null.slopes
        inside = low <= self.slope <= high
        said = [
            f"The differences fall with slope {self.slope:.3f}; losses without a model with {self.null.slope:.3f} "
            f"({low:.3f} to {high:.3f}). "
            + (
                "The slope says nothing of the model."
                if inside
                else "The samples are not like independent ones: their order matters, or their spread changes."
            )
        ]
        here = (self.changes.abs() / self.bound()).median().item()
        there = (self.delta1.sampled / self.bound(self.distance)).median().item()
        said.append(
            f"The differences are {here:.2g} of the bound at θ and {there:.2g} of it at distance {self.distance:.3g}, "
            "in the median over k."
        )
        said.append(
            f"At σ = {self.sigma:g} curvature makes {self.terms.share(self.sigma):.2g} of the spread; it would be as "
            f"large as the constant part at σ = {self.terms.matters:.2g}."
        )
        for name, errors in (("all", self.taylor.full), ("the sharpest", self.taylor.top)):
            radius = self.taylor.radius(errors)
            where = (
                f"at σ = {radius:.2g}"
                if radius is not None
                else f"nowhere between {self.taylor.sigmas[0]:g} and {self.taylor.sigmas[-1]:g}"
            )
            said.append(f"In {name} directions the Taylor polynomial breaks (10 % error) {where}.")
        said.append(
            f"Δ₂^({len(self.eigenvalues)})/Δ₂ is {self.ratio(self.delta2_top):.3g} in the sharpest directions and "
            f"{self.ratio(self.delta2_random):.3g} in as many random ones; less the part at θ itself, which needs no "
            f"direction, the sharpest move the landscape {self.excess:.3g} times as far as the random ones."
        )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        made: dict[str, Any] = {
            "samples": len(self.losses),
            "scored": self.weights.sum().item(),
            "loss": self.loss_name,
            "parameters": self.parameters,
            "sigma": self.sigma,
            "distance": self.distance,
            "k": self.steps.tolist(),
            "differences": self.changes.tolist(),
            "bound": self.bound().tolist(),
            "bound at the distance": self.bound(self.distance).tolist(),
            "slope": self.slope,
            "null": {
                "mean": self.null.mean.tolist(),
                "slope": self.null.slope,
                "slopes 95%": list(self.null.slopes),
            },
            "constants": vars(self.constants),
            "terms": vars(self.terms),
            "taylor": {**vars(self.taylor)},
            "eigenvalues": self.eigenvalues.tolist(),
            "findings": self.findings(),
        }
        for key in ("delta1", "delta2", "delta2_top", "delta2_random"):
            criterion = getattr(self, key)
            made[key] = {
                name: value.tolist() for name, value in vars(criterion).items() if isinstance(value, Tensor)
            }
        return made

    def to_json(self, path: str | Path | None = None) -> str:
        """The numbers as JSON; also written to a file if a path is given."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __repr__(self) -> str:
        n = len(self.losses)
        chosen = sorted({round(n ** (i / 6)) for i in range(7)} - {n} | {n - 1})
        rows = [["k", "|L_{k+1}−L_k|", "null", "bound", "Δ₁", "Δ₂", "closed", self.delta2_top.name, "random"]]
        for k in chosen:
            at = k - 1
            assert self.delta2.quadratic is not None
            values = (
                self.changes.abs(),
                self.null.mean,
                self.bound(),
                self.delta1.sampled,
                self.delta2.sampled,
                self.delta2.quadratic,
                self.delta2_top.sampled,
                self.delta2_random.sampled,
            )
            rows.append([str(k), *(f"{value[at].item():.2e}" for value in values)])
        head = f"landscape convergence, {n:,} samples, {self.loss_name}, {self.parameters:,} parameters"
        lines = "\n".join(f"  {line}" for line in self.findings())
        return f"{head}\n{table(rows)}\n{lines}"


def landscape_convergence(
    model: Any,
    samples: Any,
    loss: Any = "auto",
    *,
    sigma: float = 1e-3,
    draws: int = 32,
    dims: int = 10,
    norms: int | None = None,
    sigmas: Iterable[float] = LADDER,
    seed: int = 0,
    **landscape: Any,
) -> LandscapeConvergence:
    """How the mean loss over the first k samples changes with the next one, around the model's present weights θ.

    `samples` are batches as `Landscape` takes them, or a Landscape stands for model and samples; each sample (sequence)
    counts with its scored tokens, in the order given: shuffle data that is sorted. `sigma`: the size of the Gaussian
    steps of Δ₂ in each direction; Δ₁ goes `σ√P` far. `draws`: steps, and probes of the closed form. `dims`: the `D` of
    Δ₂^(D). `norms`: take M from so many samples, all of them by default. `sigmas`: where to try the Taylor polynomial.

    Cost for n samples: `4 draws` and `2 · 8` a sigma forward passes, `6 draws + 2 D²` gradients over all data, and a
    gradient and 10 to 40 Hessian products of each sample.
    """
    land = model if isinstance(model, Landscape) else Landscape(model, samples, loss, **landscape)
    _check(sigma, draws, dims)
    every = Samples(land)
    n, P = len(every), land.blocks.size
    if n < 2:
        raise ValueError(f"expected at least two samples with a scored token, got {n}")
    dims = min(dims, P)
    losses, weights = every.losses(), every.weights
    distance = sigma * math.sqrt(P)

    def draw(count: int, shift: int) -> Tensor:
        return probes(land.blocks, range(count), seed + shift, "gaussian", land.dtype, land.device)

    # the sharpest directions of the mean loss, and as many random ones
    pairs = eigsh(hessian(land), k=dims, seed=seed, copies=False)
    top = pairs.vectors
    random, _ = torch.linalg.qr(draw(dims, 1).T)
    inside = torch.randn(draws, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    with Progress("landscape convergence", 5 * draws) as progress:
        done = 0

        def each(count: int, function: Callable[[int], Any]) -> list[Any]:
            nonlocal done
            found = []
            for i in range(count):
                found.append(function(i))
                done += 1
                progress.update(done)
            return found

        steps = draw(draws, 0)
        moved = torch.stack(each(draws, lambda i: every.losses(sigma * steps[i])))
        forms = each(draws, lambda i: every.along(steps[i]))
        unit = draw(draws, 2)
        ahead = torch.stack(each(draws, lambda i: every.losses(distance * unit[i] / unit[i].norm())))
        subspaces = {}
        for name, basis in (("top", top), ("random", random)):
            coordinates = inside.to(basis)
            at = torch.stack(each(draws, lambda i: every.losses(sigma * (basis @ coordinates[i]))))  # noqa: B023
            subspaces[name] = at, *every.within(basis)

    first, second = (torch.stack(part) for part in zip(*forms, strict=True))
    gradients = criteria.gradient_differences(every.gradients(), weights)
    closed = criteria.in_full_space(losses, gradients.steps, second, weights, sigma)
    exact = torch.zeros(n - 1, dtype=torch.float64)
    named = {"top": f"Δ₂^({dims})", "random": f"Δ₂ in {dims} random directions"}
    within = {
        name: criteria.squared(
            named[name], at, weights, (criteria.in_subspace(losses, one, two, weights, sigma), exact)
        )
        for name, (at, one, two) in subspaces.items()
    }
    curvatures = every.norms(norms)
    ladder = tuple(sigmas)
    return LandscapeConvergence(
        losses=losses,
        weights=weights,
        moved=moved,
        delta1=criteria.absolute(ahead, weights),
        delta2=criteria.squared("Δ₂", moved, weights, closed),
        delta2_top=within["top"],
        delta2_random=within["random"],
        constants=Constants(
            losses.abs().max().item(), gradients.largest, curvatures.max().item(), len(curvatures)
        ),
        terms=_terms(losses, gradients.spread, second, weights),
        taylor=Taylor(
            ladder,
            _taylor(every, losses, ladder, steps, first, second),
            _taylor(every, losses, ladder, inside.to(top) @ top.T, *_in_directions(subspaces["top"], inside)),
        ),
        null=null(losses, weights, seed=seed),
        sigma=sigma,
        distance=distance,
        eigenvalues=pairs.values,
        parameters=P,
        loss_name=land.loss.name,
    )


def _check(sigma: float, draws: int, dims: int) -> None:
    if not sigma > 0:
        raise ValueError(f"expected a positive sigma, got {sigma}")
    if draws < 4:
        raise ValueError(f"expected at least 4 draws, for an error that means something, got {draws}")
    if dims < 1:
        raise ValueError(f"expected at least one direction, got dims={dims}")


def _terms(losses: Tensor, gradients: float, forms: Tensor, weights: Tensor) -> Terms:
    """Of `Var_i (ℓ_i + σ g_i·v + ½ σ² vᵀH_i v)` over samples, in the mean over Gaussian v."""
    mixed = spread(losses + forms, weights).square() - spread(losses - forms, weights).square()  # 4 cov
    return Terms(
        spread(losses, weights).square().item(),
        gradients + mixed.mean().item() / 4,
        spread(forms, weights).square().mean().item() / 4,
    )


def _in_directions(subspace: tuple[Tensor, Tensor, Tensor], inside: Tensor) -> tuple[Tensor, Tensor]:
    """`g_i · U z` and `zᵀ Uᵀ H_i U z` for steps z, `[draws, n]` each."""
    _, first, second = subspace
    return inside @ first.T, torch.einsum("ma,iab,mb->mi", inside, second, inside)


def _taylor(
    every: Samples,
    losses: Tensor,
    sigmas: tuple[float, ...],
    steps: Tensor,
    first: Tensor,
    second: Tensor,
) -> tuple[float, ...]:
    """`‖true − polynomial‖ / ‖true‖` of the increments `ℓ_i(θ + σ v) − ℓ_i(θ)`, over samples and a few steps."""
    found = []
    count = min(LADDER_DRAWS, len(steps))
    for sigma in sigmas:
        true = torch.stack([every.losses(sigma * steps[i]) for i in range(count)]) - losses
        polynomial = sigma * first[:count] + sigma**2 / 2 * second[:count]
        found.append(((true - polynomial).norm() / true.norm()).item())
    return tuple(found)
