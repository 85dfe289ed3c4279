"""GPT-2: that of Transformers, and its kin by structure such as nanoGPT, whose modules go by the same names."""

from __future__ import annotations

from typing import Any

from torch import nn

from curvlens.families.family import Attention, Family, has, number, projections

MODEL = {"wte": "embed.token", "wpe": "embed.position", "h.*": "layer.*", "ln_f": "norm"}
MLP = {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
BLOCK = {"ln_1": "norm1", "attn": "attn", "ln_2": "norm2", **MLP}
# norms are counted in the order of use
CROSS_BLOCK = {
    "ln_1": "norm1",
    "attn": "attn",
    "ln_cross_attn": "norm2",
    "crossattention": "cross",
    "ln_2": "norm3",
    **MLP,
}


def _attention(module: Any) -> Attention | None:
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    if module.scale_attn_by_inverse_layer_idx:
        scale /= module.layer_idx + 1
    cross = module.is_cross_attention
    query = "q_attn" if cross else "c_attn"
    head_dim = module.head_dim
    return projections(module, head_dim, query, "c_attn", "c_attn", "c_proj", scale=scale, causal=not cross)


def _kin(module: nn.Module) -> Attention | None:
    """nanoGPT: one c_attn for query, key and value; nanochat: c_q, c_k and c_v, with rotary positions and norms."""
    if has("c_attn")(module):
        width, heads = number(module, "n_embd"), number(module, "n_head")
        return projections(
            module,
            width // heads,
            *("c_attn", "c_attn", "c_attn", "c_proj"),
            scale=(width // heads) ** -0.5,
            causal=True,
        )
    return projections(
        module, number(module, "head_dim"), "c_q", "c_k", "c_v", "c_proj", causal=True, between=("rotary",)
    )


FAMILIES = [
    Family(
        "nanogpt",
        names={
            has("wte", "h"): MODEL,
            has("transformer.wte", "transformer.h"): {"transformer": "", "lm_head": "head"},
            has("attn", "mlp.c_fc", "mlp.c_proj"): BLOCK,
        },
        attention={has("c_attn", "c_proj"): _kin, has("c_q", "c_k", "c_v", "c_proj"): _kin},
    ),
    Family(
        "gpt2",
        names={
            "GPT2Model": MODEL,
            "GPT2PreTrainedModel": {
                "transformer": "",
                "lm_head": "head",
                "score": "head",
                "classifier": "head",
                "qa_outputs": "head",
                "multiple_choice_head.summary": "head.choice",
            },
            has("ln_1", "attn", "crossattention", "ln_cross_attn"): CROSS_BLOCK,
            "GPT2Block": BLOCK,
        },
        attention={"GPT2Attention": _attention},
    ),
]
