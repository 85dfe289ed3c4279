"""Jets: a layer's value with its first and second derivatives at one point, in closed form.

A layer is a map `z = f(θ, x)` of named weights and an input. Its jet at a point answers three questions, and
everything else about curvature follows from them:

- `push(θ̇, ẋ) = J (θ̇, ẋ)`: how the output moves;
- `pull(g) = Jᵀ g`: the gradient with respect to weights and input, from the gradient `g` at the output;
- `along(g)`: the derivative of `pull` itself, `(θ̇, ẋ, ġ) ↦ Jᵀ ġ + Σ_m g_m ∂²f_m (θ̇, ẋ)`.

With `ġ = B ż`, `B` the loss's Hessian at the output, the last one is a product with the whole Hessian; with
`ġ = 0` a product with its functional part. Jets compose: the jet of a chain of layers is made of their jets
(`chain`), and no automatic differentiation is needed anywhere.

Tangents come in stacks of `K`: `{name: [K, *weight], "input": [K, n, L, d]}` for `n` sequences of `L` tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.operator import Operator

Tangent = dict[str, Tensor]
Bend = Callable[[Tangent, Tensor], Tangent]
Quadratic = Callable[[Tensor], Tensor]  # a loss's Hessian at the output: `[K, n, L, c] -> [K, n, L, c]`


class Jet(ABC):
    """Value, first and second derivative of a layer at `(θ, x)`."""

    output: Tensor  # [n, L, outputs]

    @abstractmethod
    def push(self, tangent: Tangent) -> Tensor:
        """`J (θ̇, ẋ)`: `[K, n, L, outputs]`."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tangent:
        """`Jᵀ g` for a stack `g: [K, n, L, outputs]`, with respect to every weight and "input"."""

    @abstractmethod
    def along(self, g: Tensor) -> Bend:
        """The map `(tangent, ġ) ↦ Jᵀ ġ + Σ_m g_m ∂²f_m tangent`, for one `g: [n, L, outputs]`."""


class Layer(ABC):
    """A map of named weights and an input, `layer(X)` for `X: [L, d]` or `[n, L, d]`, with its jet at any point."""

    weights: dict[str, Tensor]

    @abstractmethod
    def at(self, X: Tensor) -> Jet:
        """The jet at `X: [n, L, d]`."""

    def __call__(self, X: Tensor) -> Tensor:
        return self.at(sequences(X)).output.reshape(*X.shape[:-1], -1)

    @property
    def blocks(self) -> Blocks:
        """The weights, as the space its Hessian lives in."""
        return Blocks.of({name: weight.shape for name, weight in self.weights.items()})

    def jacobian(self, X: Tensor) -> Jacobian:
        """`∂f/∂(θ, x)` as an operator from the weights and "input" to "output"."""
        return Jacobian(self, X)

    def second(self, X: Tensor, g: Tensor) -> Curvature:
        """`Σ_m g_m ∂²f_m`, the curvature that the layer itself creates, over the weights and "input"."""
        return Curvature(self, X, g, with_input=True)

    def input_jacobian(self, X: Tensor) -> Tensor:
        """`∂f/∂x` of each sequence, dense: `[n, L outputs, L d]`."""
        X = sequences(X)
        images = self.at(X).push(unit_inputs(self, X))
        return images.flatten(2).permute(1, 2, 0)

    def input_hessian(self, X: Tensor, g: Tensor) -> Tensor:
        """`Σ_m g_m ∂²f_m/∂x²` of each sequence, dense: `[n, L d, L d]`."""
        X = sequences(X)
        jet, units = self.at(X), unit_inputs(self, X)
        g = g.reshape(jet.output.shape)
        images = jet.along(g)(units, g.new_zeros(len(units["input"]), *g.shape))["input"]
        return images.flatten(2).permute(1, 2, 0)


def sequences(X: Tensor) -> Tensor:
    """`[L, d]` or `[n, L, d]` as `[n, L, d]`."""
    if X.dim() not in (2, 3):
        raise ValueError(f"expected an input [L, d] or [n, L, d], got {list(X.shape)}")
    return X if X.dim() == 3 else X[None]


