"""Attention of `curvlens.kernels` as an implementation that Hugging Face models can be set to.

    hugging_face.register()
    model.set_attn_implementation("curvlens")

Then the model can be differentiated twice in any code, in memory linear in the length. Inside of curvlens' products
this is not needed: long sequences of `attn_implementation="sdpa"` are served as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from curvlens.kernels.functions import attention

NAME = "curvlens"
# what some families ask of their attention, and this one does not do
OTHERS = ("softcap", "position_bias", "s_aux")


def register() -> None:
    """Make the name known to Transformers; with it the masks, since a name without them gets no padding mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: `[B, H, L, d]` to `[B, L, H, e]`, and no weights."""
    asked = [name for name in OTHERS if others.get(name) is not None]
    if dropout > 0 or asked:
        reason = ", ".join(asked) or f"dropout of {dropout:g}"
        raise ValueError(
            f"expected plain attention without dropout, got {reason} from {type(module).__name__}; "
            'call model.eval(), or model.set_attn_implementation("eager")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # a mask, where there is one, has causality in it; one query sees every key
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    out = attention(query, key, value, attention_mask, causal, scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None
