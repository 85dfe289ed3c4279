"""GPT-2: that of Transformers, and its kin by structure such as nanoGPT, whose modules go by the same names."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, attribute, has, projections

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


def _attention(module: nn.Module) -> Attention | None:
    head_dim, cross = attribute(module, "head_dim"), bool(attribute(module, "is_cross_attention"))
    scale = head_dim**-0.5 if head_dim and attribute(module, "scale_attn_weights") else 1.0
    if attribute(module, "scale_attn_by_inverse_layer_idx"):
        scale /= attribute(module, "layer_idx") + 1
    query = "q_attn" if cross else "c_attn"
    return projections(module, head_dim, query, "c_attn", "c_attn", "c_proj", scale=scale, causal=not cross)


_is_kin = has("wte", "h.0.attn.c_proj")
_holds_kin = has("transformer.wte", "transformer.h.0.attn.c_proj")


def _fused(module: nn.Module) -> Attention | None:
    """nanoGPT and minGPT: the columns of one matrix are query, key and value."""
    heads, width = attribute(module, "n_head"), attribute(module, "n_embd")
    head_dim = width // heads if heads and width else None
    paths = ("c_attn", "c_attn", "c_attn", "c_proj")
    return projections(module, head_dim, *paths, scale=head_dim and head_dim**-0.5, causal=True)


def _separate(module: nn.Module) -> Attention | None:
    """nanochat and modded-nanoGPT: three matrices, and norms and rotations that are not modules."""
    head_dim = attribute(module, "head_dim")
    return projections(module, head_dim, "c_q", "c_k", "c_v", "c_proj", causal=True, between=("unknown",))


FAMILIES = [
    Family(
        "nanogpt",
        names={
            _is_kin: MODEL,
            _holds_kin: {"transformer": "", "lm_head": "head"},
            has("attn", "mlp.c_fc", "mlp.c_proj"): BLOCK,
        },
        attention={has("c_attn", "c_proj"): _fused, has("c_q", "c_k", "c_v", "c_proj"): _separate},
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
