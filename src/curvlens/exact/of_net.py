"""The package's own nets as chains of layers with closed forms, over the same blocks."""

from __future__ import annotations

from torch import Tensor, nn

from curvlens import nets
from curvlens.exact.attention import SelfAttention
from curvlens.exact.block import TransformerBlock, stack
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.linear import Linear
from curvlens.exact.mlp import LinearMLP
from curvlens.exact.norm import LayerNorm


def of_net(net: nets.GPT) -> Chain:
    """All of a `GPT` above its embeddings; its input is `embedded(net, ids)`.

    Blocks have the names that `curvlens.hessian` gives them, so that the two Hessians agree entry by entry,
    "layer.0.attn.query" with "layer.0.attn.query". A tied head is here a weight of its own.
    """
    head = net.head.W_U if net.head.W_E is None else net.head.W_E.T
    assert head is not None
    blocks = [_block(block) for block in net.blocks]  # type: ignore[arg-type]
    return stack(blocks, None if net.norm is None else _norm(net.norm), Linear(head.detach()))


def embedded(net: nets.GPT, ids: Tensor) -> Tensor:
    """The sum of token and position embeddings, `[batch, tokens, d]`."""
    return (net.token(ids) + net.position.weight[: ids.shape[-1]]).detach()


def of_linear_mlp(net: nets.LinearMLP) -> LinearMLP:
    """A linear MLP over "W1", "W2", …, the net's "layer.0", "layer.1", …"""
    return LinearMLP([weight.detach() for weight in net.weights])


def _block(block: nets.Block) -> TransformerBlock:
    attn = block.attn
    attention = SelfAttention(
        attn.W_Q.detach(),
        attn.W_K.detach(),
        attn.W_V.detach(),
        W_O=attn.W_O.detach(),
        b_Q=_bias(attn.b_Q),
        b_K=_bias(attn.b_K),
        b_V=_bias(attn.b_V),
        b_O=_bias(attn.b_O),
        heads=attn.heads,
        scale=attn.scale,
        causal=attn.causal,
        activation=attn.attention,
    )
    mlp = block.mlp
    return TransformerBlock(
        attention,
        None if mlp is None else _feed_forward(mlp),
        None if block.norm1 is None else _norm(block.norm1),
        None if block.norm2 is None else _norm(block.norm2),
        block.norm,
    )


def _feed_forward(mlp: nets.MLP) -> FeedForward:
    biases = {name: b.detach() for name, b in (("up", mlp.b_1), ("down", mlp.b_2)) if b is not None}
    return FeedForward(mlp.W_1.detach(), mlp.W_2.detach(), activation=mlp.activation, biases=biases)


def _norm(norm: nn.LayerNorm) -> LayerNorm:
    return LayerNorm(norm.weight.detach(), _bias(norm.bias), norm.eps)


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()
