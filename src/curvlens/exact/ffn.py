"""The feed-forward sublayer, exactly: `z = σ(x W_1 + b_1) W_2 + b_2`, or gated, `(σ(x W_g) ∘ (x W_1)) W_2`.

With `a = φ(h)` the hidden units, a function of one preactivation a unit or of two, `φ_r` and `φ_rc` its partial
derivatives, `D_r = diag φ_r` and `y = W_2 g`:

    H_o(r, c) = KS(x xᵀ, D_r W_2 B W_2ᵀ D_c)      H_o(r, down) = KS(x aᵀ, D_r W_2 B)      H_o(down, down) = KS(a aᵀ, B)
    H_f(r, c) = KS(x xᵀ, diag(φ_rc ∘ y))          H_f(r, down) = KS×(x gᵀ, D_r)           H_f(down, down) = 0

with `KS(a, b) = Σ_i a_i ⊗ b_i` over tokens, `KS×` the crossed one. For ReLU `φ'' = 0`, and no diagonal block of the
functional part is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.activations import activation as named_activation
from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent
from curvlens.exact.linear import Affine
from curvlens.exact.result import LossAt, Result, Tokens, numbers
from curvlens.exact.tokenwise import Site, identity, outer
from curvlens.operator import Operator
from curvlens.structured import BlockOperator, KroneckerSum


class FeedForward(Layer):
    """`σ(x W_up + b_up) W_down + b_down`; with a gate, `(σ(x W_gate + b_gate) ∘ (x W_up + b_up)) W_down + b_down`.

    Weights are `[inputs, outputs]`. `activation`: "relu", "gelu" (exact), "gelu_tanh", "silu", "identity";
    `activation="silu"` with a gate is SwiGLU. `biases` holds any of "up", "gate", "down".
    """

    def __init__(
        self,
        up: Tensor,
        down: Tensor,
        gate: Tensor | None = None,
        activation: str = "gelu",
        biases: dict[str, Tensor] | None = None,
    ):
        matrices = {"up": up, "down": down} if gate is None else {"up": up, "gate": gate, "down": down}
        biases = dict(biases or {})
        if (
            any(w.dim() != 2 for w in matrices.values())
            or up.shape[1] != down.shape[0]
            or (gate is not None and gate.shape != up.shape)
        ):
            raise ValueError(
                "expected up [d, m], down [m, e] and gate as up, got "
                + ", ".join(f"{name} {list(w.shape)}" for name, w in matrices.items())
            )
        for name, bias in biases.items():
            if name not in matrices or bias.shape != matrices[name].shape[1:]:
                raise ValueError(f"expected a bias of the width of one of {list(matrices)}, got {name!r}")
        self.weights = {}
        for name, matrix in matrices.items():
            self.weights[name] = matrix
            if name in biases:
                self.weights[f"{name}.bias"] = biases[name]
        self.weights = numbers(self.weights)
        self.gated = gate is not None
        self.activation = named_activation(activation)

    def at(self, tokens: Tokens) -> FeedForwardJet:
        return FeedForwardJet(self, tokens.stacked)

    def _hessian(self, tokens: Tokens, loss: LossAt, with_input: bool = False) -> Result:
        """Kronecker sums over tokens; with the block "input", products of the jet instead."""
        if with_input:
            return super()._hessian(tokens, loss, with_input)
        jet = self.at(tokens)
        at = loss(jet.output)
        return Result(outer(jet.sites(), self.blocks, at), jet.functional(self.blocks, at.gradient), at)


class FeedForwardJet(Jet):
    """First and second derivatives of a feed-forward sublayer.

    A hidden unit is a function of one or two preactivations, `a = φ(h)`: `φ = σ(h_up)`, or `φ = σ(h_gate) h_up`.
    `first` and `second` hold its partial derivatives (of each pair of preactivations once).
    """

    def __init__(self, layer: FeedForward, x: Tensor):
        names = ["up", "gate"] if layer.gated else ["up"]
        self.inner = {name: Affine(layer.weights, name, x) for name in names}
        self.first, self.second, sigma = {}, {}, layer.activation
        up = self.inner["up"].output
        if layer.gated:
            gate = self.inner["gate"].output
            value, slope = sigma.value(gate), sigma.first(gate)
            hidden = value * up
            self.first = {"up": value, "gate": slope * up}
            self.second = {("up", "gate"): slope, ("gate", "gate"): sigma.second(gate) * up}
        else:
            hidden = sigma.value(up)
            self.first = {"up": sigma.first(up)}
            self.second = {("up", "up"): sigma.second(up)}
        self.down = Affine(layer.weights, "down", hidden)
        self.output = self.down.output

    def sites(self) -> dict[str, Site]:
        """Where each weight acts."""
        V = {name: first[..., None] * self.down.W for name, first in self.first.items()}
        sites = {name: Site(affine.x, V[name]) for name, affine in self.inner.items()}
        sites["down"] = Site(self.down.x, identity(self.output.shape[-1], self.output))
        return {
            **sites,
            **{f"{name}.bias": Site.of_bias(site.V, self.output) for name, site in sites.items()},
        }

    def functional(self, blocks: Blocks, g: Tensor) -> BlockOperator:
        """`Σ_m g_m ∂²z_m` over the weights."""
        y = g @ self.down.W.mT
        x = {name: affine.x for name, affine in self.inner.items()}
        x.update({f"{name}.bias": g.new_ones(len(g), 1) for name in x})

        def cell(row: str, column: str) -> Operator | None:
            (r, c), made = (name.removesuffix(".bias") for name in (row, column)), None
            if r == "down":
                return None if c == "down" else cell(column, row).T  # type: ignore[union-attr]
            if column == "down":
                made = KroneckerSum((x[row], g), torch.diag_embed(self.first[r]), crossed=True)
            elif c != "down":
                second = self.second.get((r, c), self.second.get((c, r)))
                if second is not None and torch.count_nonzero(second):
                    made = KroneckerSum((x[row], x[column]), torch.diag_embed(second * y))
            return None if made is None else made.over(blocks.select(row), blocks.select(column))

        return BlockOperator(cell, blocks, symmetric=True, dtype=g.dtype, device=g.device)

    def hidden(self, tangent: Tangent) -> tuple[Tangent, Tensor]:
        """The tangents of the preactivations, and of the hidden units."""
        h = {name: affine.push(tangent, tangent["input"]) for name, affine in self.inner.items()}
        return h, _total([self.first[name] * h[name] for name in h])

    def push(self, tangent: Tangent) -> Tensor:
        return self.down.push(tangent, self.hidden(tangent)[1])

    def pull(self, g: Tensor) -> Tangent:
        gradient: Tangent = {}
        a = self.down.pull(g, gradient)
        parts = [affine.pull(self.first[name] * a, gradient) for name, affine in self.inner.items()]
        return {**gradient, "input": _total(parts)}

    def along(self, g: Tensor) -> Bend:
        a = g @ self.down.W.mT  # the gradient at the hidden units
        slopes = {name: first * a for name, first in self.first.items()}
        bends = {pair: second * a for pair, second in self.second.items()}

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            h, moved = self.hidden(tangent)

            def back(turn: Tensor) -> Tangent:
                gradient: Tangent = {}
                a_turn = self.down.bend(g, tangent, moved, turn, gradient)
                turns = {name: first * a_turn for name, first in self.first.items()}
                for (row, column), second in bends.items():
                    turns[row] = turns[row] + second * h[column]
                    if row != column:
                        turns[column] = turns[column] + second * h[row]
                parts = [
                    affine.bend(slopes[name], tangent, tangent["input"], turns[name], gradient)
                    for name, affine in self.inner.items()
                ]
                return {**gradient, "input": _total(parts)}

            return self.down.push(tangent, moved), back

        return bend


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
