"""Jets: a layer's value with its first and second derivatives at one point, in closed form.

A layer is a map `z = f(θ, x)` of named weights and an input. Its jet at a point answers three questions, and
everything else about curvature follows from them:

- `push(θ̇, ẋ) = J (θ̇, ẋ)`: how the output moves;
- `pull(g) = Jᵀ g`: the gradient with respect to weights and input, from the gradient `g` at the output;
- `along(g)`: the derivative of `pull` itself, `(θ̇, ẋ, ġ) ↦ Jᵀ ġ + Σ_m g_m ∂²f_m (θ̇, ẋ)`. It takes its
  arguments as they come to be known: the tangent first, for which it gives `ż = J (θ̇, ẋ)`, then `ġ`.

With `ġ = B ż`, `B` the loss's Hessian at the output, the last one is a product with the whole Hessian; with
`ġ = 0` a product with its functional part. Jets compose: the jet of a chain of layers is made of their jets
(`chain`), and no automatic differentiation is needed anywhere.

The tokens of all sequences lie one below the other, `x: [n, d]`, and tangents come in stacks of `K`:
`{name: [K, *weight], "input": [K, n, d]}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvlens.blocks import Block, Blocks
from curvlens.exact.result import LossAt, Result, Sequences, TokenLoss, Tokens
from curvlens.operator import Operator

Tangent = dict[str, Tensor]
Back = Callable[[Tensor], Tangent]
Bend = Callable[[Tangent], tuple[Tensor, Back]]
Quadratic = Callable[[Tensor], Tensor]  # a loss's Hessian at the output: `[K, n, o] -> [K, n, o]`


class Jet(ABC):
    """Value, first and second derivative of a layer at `(θ, x)`."""

    output: Tensor  # [n, o]

    @abstractmethod
    def push(self, tangent: Tangent) -> Tensor:
        """`J (θ̇, ẋ)`: `[K, n, o]`."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tangent:
        """`Jᵀ g` for a stack `g: [K, n, o]`, with respect to every weight and "input"."""

    @abstractmethod
    def along(self, g: Tensor) -> Bend:
        """The map `tangent ↦ (ż, ġ ↦ Jᵀ ġ + Σ_m g_m ∂²f_m tangent)`, for one `g: [n, o]`."""


class Layer(ABC):
    """A map of named weights and an input, with its jet at any point.

    `layer(X)` for one sequence `X: [L, d]`, several `[batch, L, d]`, or a list of `[L_b, d]`.
    """

    weights: dict[str, Tensor]

    @abstractmethod
    def at(self, tokens: Tokens) -> Jet:
        """The jet at these tokens."""

    def __call__(self, X: Sequences) -> Sequences:
        tokens = Tokens.of(X)
        return tokens.like(X, self.at(tokens).output)

    @property
    def blocks(self) -> Blocks:
        """The weights, as the space its Hessian lives in."""
        return Blocks.of({name: weight.shape for name, weight in self.weights.items()})

    def jacobian(self, X: Sequences) -> Jacobian:
        """`∂f/∂(θ, x)` as an operator from the weights and "input" to "output"."""
        return Jacobian(self, Tokens.of(X))

    def second(self, X: Sequences, g: Sequences) -> Curvature:
        """`Σ_m g_m ∂²f_m`, the curvature that the layer itself creates, over the weights and "input"."""
        tokens = Tokens.of(X)
        jet = self.at(tokens)
        return Curvature(jet, space_of(self, tokens, True), tokens.stacked, jet.along(Tokens.of(g).stacked))

    def input_jacobian(self, X: Sequences) -> list[Tensor]:
        """`∂f/∂x` of each sequence, dense: a list of `[L_b o, L_b d]`."""
        tokens = Tokens.of(X)
        return input_jacobian(self, self.at(tokens), tokens)

    def input_hessian(self, X: Sequences, g: Sequences) -> list[Tensor]:
        """`Σ_m g_m ∂²f_m/∂x²` of each sequence, dense: a list of `[L_b d, L_b d]`."""
        tokens = Tokens.of(X)
        return input_hessian(self, self.at(tokens), tokens, Tokens.of(g).stacked)

    def _hessian(self, tokens: Tokens, loss: LossAt, with_input: bool = False) -> Result:
        """Products of both parts by `push`, `pull` and `along`; `with_input` adds the block "input"."""
        jet, space = self.at(tokens), space_of(self, tokens, with_input)
        at = loss(jet.output)
        bend, B = jet.along(at.gradient), loss_hessian(at)
        return JetResult(
            outer=Curvature(jet, space, tokens.stacked, None, B),
            functional=Curvature(jet, space, tokens.stacked, bend, None),
            loss=at,
            whole=Curvature(jet, space, tokens.stacked, bend, B),
        )


@dataclass(frozen=True)
class JetResult(Result):
    """A result whose total is one pass over the layers, where the sum of its parts is two."""

    whole: Operator

    @cached_property
    def total(self) -> Operator:
        return self.whole


def space_of(layer: Layer, tokens: Tokens, with_input: bool) -> Blocks:
    """The layer's weights, and "input" after them if asked for."""
    if not with_input:
        return layer.blocks
    return Blocks([*layer.blocks, Block("input", tuple(tokens.stacked.shape))])


def loss_hessian(at: TokenLoss) -> Quadratic:
    """Products with the loss's Hessian at the output, token by token."""
    B = at.hessian
    if B.dim() == 1:
        return lambda u: B[:, None] * u
    return lambda u: torch.einsum("nij,knj->kni", B, u)


