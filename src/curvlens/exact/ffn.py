"""The feed-forward sublayer, exactly: `z = σ(x W_1 + b_1) W_2 + b_2`, or gated, `(σ(x W_g) ∘ (x W_1)) W_2`."""

from __future__ import annotations

from torch import Tensor

from curvlens.exact.activations import activation as named_activation
from curvlens.exact.jet import Bend, Jet, Layer, Tangent
from curvlens.exact.linear import Affine
from curvlens.exact.result import Tokens


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
        if up.shape[1] != down.shape[0] or (gate is not None and gate.shape != up.shape):
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
        self.gated = gate is not None
        self.activation = named_activation(activation)

    def at(self, tokens: Tokens) -> FeedForwardJet:
        return FeedForwardJet(self, tokens.stacked)


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

        def bend(tangent: Tangent, turn: Tensor) -> Tangent:
            gradient: Tangent = {}
            h, moved = self.hidden(tangent)
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

        return bend


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
