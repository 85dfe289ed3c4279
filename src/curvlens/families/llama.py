"""Llama, Mistral, Qwen2, Qwen3: separate projections, grouped heads, rotary positions, gated MLP, RMSNorm."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, has, number, projections

MODEL = {"embed_tokens": "embed.token", "layers.*": "layer.*", "norm": "norm"}
HEADS = {
    "model": "",
    "transformer": "",  # the wrapped model of question answering
    "lm_head": "head",
    "score": "head",
    "classifier": "head",
    "qa_outputs": "head",
}
LAYER = {
    "input_layernorm": "norm1",
    "self_attn": "attn",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def _attention(module: nn.Module) -> Attention | None:
    norms = ("query_norm",) if has("q_norm")(module) else ()
    return projections(module, number(module, "head_dim"), causal=True, between=(*norms, "rotary"))


def _family(name: str, prefix: str) -> Family:
    return Family(
        name,
        names={
            f"{prefix}Model": MODEL,
            f"{prefix}PreTrainedModel": HEADS,
            f"{prefix}DecoderLayer": LAYER,
            f"{prefix}Attention": {"q_norm": "query_norm", "k_norm": "key_norm"},
        },
        attention={f"{prefix}Attention": _attention},
    )


FAMILIES = [
    _family("llama", "Llama"),
    _family("mistral", "Mistral"),
    _family("qwen2", "Qwen2"),
    _family("qwen3", "Qwen3"),
]
