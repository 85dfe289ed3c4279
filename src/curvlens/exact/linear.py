"""The affine map `z = x W + b`: a head of its own, and the ends of every other sublayer."""

from __future__ import annotations

from torch import Tensor

from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent, over_tokens
from curvlens.exact.result import LossAt, Result, Tokens, numbers
from curvlens.exact.tokenwise import Site, identity, outer, zero


class Affine:
    """`z = x W + b` at one `x`, among the weights of a sublayer: bilinear, so its derivatives are products.

    `weights` holds `W: [inputs, outputs]` under `name` and perhaps `b` under `bias`. What it finds out about
    its own weights it adds to a given dictionary; what it finds out about `x` it returns.
    """

    def __init__(self, weights: dict[str, Tensor], name: str, x: Tensor, bias: str | None = None):
        self.name, self.bias = name, bias or f"{name}.bias"
        self.W, self.x = weights[name], x
        self.has_bias = self.bias in weights
        if x.shape[-1] != len(self.W):
            raise ValueError(
                f"expected an input of width {len(self.W)} for {name!r} {list(self.W.shape)}, got {x.shape[-1]}"
            )
        self.output = x @ self.W + weights[self.bias] if self.has_bias else x @ self.W

    def push(self, tangent: Tangent, moved: Tensor) -> Tensor:
        """`ẋ W + x Ẇ + ḃ`, for `ẋ = moved`."""
        out = moved @ self.W + self.x @ tangent[self.name]
        return out + tangent[self.bias][:, None] if self.has_bias else out

    def pull(self, g: Tensor, gradient: Tangent) -> Tensor:
        """`g Wᵀ`."""
        gradient[self.name] = over_tokens(self.x, g)
        if self.has_bias:
            gradient[self.bias] = g.sum(-2)
        return g @ self.W.mT

    def bend(self, g: Tensor, tangent: Tangent, moved: Tensor, turn: Tensor, gradient: Tangent) -> Tensor:
        """The derivative of `pull`: `ġ Wᵀ + g Ẇᵀ`, for `ẋ = moved`, `ġ = turn`."""
        gradient[self.name] = over_tokens(self.x, turn) + over_tokens(moved, g)
        if self.has_bias:
            gradient[self.bias] = turn.sum(-2)
        return turn @ self.W.mT + g @ tangent[self.name].mT


class Linear(Layer):
    """`x W + b` with blocks "weight" `[inputs, outputs]` and "bias": a small head."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[1:]):
            raise ValueError(
                f"expected weight [inputs, outputs] and bias [outputs] or None, got {list(weight.shape)} and "
                f"{None if bias is None else list(bias.shape)}"
            )
        self.weights = numbers({"weight": weight} if bias is None else {"weight": weight, "bias": bias})

    def at(self, tokens: Tokens) -> LinearJet:
        return LinearJet(Affine(self.weights, "weight", tokens.stacked, "bias"))

    def _hessian(self, tokens: Tokens, loss: LossAt, with_input: bool = False) -> Result:
        """`H_o(W, W) = KS(x xᵀ, B)`, `H_f = 0`; with the block "input", products of the jet instead."""
        if with_input:
            return super()._hessian(tokens, loss, with_input)
        affine = Affine(self.weights, "weight", tokens.stacked, "bias")
        at, eye = loss(affine.output), identity(affine.output.shape[-1], affine.output)
        sites = {"weight": Site(affine.x, eye), "bias": Site.of_bias(eye, affine.x)}
        return Result(outer(sites, self.blocks, at), zero(self.blocks, affine.output), at)


class LinearJet(Jet):
    def __init__(self, affine: Affine):
        self.affine, self.output = affine, affine.output

    def push(self, tangent: Tangent) -> Tensor:
        return self.affine.push(tangent, tangent["input"])

    def pull(self, g: Tensor) -> Tangent:
        gradient: Tangent = {}
        gradient["input"] = self.affine.pull(g, gradient)
        return gradient

    def along(self, g: Tensor) -> Bend:
        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            def back(turn: Tensor) -> Tangent:
                gradient: Tangent = {}
                gradient["input"] = self.affine.bend(g, tangent, tangent["input"], turn, gradient)
                return gradient

            return self.push(tangent), back

        return bend