def still(layer: Layer, K: int) -> Tangent:
    """The zero tangents of a layer's weights, a stack of `K` that takes no memory."""
    return {name: w.new_zeros(()).expand(K, *w.shape) for name, w in layer.weights.items()}


def input_jacobian(layer: Layer, jet: Jet, tokens: Tokens) -> list[Tensor]:
    """`∂f/∂x` of each sequence by `max L · d` pushes, the jet being the layer's at these tokens."""
    return of_sequences(jet.push(unit_inputs(layer, tokens)), tokens)


def input_hessian(layer: Layer, jet: Jet, tokens: Tokens, g: Tensor) -> list[Tensor]:
    """`Σ_m g_m ∂²f_m/∂x²` of each sequence in the same way."""
    units = unit_inputs(layer, tokens)
    _, back = jet.along(g)(units)
    return of_sequences(back(g.new_zeros(()).expand(len(units["input"]), *g.shape))["input"], tokens)


def unit_inputs(layer: Layer, tokens: Tokens) -> Tangent:
    """The `K = max L · d` unit tangents of the input, in every sequence at once: sequences do not mix."""
    x, L = tokens.stacked, max(tokens.lengths)
    d = x.shape[1]
    eye = torch.eye(L * d, dtype=x.dtype, device=x.device).view(L * d, L, d)
    units = torch.cat([eye[:, :length] for length in tokens.lengths], dim=1)
    return {**still(layer, L * d), "input": units}


def of_sequences(images: Tensor, tokens: Tokens) -> list[Tensor]:
    """The images `[K, n, o]` of `unit_inputs` as one matrix `[L_b o, L_b d]` a sequence."""
    d = tokens.stacked.shape[1]
    parts = zip(images.split(tokens.lengths, dim=1), tokens.lengths, strict=True)
    return [part[: L * d].flatten(1).T for part, L in parts]


class Jacobian(Operator):
    """`∂f/∂(θ, x)` of a layer, by `push` and `pull`."""

    def __init__(self, layer: Layer, tokens: Tokens):
        self.jet, x = layer.at(tokens), tokens.stacked
        output = Blocks.of({"output": self.jet.output.shape})
        super().__init__(output, space_of(layer, tokens, True), x.dtype, x.device)

    def apply(self, stack: Tensor) -> Tensor:
        return self.jet.push(self.domain.split(stack)).flatten(1)

    def dense(self) -> Tensor:
        """The matrix, by rows or by columns, whichever are fewer."""
        rows, columns = self.shape
        return self.T.dense().T if rows < columns else super().dense()

    def _adjoint(self) -> Operator:
        return Gradient(self)


class Gradient(Operator):
    """The adjoint of a Jacobian."""

    def __init__(self, jacobian: Jacobian):
        super().__init__(jacobian.domain, jacobian.codomain, jacobian.dtype, jacobian.device)
        self.jacobian = jacobian

    def apply(self, stack: Tensor) -> Tensor:
        return pack(self.jacobian.jet.pull(self.domain.split(stack)["output"]), self.codomain)

    def _adjoint(self) -> Operator:
        return self.jacobian


class Curvature(Operator):
    """A layer's Hessian over its weights, or weights and "input": `Jᵀ B J + Σ_m g_m ∂²f_m`.

    `bend` is the layer's `along(g)`, with the loss's gradient `g` at the output, and `B` the product with the loss's
    Hessian there. Without `B` it is the functional part, without `bend` the outer-product part. A product costs
    about three gradients for the whole, two for the functional part, one and a half for the outer.
    """

    def __init__(self, jet: Jet, space: Blocks, x: Tensor, bend: Bend | None, B: Quadratic | None = None):
        super().__init__(space, space, x.dtype, x.device, symmetric=True)
        self.jet, self.input_shape, self.bend, self.B = jet, x.shape, bend, B

    def apply(self, stack: Tensor) -> Tensor:
        nothing, K = stack.new_zeros(()), len(stack)
        tangent = self.domain.split(stack)
        tangent.setdefault("input", nothing.expand(K, *self.input_shape))
        moved, back = (self.jet.push(tangent), self.jet.pull) if self.bend is None else self.bend(tangent)
        turn = nothing.expand(K, *self.jet.output.shape) if self.B is None else self.B(moved)
        return pack(back(turn), self.domain)

    def dense(self) -> Tensor:
        """The matrix; the outer-product part from a Jacobian of as many rows as the output has numbers."""
        shape = self.jet.output.shape
        if self.bend is not None or self.B is None or shape.numel() >= self.domain.size:
            return super().dense()
        self._require_room("the dense matrix")
        rows = torch.eye(shape.numel(), dtype=self.dtype, device=self.device).unflatten(1, shape)
        J = pack(self.jet.pull(rows), self.domain)
        return self.B(J.T.unflatten(1, shape)).flatten(1) @ J


def pack(tangent: Tangent, space: Blocks) -> Tensor:
    """The stack of flat vectors of the blocks in `space`."""
    return torch.cat([tangent[block.name].flatten(1) for block in space], dim=1)


def over_tokens(x: Tensor, y: Tensor) -> Tensor:
    """`Σ_i x_i y_iᵀ` over all tokens; `x: [n, a]` or `[K, n, a]`, `y: [n, b]` or `[K, n, b]`."""
    return x.mT @ y
