"""T5, mT5, UMT5: encoder and decoder with RMSNorm, unscaled scores and tables of relative positions."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, Piece, attribute, projections


def _attention(module: nn.Module) -> Attention | None:
    heads = attribute(module, "n_heads")
    cross = attribute(module, "is_decoder") and attribute(module, "is_causal") is False
    return projections(
        module,
        attribute(module, "key_value_proj_dim"),
        *("q", "k", "v", "o"),
        pieces={"relative_attention_bias.weight": (Piece("position", heads=(heads, 1)),)},
        scale=1.0,
        between=()
        if cross
        else ("position",),  # in T5, every layer of a stack uses the table of its first layer
    )


FAMILIES = [
    Family(
        "t5",
        names={
            "*T5Stack": {"embed_tokens": "embed.token", "block.*": "layer.*", "final_layer_norm": "norm"},
            "*T5PreTrainedModel": {
                "transformer": "",
                "shared": "embed.token",
                "encoder": "encoder",
                "decoder": "decoder",
                "lm_head": "head",
                "classifier": "head",
                "classification_head.dense": "head.transform",
                "classification_head.out_proj": "head",
                "qa_outputs": "head",
            },
            "*T5Block": {  # sublayers in the order of use, in the decoder with cross-attention
                "layer.0.layer_norm": "norm1",
                "layer.0.SelfAttention": "attn",
                "layer.1.layer_norm": "norm2",
                "layer.1.EncDecAttention": "cross",
                "layer.1.DenseReluDense": "mlp",
                "layer.2.layer_norm": "norm3",
                "layer.2.DenseReluDense": "mlp",
            },
            "*T5DenseActDense": {"wi": "up", "wo": "down"},
            "*T5DenseGatedActDense": {"wi_0": "gate", "wi_1": "up", "wo": "down"},
        },
        attention={"*T5Attention": _attention},
    )
]
