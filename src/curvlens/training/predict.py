"""What a step does to the loss, by Taylor's polynomial of first and second degree, beside what it really does.

    L(θ + t s) − L(θ) = t g·s + ½ t² sᵀHs + O(t³)

with the gradient `g` and the Hessian `H` at θ. The error of the first degree falls as t², that of the second as t³.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.curvature import hessian
from curvlens.landscape import Landscape, Parameters

TOLERANCE = 0.1  # the share of the predicted terms that an error may be before the polynomial is said to fail
HIGHEST, LOWEST = 10, -30  # the ladder of multiples, as powers of two
BISECTIONS = 5
ROUNDINGS = 8  # of a loss, that the difference of two may be off by


class Step:
    """What a stretch of training did to the weights: `with Step(land) as step: optimizer.step()`.

    Keeps a copy of the trainable weights from before, `start`, and their change, `vector`, flat over the blocks.
    """

    def __init__(self, land: Landscape):
        self.land = land
        self.start: Parameters = {}
        self._vector: Tensor | None = None

    def __enter__(self) -> Step:
        self.start = _copied(self.land)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._vector = self._change(_copied(self.land))

    @classmethod
    def between(cls, land: Landscape, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Step:
        """From weights before and after, such as two copies of `model.state_dict()`; the frozen are passed over."""
        step = cls(land)
        names = list(land.parameters())
        for what, weights in (("before", before), ("after", after)):
            missing = [name for name in names if name not in weights]
            if missing:
                raise KeyError(
                    f"expected every trainable parameter in the weights {what}, got none for {missing[0]!r}"
                )
        step.start = _copied(land.at({name: before[name] for name in names}))
        step._vector = step._change(_copied(land.at({name: after[name] for name in names})))
        return step

    def _change(self, end: Parameters) -> Tensor:
        return self.land.blocks.from_parameters({name: end[name] - p for name, p in self.start.items()})

    @property
    def vector(self) -> Tensor:
        if self._vector is None:
            raise ValueError(
                "expected a step that was taken, got none; change the weights inside of the with block"
            )
        return self._vector


def _copied(land: Landscape) -> Parameters:
    return {name: p.clone() for name, p in land.parameters().items()}


@dataclass(frozen=True, repr=False)
class LossPrediction:
    """The change of the loss by a step: predicted by both degrees, and true."""

    loss: float  # L(θ), before the step
    first: float  # g·s
    second: float  # ½ sᵀHs
    change: float  # L(θ + s) − L(θ)
    rounding: float  # about what the change, a difference of two losses, is off by
    length: float  # ‖s‖
    tolerance: float
    radii: (
        tuple[float, float] | None
    )  # multiples of the step at which each degree fails; None where not asked for

    @property
    def predicted(self) -> tuple[float, float]:
        """The change by the first degree, and by the second."""
        return self.first, self.first + self.second

    @property
    def errors(self) -> tuple[float, float]:
        """`|predicted − true|` of each degree."""
        return abs(self.predicted[0] - self.change), abs(self.predicted[1] - self.change)

    @property
    def curvature(self) -> float:
        """`sᵀHs / ‖s‖²`, along the step."""
        return 2 * self.second / self.length**2

    @property
    def best(self) -> float:
        """The multiple of the step at which the second degree is lowest; infinite where it has no minimum ahead."""
        if self.first >= 0:
            return 0.0
        return -self.first / (2 * self.second) if self.second > 0 else math.inf

    def __repr__(self) -> str:
        lines = [
            f"loss {self.loss:.6g}, a step of length {self.length:.3g} with curvature {self.curvature:.4g} along it",
            f"  true change   {self.change:+.6g} ± {self.rounding:.1g} (rounding)",
        ]
        for degree, predicted, error in zip(("first", "second"), self.predicted, self.errors, strict=True):
            lines.append(f"  {degree + ' degree':<13} {predicted:+.6g}, off by {error:.2g}")
        if self.radii is not None:
            one, two = (
                f"at {radius:.3g}" if math.isfinite(radius) else f"not up to {2**HIGHEST}"
                for radius in self.radii
            )
            lines.append(
                f"  fails by {self.tolerance:.0%}: the first degree {one}, the second {two} times the step"
            )
        best = (
            "has no minimum ahead"
            if math.isinf(self.best)
            else f"is lowest at {self.best:.3g} times the step"
        )
        lines.append(f"  along the step the second degree {best}")
        return "\n".join(lines)


def predict_loss(
    land: Landscape,
    step: Tensor | Mapping[str, Tensor] | Step,
    *,
    radius: bool = True,
    tolerance: float = TOLERANCE,
) -> LossPrediction:
    """The change of the loss by a step from θ, by Taylor's polynomial of first and second degree, and the true one.

    `step`: a flat vector `[P]` over the blocks, `{name: tensor}` of blocks or parameters (names left out do not move),
    or a `Step` that was recorded, which is then seen from where it began. `radius`: also find the multiple `t` of the
    step at which each degree fails: where its error first passes `tolerance (t |g·s| + ½ t² |sᵀHs|)`, on a ladder of
    powers of two, made finer by bisection. Cost: a gradient, a product and two forward passes; some 20 more for the
    radii. In float32 a small change drowns in the rounding of the loss, which is stated: `Landscape(dtype=...)`.
    """
    if not tolerance > 0:
        raise ValueError(f"expected a positive tolerance, got {tolerance}")
    if isinstance(step, Step):
        land, vector = land.at(step.start), step.vector.to(land.device, land.dtype)
    else:
        vector = flat(land, step)
    length = vector.double().norm().item()
    if not math.isfinite(length) or length == 0:
        raise ValueError(f"expected a finite step that moves the weights, got one of length {length}")
    start = land.blocks.from_parameters(land.parameters())
    loss = land.value().item()

    def change(multiple: float) -> float:
        return value_or_infinity(land.at(start + multiple * vector)) - loss

    first = vector.double().dot(land.gradient().double()).item()
    second = 0.5 * vector.double().dot((hessian(land) @ vector).double()).item()
    true = change(1.0)
    rounding = (
        ROUNDINGS
        * torch.finfo(land.dtype).eps
        * (abs(loss) + abs(true) if math.isfinite(true) else abs(loss))
    )
    radii = _radii(change, (first, second), tolerance, rounding) if radius else None
    return LossPrediction(loss, first, second, true, rounding, length, tolerance, radii)


def flat(land: Landscape, step: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A step as a flat vector over the blocks, in the landscape's dtype and on its device."""
    blocks = land.blocks
    if isinstance(step, Tensor):
        if tuple(step.shape) != (blocks.size,):
            raise ValueError(f"expected a step [{blocks.size}] over the blocks, got {list(step.shape)}")
        return step.detach().to(land.device, land.dtype)
    if not isinstance(step, Mapping):
        raise TypeError(f"expected a vector, a dictionary of tensors or a Step, got {type(step).__name__}")
    given = {name: part.detach().to(land.device, land.dtype) for name, part in step.items()}
    if given and all(name in blocks for name in given):
        return blocks.join(given)
    now = land.parameters()
    unknown = [name for name in given if name not in now]
    if unknown or not given:
        raise KeyError(
            f"expected names of blocks ({blocks.names[0]!r}, …) or of parameters ({next(iter(now))!r}, …), "
            f"got {unknown[0] if unknown else 'none'!r}"
        )
    for name, part in given.items():
        if part.shape != now[name].shape:
            raise ValueError(
                f"parameter {name!r}: expected shape {list(now[name].shape)}, got {list(part.shape)}"
            )
    return blocks.from_parameters({name: given.get(name, torch.zeros_like(p)) for name, p in now.items()})


def value_or_infinity(land: Landscape) -> float:
    """The loss; infinite where it overflows or is no number, as far away it may."""
    try:
        return land.value().item()
    except FloatingPointError:
        return math.inf


def _radii(
    change: Callable[[float], float], terms: tuple[float, float], tolerance: float, rounding: float
) -> tuple[float, float]:
    """The multiples at which the polynomials of first and second degree fail."""
    first, second = terms
    known: dict[float, float] = {}

    def fails(degree: int, multiple: float) -> bool:
        if multiple not in known:
            known[multiple] = change(multiple)
        predicted = multiple * first + (multiple**2 * second if degree == 2 else 0.0)
        scale = multiple * abs(first) + multiple**2 * abs(second)
        return not abs(known[multiple] - predicted) <= max(tolerance * scale, rounding)

    def radius(degree: int) -> float:
        rung = 0
        while rung > LOWEST and fails(degree, 2.0**rung):
            rung -= 1
        while rung < HIGHEST and not fails(degree, 2.0**rung):
            rung += 1
        if not fails(degree, 2.0**rung):
            return math.inf
        low, high = 2.0 ** (rung - 1), 2.0**rung
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fails(degree, middle) else (middle, high)
        return high

    return radius(1), radius(2)
