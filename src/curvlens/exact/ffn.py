"""The feed-forward sublayer, exactly: `z = σ(x W_1 + b_1) W_2 + b_2`, or gated, `(σ(x W_g) ∘ (x W_1)) W_2`."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.exact.activations import activation as named_activation
from curvlens.exact.jet import Bend, Jet, Layer, Tangent, over_tokens


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

    def at(self, X: Tensor) -> FeedForwardJet:
        return FeedForwardJet(self, X)


class FeedForwardJet(Jet):
    """First and second derivatives of a feed-forward sublayer.

    Hidden units are `a = φ(h)`, `φ(h) = σ(h_up)`, or `φ(h) = σ(h_gate) h_up` when gated: a function of one or
    two preactivations a unit, with its gradient and Hessian below.
    """

    def __init__(self, layer: FeedForward, X: Tensor):
        self.w, self.x = layer.weights, X
        self.inner = ["up", "gate"] if layer.gated else ["up"]
        h = {name: X @ self.w[name] + self.w.get(f"{name}.bias", 0) for name in self.inner}
        sigma = layer.activation
        if layer.gated:
            value, first = sigma.value(h["gate"]), sigma.first(h["gate"])
            self.a = value * h["up"]
            self.first = {"up": value, "gate": first * h["up"]}
            self.second = {("up", "gate"): first, ("gate", "gate"): sigma.second(h["gate"]) * h["up"]}
        else:
            self.a = sigma.value(h["up"])
            self.first = {"up": sigma.first(h["up"])}
            self.second = {("up", "up"): sigma.second(h["up"])}
        self.output = self.a @ self.w["down"] + self.w.get("down.bias", 0)

    def preactivations(self, tangent: Tangent) -> Tangent:
        return {name: self._affine(name, self.x, tangent["input"], tangent) for name in self.inner}

    def _affine(self, name: str, x: Tensor, moved: Tensor, tangent: Tangent) -> Tensor:
        """The tangent of `x W + b`."""
        out = moved @ self.w[name] + x @ tangent[name][:, None]
        return out + tangent[f"{name}.bias"][:, None, None] if f"{name}.bias" in self.w else out

    def hidden(self, h: Tangent) -> Tensor:
        """The tangent of `a`."""
        return sum((self.first[name] * h[name] for name in self.inner), torch.zeros(()).to(self.a))

    def push(self, tangent: Tangent) -> Tensor:
        return self._affine("down", self.a, self.hidden(self.preactivations(tangent)), tangent)

    def pull(self, g: Tensor) -> Tangent:
        gradient = {"down": over_tokens(self.a, g)}
        back = g @ self.w["down"].mT
        slopes = {name: self.first[name] * back for name in self.inner}
        for name in self.inner:
            gradient[name] = over_tokens(self.x, slopes[name])
        gradient["input"] = torch.stack([slopes[name] @ self.w[name].mT for name in self.inner]).sum(0)
        for name, upstream in {**slopes, "down": g}.items():
            if f"{name}.bias" in self.w:
                gradient[f"{name}.bias"] = upstream.sum((1, 2))
        return gradient

    def along(self, g: Tensor) -> Bend:
        back = g @ self.w["down"].mT
        slopes = {name: self.first[name] * back for name in self.inner}

        def bend(tangent: Tangent, turn: Tensor) -> Tangent:
            x, h = tangent["input"], self.preactivations(tangent)
            back_turn = turn @ self.w["down"].mT + g @ tangent["down"].mT[:, None]
            turns = {name: self.first[name] * back_turn for name in self.inner}
            for (row, column), second in self.second.items():
                turns[row] = turns[row] + second * back * h[column]
                if row != column:
                    turns[column] = turns[column] + second * back * h[row]
            moved = {"down": over_tokens(self.a, turn) + over_tokens(self.hidden(h), g)}
            parts = []
            for name in self.inner:
                moved[name] = over_tokens(self.x, turns[name]) + over_tokens(x, slopes[name])
                parts.append(turns[name] @ self.w[name].mT + slopes[name] @ tangent[name].mT[:, None])
            moved["input"] = torch.stack(parts).sum(0)
            for name, upstream in {**turns, "down": turn}.items():
                if f"{name}.bias" in self.w:
                    moved[f"{name}.bias"] = upstream.sum((1, 2))
            return moved

        return bend
