"""What is multiplied: the Hessian, its two parts, or a Fisher matrix.

With `F` the model's output, or the output of an inner module, and `L = ℓ(F(θ), θ)`:

    hessian       H   = ∂²L/∂θ²
    functional    H_f = Σ_m g_m ∂²F_m/∂θ²,  g = ∂ℓ/∂F held fixed
    gauss-newton  H_o = H − H_f = Jᵀ ∂²ℓ/∂(F, θ)² J,  J the Jacobian of θ ↦ (F, θ)
    fisher        E   = Σ_i Jᵀ g_i g_iᵀ J, over scored tokens i, with given or drawn targets

At the model's output ℓ has no θ of its own, and the Gauss-Newton matrix is the usual `Jᵀ B J`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvlens.batches import Batch, output_tensor
from curvlens.landscape import Landscape, Parameters


@dataclass(frozen=True)
class Quantity:
    name: str
    at: str | None = None  # path of the module at whose output H is split; None: the model's output
    sampled: bool = False  # Fisher with targets drawn from the model, not the given ones
    seed: int = 0
    generator: torch.Generator | None = None

    @property
    def is_gauss_newton(self) -> bool:
        return self.name in ("gauss-newton", "fisher")

    def started(self) -> Quantity:
        """The same with its random draws at their beginning, for one pass over the data."""
        return replace(self, generator=torch.Generator().manual_seed(self.seed)) if self.sampled else self

    def middle(self, land: Landscape, piece: Batch, output: Tensor) -> Callable[[Tensor], Tensor]:
        """`M / n` of `Jᵀ M J / n` at the model's output, for stacks of output tangents `[K, *output.shape]`."""
        output, target = output.detach(), piece.target
        if self.name == "gauss-newton":
            return lambda tangents: land.loss.hessian_product(output, target, tangents) / land.weight
        if self.sampled:
            assert self.generator is not None
            target = land.loss.sample(output, target, self.generator)
        return lambda tangents: land.loss.fisher_product(output, target, tangents) / land.weight

    def scalar(self, land: Landscape, piece: Batch) -> Callable[[Parameters], Tensor]:
        """The function whose Hessian this is: the loss, or `⟨g, F⟩` with `g` fixed."""
        if self.name == "hessian":
            return lambda parameters: share(land, parameters, piece)
        gradient = split_gradient(land, piece, self.at)
        return lambda parameters: (gradient * split_output(land, parameters, piece, self.at)).sum()


def share(land: Landscape, parameters: Parameters, piece: Batch) -> Tensor:
    """What one piece of the data adds to the mean loss."""
    return land.loss.value(land.output(parameters, piece), piece.target) / land.weight


def split_output(land: Landscape, parameters: Parameters, piece: Batch, at: str | None) -> Tensor:
    """`F`: the output of the model or of the module at the split."""
    if at is None:
        return land.output(parameters, piece)
    with seen_output(land, at) as seen:
        land.output(parameters, piece)
    return seen()


def split_gradient(land: Landscape, piece: Batch, at: str | None) -> Tensor:
    """`g = ∂L/∂F`, detached."""
    parameters = land.parameters()
    if at is None:
        with torch.no_grad():
            output = land.output(parameters, piece)
        return land.loss.gradient(output, piece.target).detach() / land.weight
    with replaced_output(land, at) as cut:
        value = share(land, parameters, piece)
    (gradient,) = torch.autograd.grad(value, cut().replacement, allow_unused=True, materialize_grads=True)
    return gradient


@dataclass(frozen=True)
class Cut:
    """A module's output, and the leaf that the rest of the model was given in its place."""

    output: Tensor
    replacement: Tensor


@contextmanager
def seen_output(land: Landscape, at: str) -> Iterator[Callable[[], Tensor]]:
    """Inside, the module's output is remembered; the result returns it."""
    found: list[Tensor] = []
    with _hook(land, at, lambda output: found.append(output_tensor(output))):
        yield lambda: _only(found, at)


@contextmanager
def replaced_output(land: Landscape, at: str) -> Iterator[Callable[[], Cut]]:
    """Inside, the rest of the model sees a new leaf with the value of the module's output."""
    found: list[Cut] = []

    def replace_output(output: Any) -> Any:
        whole = output_tensor(output)
        leaf = whole.detach().requires_grad_()
        found.append(Cut(whole, leaf))
        if isinstance(output, Tensor):
            return leaf
        if isinstance(output, tuple) and output[0] is whole:
            return (leaf, *output[1:])
        raise TypeError(f"expected a tensor or a tuple from the module {at!r}, got {type(output).__name__}")

    with _hook(land, at, replace_output):
        yield lambda: _only(found, at)


@contextmanager
def _hook(land: Landscape, at: str, act: Callable[[Any], Any]) -> Iterator[None]:
    handle = land.model.get_submodule(at).register_forward_hook(lambda module, inputs, output: act(output))
    try:
        yield
    finally:
        handle.remove()


def _only(found: list[Any], at: str) -> Any:
    if len(found) != 1:
        raise ValueError(f"expected the module {at!r} to run once in a forward pass, got {len(found)} times")
    return found[0]
