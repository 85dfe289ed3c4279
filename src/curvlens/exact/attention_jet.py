"""The multi-head attention sublayer with respect to everything: weights, and the input in its three roles.

`q = x W_Q + b_Q` and so on by heads, `P = softmax(s q kᵀ)` by rows, `z = [P v]_heads W_O + b_O`. The input enters as
query, as key and as value, all three through affine maps, so its derivatives are those of

    f(q, k, v) = P v,   with   Ṡ = s (q̇ kᵀ + q k̇ᵀ),   Ṗ = P ∘ (Ṡ − rowsum(P ∘ Ṡ)),   ȯ = Ṗ v + P v̇,

followed by those maps. With the gradient `do` at `o = P v`, `dP = do vᵀ`, `δ = rowsum(do ∘ o)` and
`dS = P ∘ (dP − δ)`, the gradients are `dq = s dS k`, `dk = s dSᵀ q`, `dv = Pᵀ do`, and their derivatives

    dṖ = ḋo vᵀ + do v̇ᵀ,   δ̇ = rowsum(ḋo ∘ o + do ∘ ȯ),   dṠ = Ṗ ∘ (dP − δ) + P ∘ (dṖ − δ̇),
    dq̇ = s (dṠ k + dS k̇),   dk̇ = s (dṠᵀ q + dSᵀ q̇),   dv̇ = Ṗᵀ do + Pᵀ ḋo.

The closed forms of `attention`, moments included, are these contracted with the tokens; here nothing is summed
beforehand, so that sublayers below and above can be reached. Memory is `O(L²)` a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvlens.exact.jet import Bend, Jet, Layer, Tangent
from curvlens.exact.linear import Affine
from curvlens.exact.result import Tokens


class MultiHeadAttention(Layer):
    """`[softmax(q_h k_hᵀ / (t √d_K)) v_h]_h W_O + b_O` over blocks "query", "key", "value", "out" and biases.

    `query`, `key`: `[d, heads d_K]`; `value`: `[d, heads d_V]`; `out`: `[heads d_V, o]`, or None for none.
    `biases` holds any of the four names. `causal`: a token sees itself and those before it.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None = None,
        heads: int = 1,
        causal: bool = False,
        temperature: float = 1.0,
        biases: dict[str, Tensor] | None = None,
    ):
        matrices = {"query": query, "key": key, "value": value}
        if out is not None:
            matrices["out"] = out
        if (
            query.shape != key.shape
            or value.shape[0] != query.shape[0]
            or query.shape[1] % heads
            or value.shape[1] % heads
            or (out is not None and out.shape[0] != value.shape[1])
        ):
            raise ValueError(
                f"expected query and key [d, k], value [d, v], out [v, o], with k and v divided by {heads} heads, got "
                + ", ".join(f"{name} {list(w.shape)}" for name, w in matrices.items())
            )
        biases = biases or {}
        for name, bias in biases.items():
            if name not in matrices or bias.shape != matrices[name].shape[1:]:
                raise ValueError(f"expected a bias of the width of one of {list(matrices)}, got {name!r}")
        self.weights = {}
        for name, matrix in matrices.items():
            self.weights[name] = matrix
            if name in biases:
                self.weights[f"{name}.bias"] = biases[name]
        self.heads, self.causal = heads, causal
        self.scale = 1 / (temperature * math.sqrt(query.shape[1] // heads))

    def at(self, tokens: Tokens) -> AttentionJet:
        return AttentionJet(self, tokens)


class Heads:
    """Between tokens `[…, n, heads w]` and padded sequences by heads `[…, batch, heads, L, w]`."""

    def __init__(self, tokens: Tokens, heads: int, causal: bool):
        lengths, device = torch.tensor(tokens.lengths), tokens.stacked.device
        self.batch, self.L, self.heads = len(lengths), int(lengths.max()), heads
        real = torch.arange(self.L) < lengths[:, None]
        self.at = None if bool(real.all()) else real.flatten().nonzero()[:, 0].to(device)
        allowed = real[:, None, None, :].expand(-1, -1, self.L, -1)
        if causal:
            allowed = allowed & torch.ones(self.L, self.L, dtype=torch.bool).tril()
        self.hidden = ~allowed.to(device)  # [batch, 1, L, L]: what a query does not see

    def split(self, x: Tensor) -> Tensor:
        if self.at is not None:
            padded = x.new_zeros(*x.shape[:-2], self.batch * self.L, x.shape[-1])
            x = padded.index_copy(-2, self.at, x)
        x = x.unflatten(-2, (self.batch, self.L)).unflatten(-1, (self.heads, -1))
        return x.transpose(-2, -3)

    def join(self, x: Tensor) -> Tensor:
        x = x.transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return x if self.at is None else x.index_select(-2, self.at)


class AttentionJet(Jet):
    """First and second derivatives of a multi-head attention sublayer, in some 25 matrix products a tangent."""

    def __init__(self, layer: MultiHeadAttention, tokens: Tokens):
        self.by = Heads(tokens, layer.heads, layer.causal)
        self.s = layer.scale
        self.inner = {name: Affine(layer.weights, name, tokens.stacked) for name in ("query", "key", "value")}
        self.q, self.k, self.v = (self.by.split(affine.output) for affine in self.inner.values())
        scores = (self.s * self.q @ self.k.mT).masked_fill(self.by.hidden, -math.inf)
        self.P = scores.softmax(-1)
        self.o = self.P @ self.v
        joined = self.by.join(self.o)
        self.out = Affine(layer.weights, "out", joined) if "out" in layer.weights else None
        self.output = self.out.output if self.out else joined

    def inside(self, tangent: Tangent) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tangents `q̇, k̇, v̇`, then `Ṗ` and `ȯ`."""
        q, k, v = (self.by.split(a.push(tangent, tangent["input"])) for a in self.inner.values())
        S = self.s * (q @ self.k.mT + self.q @ k.mT)
        P = self.P * (S - (self.P * S).sum(-1, keepdim=True))
        return q, k, v, P, P @ self.v + self.P @ v

    def push(self, tangent: Tangent) -> Tensor:
        joined = self.by.join(self.inside(tangent)[-1])
        return self.out.push(tangent, joined) if self.out else joined

    def gradients(self, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`dq, dk, dv`, then `dP − δ` and `dS`."""
        dP = do @ self.v.mT - (do * self.o).sum(-1, keepdim=True)
        dS = self.P * dP
        return self.s * dS @ self.k, self.s * dS.mT @ self.q, self.P.mT @ do, dP, dS

    def pull(self, g: Tensor) -> Tangent:
        gradient: Tangent = {}
        do = self.by.split(self.out.pull(g, gradient) if self.out else g)
        upstream = map(self.by.join, self.gradients(do)[:3])
        parts = [a.pull(d, gradient) for a, d in zip(self.inner.values(), upstream, strict=True)]
        return {**gradient, "input": parts[0] + parts[1] + parts[2]}

    def along(self, g: Tensor) -> Bend:
        do = self.by.split(g @ self.out.W.mT if self.out else g)
        dq, dk, dv, dP, dS = self.gradients(do)
        upstream = [self.by.join(d) for d in (dq, dk, dv)]

        def bend(tangent: Tangent, turn: Tensor) -> Tangent:
            gradient: Tangent = {}
            q, k, v, P, o = self.inside(tangent)
            if self.out:
                turn = self.out.bend(g, tangent, self.by.join(o), turn, gradient)
            do_turn = self.by.split(turn)
            dP_turn = do_turn @ self.v.mT + do @ v.mT - (do_turn * self.o + do * o).sum(-1, keepdim=True)
            dS_turn = P * dP + self.P * dP_turn
            turns = (
                self.s * (dS_turn @ self.k + dS @ k),
                self.s * (dS_turn.mT @ self.q + dS.mT @ q),
                P.mT @ do + self.P.mT @ do_turn,
            )
            parts = [
                affine.bend(d, tangent, tangent["input"], self.by.join(d_turn), gradient)
                for affine, d, d_turn in zip(self.inner.values(), upstream, turns, strict=True)
            ]
            return {**gradient, "input": parts[0] + parts[1] + parts[2]}

        return bend
