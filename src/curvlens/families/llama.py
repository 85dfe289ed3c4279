"""Llama, Mistral, Qwen2, Qwen3, and their kin by structure such as Gemma and OLMo.

Separate projections, grouped heads, rotary positions, a gated MLP, RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from curvlens.families.family import Attention, Family, attribute, has, projections

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
    # Mistral windows by its configuration, Qwen layer by layer
    own = hasattr(module, "sliding_window")
    window = attribute(module, "sliding_window" if own else "config.sliding_window")
    between = (("query_norm", has("q_norm")(module)), ("rotary", True), ("window", window is not None))
    return projections(
        module,
        attribute(module, "head_dim"),
        causal=True,
        between=tuple(name for name, there in between if there),
    )


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


# -- kin: the same modules, with norms in other places

MLP = {path: role for path, role in LAYER.items() if path.startswith("mlp.")}
# norms in the order of use
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _kin_layer(*norms: str) -> tuple[Callable[[nn.Module], bool], dict[str, str]]:
    """A layer with these norms and no other."""

    def matches(module: nn.Module) -> bool:
        there = tuple(norm for norm in NORMS if has(norm)(module))
        return there == norms and has("self_attn.q_proj", "mlp.down_proj")(module)

    return matches, {"self_attn": "attn", **MLP, **{norm: f"norm{i + 1}" for i, norm in enumerate(norms)}}


def _kin_attention(module: nn.Module) -> Attention | None:
    return projections(module, attribute(module, "head_dim"), between=("unknown",))


_is_attention = has("q_proj", "k_proj", "v_proj", "o_proj")
_KIN = Family(
    "llama-like",
    names={
        has("embed_tokens", "layers.0.self_attn.q_proj"): MODEL,
        has("model.embed_tokens", "model.layers.0.self_attn.q_proj"): HEADS,
        **dict(_kin_layer(*norms) for norms in ((), NORMS[:1], NORMS[:2], (NORMS[1], NORMS[3]), NORMS)),
        _is_attention: {"q_norm": "query_norm", "k_norm": "key_norm"},
    },
    attention={_is_attention: _kin_attention},
)

FAMILIES = [
    _KIN,
    _family("llama", "Llama"),
    _family("mistral", "Mistral"),
    _family("qwen2", "Qwen2"),
    _family("qwen3", "Qwen3"),
]
