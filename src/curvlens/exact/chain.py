"""Chains of layers: the recursion that turns sublayers into blocks, and blocks into models.

With `z = f_n(… f_1(x))` a tangent is pushed from the first layer to the last, and the pair of a gradient and its
tangent comes back: at each layer `(g, ġ)` becomes `(Jᵀ g, Jᵀ ġ + Σ_m g_m ∂²f_m (θ̇, ẋ))`. Read for matrices
instead of vectors this is Theorem 5 of "Closing the Curvature Gap" (arXiv 2510.16927): the terms `(J_Z ⊗ I) ξ_ij`
are the layer's own second derivatives weighed by the gradient pulled down to it, the terms
`(I ⊗ B_iᵀ) H_Z B_j` the second derivatives of the layers above, met by the tangents of two weights below.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent
from curvlens.exact.result import Tokens


class Chain(Layer):
    """`layers` one after the other: `[(name, layer), …]`; with `residual`, `x + f_n(… f_1(x))`.

    A weight is called `name.weight_name`, and just `name` if it is the layer's "weight"; a layer of empty name,
    a nested chain say, keeps the names it has.
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]], residual: bool = False):
        self.layers, self.residual = list(layers), residual
        self.names = [{w: qualified(name, w) for w in layer.weights} for name, layer in self.layers]
        self.weights = {}
        for (name, layer), names in zip(self.layers, self.names, strict=True):
            for own, full in names.items():
                if full in self.weights:
                    raise ValueError(f"expected distinct names of layers, got {name!r} twice")
                self.weights[full] = layer.weights[own]

    def at(self, tokens: Tokens) -> ChainJet:
        return ChainJet(self, tokens)


def qualified(name: str, weight: str) -> str:
    """The name of a layer's weight within a chain."""
    if not name:
        return weight
    return name if weight == "weight" else f"{name}.{weight}"


class ChainJet(Jet):
    """The jet of a chain, made of its layers' jets."""

    def __init__(self, chain: Chain, tokens: Tokens):
        self.residual, self.names = chain.residual, chain.names
        self.jets: list[Jet] = []
        x = tokens.stacked
        for _, layer in chain.layers:
            self.jets.append(layer.at(Tokens(x, tokens.lengths)))
            x = self.jets[-1].output
        if chain.residual and x.shape != tokens.stacked.shape:
            raise ValueError(
                f"expected an output of width {tokens.stacked.shape[1]}, as the input it is added to, got {x.shape[1]}"
            )
        self.output = tokens.stacked + x if chain.residual else x

    def own(self, i: int, tangent: Tangent, moved: Tensor) -> Tangent:
        """The part of a tangent that layer `i` sees."""
        return {**{own: tangent[full] for own, full in self.names[i].items()}, "input": moved}

    def push(self, tangent: Tangent) -> Tensor:
        moved = tangent["input"]
        for i, jet in enumerate(self.jets):
            moved = jet.push(self.own(i, tangent, moved))
        return tangent["input"] + moved if self.residual else moved

    def pull(self, g: Tensor) -> Tangent:
        return self._back([jet.pull for jet in self.jets], g)

    def _back(self, backs: list[Back], g: Tensor) -> Tangent:
        """From the end of the chain to its start: what each layer says of its own weights, and of its input."""
        gradient, skipped = {}, g
        for names, back in zip(reversed(self.names), reversed(backs), strict=True):
            found = back(g)
            g = found.pop("input")
            gradient.update({names[own]: part for own, part in found.items()})
        return {**gradient, "input": skipped + g if self.residual else g}

    def along(self, g: Tensor) -> Bend:
        bends = [jet.along(at) for jet, at in zip(self.jets, self.gradients(g), strict=True)]

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            moved, backs = tangent["input"], []
            for i, inner in enumerate(bends):
                moved, back = inner(self.own(i, tangent, moved))
                backs.append(back)
            output = tangent["input"] + moved if self.residual else moved
            return output, lambda turn: self._back(backs, turn)

        return bend

    def gradients(self, g: Tensor) -> list[Tensor]:
        """The gradient at the output of each layer, from the one at the end of the chain."""
        found = [g]
        for jet in reversed(self.jets[1:]):
            found.append(jet.pull(found[-1][None])["input"][0])
        return found[::-1]
