"""The whole Transformer block, and models made of blocks.

    post-norm:  Y = LN(X + Attn(X)),     Z = LN(Y + FFN(Y))
    pre-norm:   Y = X + Attn(LN X),      Z = Y + FFN(LN Y)
    no norm:    Y = X + Attn(X),         Z = Y + FFN(Y)

Theorems 4 and 5 of "Closing the Curvature Gap" (arXiv 2510.16927): first and second derivatives with respect to
all weights and all pairs of weights, by the recursion in `chain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.jet import Layer
from curvlens.exact.norm import LayerNorm, RMSNorm

Norm = LayerNorm | RMSNorm
Placement = Literal["post", "pre", "none"]


class TransformerBlock(Chain):
    """A block over "attn.query", …, "norm1", "norm1.bias", "mlp.up", …, "norm2", …

    >>> import torch, curvlens.exact as exact
    >>> W = torch.eye(4, dtype=torch.float64)
    >>> attn, mlp = exact.SelfAttention(W, W, W, W_O=W, heads=2, causal=True), exact.FeedForward(W, W)
    >>> block = TransformerBlock(attn, mlp, exact.LayerNorm(W[0] + 1), exact.LayerNorm(W[1] + 1), norm="pre")
    >>> R = exact.hessian(block, W, 0 * W)
    >>> R.total.block("attn.query", "mlp.up").shape
    (16, 16)

    `norm="none"` takes no norms. Either norm may be left out by None, and so may the feed-forward sublayer.
    """

    def __init__(
        self,
        attn: SelfAttention,
        mlp: FeedForward | None = None,
        norm1: Norm | None = None,
        norm2: Norm | None = None,
        norm: Placement = "pre",
    ):
        if norm not in ("pre", "post", "none"):
            raise ValueError(f"expected norm 'pre', 'post' or 'none', got {norm!r}")
        if norm == "none" and (norm1 is not None or norm2 is not None):
            raise ValueError("expected no norms with norm='none'; say norm='pre' or norm='post'")
        self.norm: Placement = norm
        layers = _sublayer(norm, "attn", AttentionLayer(attn), "norm1", norm1)
        if mlp is not None:
            layers += _sublayer(norm, "mlp", mlp, "norm2", norm2)
        super().__init__(layers)


def _sublayer(
    placement: Placement, name: str, layer: Layer, norm_name: str, norm: Norm | None
) -> list[tuple[str, Layer]]:
    """A sublayer with its skip and its norm, as links of a chain."""
    if norm is None:
        return [("", Chain([(name, layer)], residual=True))]
    if placement == "pre":
        return [("", Chain([(norm_name, norm), (name, layer)], residual=True))]
    return [("", Chain([(name, layer)], residual=True)), (norm_name, norm)]


def stack(blocks: Sequence[Layer], norm: Norm | None = None, head: Layer | None = None) -> Chain:
    """A deeper model: "layer.0.attn.query", …, then "norm" and "head" where given.

    A head (`Linear`) turns the last block's output into logits, so that cross-entropy is closed form end to end.
    """
    layers: list[tuple[str, Layer]] = [(f"layer.{i}", block) for i, block in enumerate(blocks)]
    if norm is not None:
        layers.append(("norm", norm))
    if head is not None:
        layers.append(("head", head))
    return Chain(layers)
