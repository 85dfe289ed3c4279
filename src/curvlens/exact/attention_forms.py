"""Attention written as stacks of heads, or with one matrix `W_QK`, as attention with heads side by side.

Stacks `[H, d, k]` are the columns of `[d, H k]`, one head after the other, and outputs that are added are outputs side
by side times `[I; …; I]`. `W_QK` is a query matrix whose key matrix is the identity. So the jet of the one form
serves the others: tangents are laid out anew on the way in, gradients on the way out, and what is constant stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.jet import Back, Bend, Jet, Tangent


def side_by_side(attention: SelfAttention) -> SelfAttention:
    """The same function with `W_Q [d, H k]`, `W_K`, `W_V` and perhaps `W_O`."""
    own = {name: laid_out(name, value, attention.stacked) for name, value in parts(attention).items()}
    value = own["value"]
    if "query_key" in own:
        key = torch.eye(attention.d, dtype=value.dtype, device=value.device)
        own["query"], own["key"] = own["query_key"], key.repeat(1, attention.heads)
    if attention.stacked and "out" not in own:
        width = attention.weights["value"].shape[-1]
        own["out"] = torch.eye(width, dtype=value.dtype, device=value.device).repeat(attention.heads, 1)
    return SelfAttention(
        own["query"],
        own["key"],
        value,
        W_O=own.get("out"),
        b_Q=own.get("query.bias"),
        b_K=own.get("key.bias"),
        b_V=own.get("value.bias"),
        b_O=own.get("out.bias"),
        heads=attention.heads,
        activation=attention.activation,
        scale=attention.scale,
        causal=attention.causal,
        mask=attention.mask,
        turns=attention.turns,
    )


def parts(attention: SelfAttention) -> dict[str, Tensor]:
    """Weights and biases by the names of their blocks."""
    return {
        **attention.weights,
        **{f"{kind}.bias": bias for kind, bias in attention.biases.items()},
    }


def laid_out(name: str, value: Tensor, stacked: bool) -> Tensor:
    """A weight or bias, or a stack of their tangents `[K, …]`, with heads side by side."""
    if not stacked or name == "out.bias":
        return value
    if name == "out":
        return value.flatten(-3, -2)
    return value.flatten(-2) if name.endswith(".bias") else value.transpose(-3, -2).flatten(-2)


def laid_back(name: str, value: Tensor, like: Tensor, stacked: bool) -> Tensor:
    """The inverse of `laid_out`, for a weight or bias of the shape of `like`."""
    if not stacked or name == "out.bias":
        return value
    heads = like.shape[0]
    if name == "out":
        return value.unflatten(-2, (heads, -1))
    value = value.unflatten(-1, (heads, -1))
    return value if name.endswith(".bias") else value.transpose(-3, -2)


class FormJet(Jet):
    """The jet of an attention by that of its side-by-side form."""

    def __init__(self, attention: SelfAttention, same: SelfAttention, jet: Jet):
        self.weights, self.stacked, self.jet = parts(attention), attention.stacked, jet
        self.constant = {name: w for name, w in same.weights.items() if name not in self.weights}
        self.output = jet.output

    def into(self, tangent: Tangent) -> Tangent:
        moved = {name: laid_out(name, tangent[name], self.stacked) for name in self.weights}
        if "query_key" in moved:
            moved["query"] = moved.pop("query_key")
        some = tangent["input"]
        for name, w in self.constant.items():
            moved.setdefault(name, some.new_zeros(()).expand(len(some), *w.shape))
        return {**moved, "input": some}

    def out(self, gradient: Tangent) -> Tangent:
        if "query_key" in self.weights:
            gradient["query_key"] = gradient["query"]
        own = {name: laid_back(name, gradient[name], w, self.stacked) for name, w in self.weights.items()}
        return {**own, "input": gradient["input"]}

    def push(self, tangent: Tangent) -> Tensor:
        return self.jet.push(self.into(tangent))

    def pull(self, g: Tensor) -> Tangent:
        return self.out(self.jet.pull(g))

    def along(self, g: Tensor) -> Bend:
        inner = self.jet.along(g)

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            moved, back = inner(self.into(tangent))
            return moved, lambda turn: self.out(back(turn))

        return bend
