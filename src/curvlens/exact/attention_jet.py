"""The attention sublayer with respect to everything: weights, and the input in its three roles.

`q = x W_Q + b_Q` and so on by heads, `A = a(s q kᵀ)` by rows, `z = [A v]_heads W_O + b_O`. The input enters as query,
as key and as value, all three through affine maps, so its derivatives are those of

    f(q, k, v) = A v,   with   Ṡ = s (q̇ kᵀ + q k̇ᵀ),   Ȧ = (∂a) Ṡ,   ȯ = Ȧ v + A v̇,

followed by those maps, and by the turns of queries and keys where there are any. With the gradient `do` at `o = A v`,
`dA = do vᵀ` and `dS = (∂a)ᵀ dA`, the gradients are
`dq = s dS k`, `dk = s dSᵀ q`, `dv = Aᵀ do`, and their derivatives

    dȦ = ḋo vᵀ + do v̇ᵀ,   dṠ = (∂a)ᵀ dȦ + (Σ_j dA_j ∂²a_j) Ṡ,
    dq̇ = s (dṠ k + dS k̇),   dk̇ = s (dṠᵀ q + dSᵀ q̇),   dv̇ = Ȧᵀ do + Aᵀ ḋo.

For softmax `(∂a) Ṡ = A ∘ (Ṡ − rowsum(A ∘ Ṡ))`, which is symmetric, and the last term of `dṠ` is
`Ȧ ∘ (dA − rowsum(A ∘ dA)) − A ∘ rowsum(Ȧ ∘ dA)`.

The closed forms of `attention`, moments included, are these contracted with the tokens; here nothing is summed
beforehand, so that sublayers below and above can be reached. Memory is `O(L²)` a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_forms import FormJet, parts, side_by_side
from curvlens.exact.attention_map import GeneralMoments, RowMoments
from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent
from curvlens.exact.linear import Affine
from curvlens.exact.result import Tokens


class AttentionLayer(Layer):
    """A `SelfAttention` as a layer of chains, over its own blocks "query", "key", "value", "out" and biases."""

    def __init__(self, attention: SelfAttention):
        self.attention, self.weights = attention, parts(attention)
        usual = not attention.stacked and "query_key" not in attention.weights
        self.same = attention if usual else side_by_side(attention)

    @property
    def blocks(self) -> Blocks:
        """Those of the attention, with their heads."""
        return self.attention.blocks

    def at(self, tokens: Tokens) -> AttentionJet | FormJet:
        jet = AttentionJet(self.same, tokens)
        return jet if self.same is self.attention else FormJet(self.attention, self.same, jet)


class Sequences:
    """Between tokens `[…, n, heads w]` and padded sequences by heads `[…, batch, heads, L, w]`."""

    def __init__(self, attention: SelfAttention, tokens: Tokens):
        lengths, device = torch.tensor(tokens.lengths), tokens.stacked.device
        self.batch, self.L, self.heads = len(lengths), int(lengths.max()), attention.heads
        real = torch.arange(self.L) < lengths[:, None]
        padded = not bool(real.all())
        self.at = real.flatten().nonzero()[:, 0].to(device) if padded else None
        self.mask: Tensor | None = None  # [batch, 1, L, L]
        masks = attention.masks(tokens)
        if padded or any(mask is not None for mask in masks):
            seen = real[:, None, :].repeat(1, self.L, 1).to(device)
            for where, length, mask in zip(seen, tokens.lengths, masks, strict=True):
                if mask is not None:
                    where[:length, :length] = mask
            self.mask = seen[:, None]

    def split(self, x: Tensor, groups: int | None = None) -> Tensor:
        """By heads; `groups` of them in `x`, each shared by neighbours."""
        if self.at is not None:
            room = x.new_zeros(*x.shape[:-2], self.batch * self.L, x.shape[-1])
            x = room.index_copy(-2, self.at, x)
        x = x.unflatten(-2, (self.batch, self.L)).unflatten(-1, (groups or self.heads, -1))
        x = x.transpose(-2, -3)
        shared = self.heads // x.shape[-3]
        return x if shared == 1 else x.repeat_interleave(shared, dim=-3)

    def join(self, x: Tensor, groups: int | None = None) -> Tensor:
        """The adjoint of `split`: shared heads are summed."""
        if groups is not None and groups < self.heads:
            x = x.unflatten(-3, (groups, -1)).sum(-3)
        x = x.transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return x if self.at is None else x.index_select(-2, self.at)


class Rows:
    """First and second derivatives of the row-wise map `A = a(S)` at one point."""

    def __init__(self, A: Tensor, moments: RowMoments):
        self.A, self.moments, self.softmax = A, moments, moments.centred

    def push(self, S: Tensor) -> Tensor:
        """`(∂a) Ṡ`."""
        D = self.moments.first
        if isinstance(self.moments, GeneralMoments):
            return (D @ S[..., None])[..., 0]
        return D * (S - _rowsum(D * S)) if self.softmax else D * S

    def pull(self, dA: Tensor) -> Tensor:
        """`(∂a)ᵀ dA`."""
        if isinstance(self.moments, GeneralMoments):
            return (self.moments.first.mT @ dA[..., None])[..., 0]
        return self.push(dA)  # symmetric

    def bend(self, dA: Tensor, S: Tensor, A: Tensor) -> Tensor:
        """`(Σ_j dA_j ∂²a_j) Ṡ`, for one `dA` and a stack of `Ṡ` with their `Ȧ`."""
        if isinstance(self.moments, GeneralMoments):
            return (self.moments._second(dA) @ S[..., None])[..., 0]
        if self.softmax:
            return A * (dA - _rowsum(self.A * dA)) - self.A * _rowsum(A * dA)
        return self.moments.second_weights * dA * S


class AttentionJet(Jet):
    """First and second derivatives of an attention sublayer, in some 25 matrix products a tangent."""

    def __init__(self, attention: SelfAttention, tokens: Tokens):
        attention._check_tokens(tokens)
        weights = parts(attention)
        self.by, self.s = Sequences(attention, tokens), attention.scale
        self.groups = attention.groups
        self.turns = None if attention.turns is None else attention.turns[: self.by.L]
        self.inner = {name: Affine(weights, name, tokens.stacked) for name in ("query", "key", "value")}
        self.q, self.k, self.v = (self.split(name, affine.output) for name, affine in self.inner.items())
        S = self.s * self.q @ self.k.mT
        self.A = attention.activation.attend(S, self.by.mask)
        self.rows = Rows(self.A, attention.activation.moments(S, self.A, self.by.mask))
        self.o = self.A @ self.v
        joined = self.by.join(self.o)
        self.out = Affine(weights, "out", joined) if "out" in weights else None
        self.out_bias = "out.bias" in weights and self.out is None
        self.output = self.out.output if self.out else joined
        if self.out_bias:
            self.output = self.output + weights["out.bias"]

    def split(self, name: str, x: Tensor) -> Tensor:
        x = self.by.split(x, self.groups[name])
        if self.turns is None or name == "value":
            return x
        return torch.einsum("lab,...lb->...la", self.turns, x)

    def join(self, name: str, x: Tensor) -> Tensor:
        """The adjoint of `split`."""
        if self.turns is not None and name != "value":
            x = torch.einsum("lab,...la->...lb", self.turns, x)
        return self.by.join(x, self.groups[name])

    def inside(self, tangent: Tangent) -> dict[str, Tensor]:
        """The tangents `q̇, k̇, v̇, Ṡ, Ȧ, ȯ`."""
        q, k, v = (self.split(n, a.push(tangent, tangent["input"])) for n, a in self.inner.items())
        S = self.s * (q @ self.k.mT + self.q @ k.mT)
        A = self.rows.push(S)
        return {"q": q, "k": k, "v": v, "S": S, "A": A, "o": A @ self.v + self.A @ v}

    def push(self, tangent: Tangent) -> Tensor:
        return self._output(self.by.join(self.inside(tangent)["o"]), tangent)

    def _output(self, joined: Tensor, tangent: Tangent) -> Tensor:
        """The tangent of the output, from that of the heads' outputs side by side."""
        if self.out_bias:
            joined = joined + tangent["out.bias"][:, None]
        return self.out.push(tangent, joined) if self.out else joined

    def gradients(self, do: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The gradients at queries, keys and values, joined; then `dA` and `dS`."""
        dA = do @ self.v.mT
        dS = self.rows.pull(dA)
        by_role = {"query": self.s * dS @ self.k, "key": self.s * dS.mT @ self.q, "value": self.A.mT @ do}
        return {name: self.join(name, d) for name, d in by_role.items()}, dA, dS

    def pull(self, g: Tensor) -> Tangent:
        gradient: Tangent = {"out.bias": g.sum(-2)} if self.out_bias else {}
        upstream, _, _ = self.gradients(self.by.split(self.out.pull(g, gradient) if self.out else g))
        parts = [affine.pull(upstream[name], gradient) for name, affine in self.inner.items()]
        return {**gradient, "input": parts[0] + parts[1] + parts[2]}

    def along(self, g: Tensor) -> Bend:
        do = self.by.split(g @ self.out.W.mT if self.out else g)
        upstream, dA, dS = self.gradients(do)

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            moved = self.inside(tangent)
            joined = self.by.join(moved["o"])

            def back(turn: Tensor) -> Tangent:
                gradient: Tangent = {"out.bias": turn.sum(-2)} if self.out_bias else {}
                if self.out:
                    turn = self.out.bend(g, tangent, joined, turn, gradient)
                do_turn = self.by.split(turn)
                dA_turn = do_turn @ self.v.mT + do @ moved["v"].mT
                dS_turn = self.rows.pull(dA_turn) + self.rows.bend(dA, moved["S"], moved["A"])
                turns = {
                    "query": self.s * (dS_turn @ self.k + dS @ moved["k"]),
                    "key": self.s * (dS_turn.mT @ self.q + dS.mT @ moved["q"]),
                    "value": moved["A"].mT @ do + self.A.mT @ do_turn,
                }
                parts = []
                for name, affine in self.inner.items():
                    turned = self.join(name, turns[name])
                    parts.append(affine.bend(upstream[name], tangent, tangent["input"], turned, gradient))
                return {**gradient, "input": parts[0] + parts[1] + parts[2]}

            return self._output(joined, tangent), back

        return bend


def _rowsum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)
