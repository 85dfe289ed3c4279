"""GPT-NeoX (Pythia): query, key and value are fused and interleaved by heads, `[heads, 3, head_dim, d]`."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, attribute, projections


def _attention(module: nn.Module) -> Attention | None:
    fused = "query_key_value"
    return projections(
        module,
        attribute(module, "head_size"),
        *(fused, fused, fused, "dense"),
        interleaved=True,
        causal=True,
        between=("rotary",),
    )


FAMILIES = [
    Family(
        "gpt-neox",
        names={
            "GPTNeoXModel": {"embed_in": "embed.token", "layers.*": "layer.*", "final_layer_norm": "norm"},
            "GPTNeoXPreTrainedModel": {
                "gpt_neox": "",
                "lm_head": "head",
                "embed_out": "head",
                "score": "head",
                "classifier": "head",
                "qa_outputs": "head",
            },
            "GPTNeoXLayer": {
                "input_layernorm": "norm1",
                "attention": "attn",
                "post_attention_layernorm": "norm2",
                "mlp.dense_h_to_4h": "mlp.up",
                "mlp.dense_4h_to_h": "mlp.down",
            },
        },
        attention={"GPTNeoXAttention": _attention},
    )
]
