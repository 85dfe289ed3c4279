"""ViT: a pre-norm encoder of image patches."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, attribute, has, projections


def _attention(module: nn.Module) -> Attention | None:
    if has("q_proj")(module):
        return projections(module, attribute(module, "head_dim"), causal=False)
    # up to version 4 of Transformers
    head_dim = attribute(module, "attention.attention_head_size")
    paths = ("attention.query", "attention.key", "attention.value", "output.dense")
    return projections(module, head_dim, *paths, scale=head_dim and head_dim**-0.5, causal=False)


FAMILIES = [
    Family(
        "vit",
        names={
            "ViTModel": {
                "embeddings.cls_token": "embed.class",
                "embeddings.mask_token": "embed.mask",
                "embeddings.position_embeddings": "embed.position",
                "embeddings.patch_embeddings.projection": "embed.patch",
                "layers.*": "layer.*",
                "encoder.layer.*": "layer.*",
                "layernorm": "norm",
                "pooler.dense": "pooler",
            },
            "ViTPreTrainedModel": {"vit": "", "classifier": "head", "decoder.0": "head"},
            "ViTLayer": {
                "layernorm_before": "norm1",
                "attention": "attn",
                "layernorm_after": "norm2",
                "mlp.fc1": "mlp.up",
                "mlp.fc2": "mlp.down",
                "intermediate.dense": "mlp.up",
                "output.dense": "mlp.down",
            },
        },
        attention={"ViTAttention": _attention},
    )
]