def still(layer: Layer, K: int) -> Tangent:
    """The zero tangents of a layer's weights, a stack of `K` that takes no memory."""
    return {name: w.new_zeros(()).expand(K, *w.shape) for name, w in layer.weights.items()}


def unit_inputs(layer: Layer, X: Tensor) -> Tangent:
    """The `K = L d` unit tangents of the input, in every sequence at once (sequences do not mix)."""
    n, L, d = X.shape
    eye = torch.eye(L * d, dtype=X.dtype, device=X.device).view(L * d, 1, L, d)
    return {**still(layer, L * d), "input": eye.expand(-1, n, -1, -1)}


class Jacobian(Operator):
    """`∂f/∂(θ, x)` of a layer at `X`, by `push` and `pull`."""

    def __init__(self, layer: Layer, X: Tensor):
        self.jet = layer.at(sequences(X))
        weights = {name: w.shape for name, w in layer.weights.items()}
        output = self.jet.output
        super().__init__(
            Blocks.of({"output": (*X.shape[:-1], output.shape[-1])}),
            Blocks.of({**weights, "input": X.shape}),
            X.dtype,
            X.device,
        )
        self.input_shape = sequences(X).shape

    def apply(self, stack: Tensor) -> Tensor:
        tangent = self.domain.split(stack)
        tangent["input"] = tangent["input"].reshape(-1, *self.input_shape)
        return self.jet.push(tangent).flatten(1)

    def _adjoint(self) -> Operator:
        return Gradient(self)


class Gradient(Operator):
    """The adjoint of a Jacobian."""

    def __init__(self, jacobian: Jacobian):
        super().__init__(jacobian.domain, jacobian.codomain, jacobian.dtype, jacobian.device)
        self.jacobian = jacobian

    def apply(self, stack: Tensor) -> Tensor:
        jet = self.jacobian.jet
        return pack(jet.pull(stack.view(len(stack), *jet.output.shape)), self.codomain)

    def _adjoint(self) -> Operator:
        return self.jacobian


class Curvature(Operator):
    """A layer's Hessian over its weights, or weights and "input": `Jᵀ B J + Σ_m g_m ∂²f_m`.

    `loss_hessian` is the product with `B`, `g` the loss's gradient at the output. Without `B` it is the
    functional part, without `g` the outer-product part.
    """

    def __init__(
        self,
        layer: Layer,
        X: Tensor,
        g: Tensor | None = None,
        loss_hessian: Quadratic | None = None,
        with_input: bool = False,
    ):
        shapes = {name: w.shape for name, w in layer.weights.items()}
        space = Blocks.of({**shapes, "input": X.shape} if with_input else shapes)
        super().__init__(space, space, X.dtype, X.device, symmetric=True)
        self.jet = layer.at(sequences(X))
        self.input_shape = sequences(X).shape
        self.bend = None if g is None else self.jet.along(g.reshape(self.jet.output.shape))
        self.loss_hessian = loss_hessian

    def apply(self, stack: Tensor) -> Tensor:
        K = len(stack)
        tangent = self.domain.split(stack)
        if "input" in tangent:
            tangent["input"] = tangent["input"].reshape(K, *self.input_shape)
        else:
            tangent["input"] = stack.new_zeros(()).expand(K, *self.input_shape)
        if self.loss_hessian is None:
            turn = stack.new_zeros(()).expand(K, *self.jet.output.shape)
        else:
            turn = self.loss_hessian(self.jet.push(tangent))
        moved = self.jet.pull(turn) if self.bend is None else self.bend(tangent, turn)
        return pack(moved, self.domain)


def pack(tangent: Tangent, space: Blocks) -> Tensor:
    """The stack of flat vectors of the blocks in `space`."""
    return torch.cat([tangent[block.name].flatten(1) for block in space], dim=1)


def over_tokens(x: Tensor, y: Tensor) -> Tensor:
    """`Σ_i x_i y_iᵀ` over all tokens of all sequences: `[K?, n, L, a], [K?, n, L, b] -> [K, a, b]`."""
    if x.dim() == 3:
        x = x.expand(y.shape[0], *x.shape) if y.dim() == 4 else x[None]
    y = y.expand(x.shape[0], *y.shape[-3:])
    return x.flatten(1, 2).mT @ y.flatten(1, 2)
