"""The package's own nets, whose weights are stored as the papers write them."""

from __future__ import annotations

from curvlens import nets
from curvlens.families.family import Attention, Family, Piece


def _attention(module: nets.SelfAttention) -> Attention:
    heads = module.heads
    pieces: dict[str, tuple[Piece, ...]] = {}
    for letter, role in (("Q", "query"), ("K", "key"), ("V", "value")):
        pieces[f"W_{letter}"] = (Piece(role, heads=(heads, 1)),)
        pieces[f"b_{letter}"] = (Piece(f"{role}.bias", heads=(heads, 0)),)
    pieces["W_O"] = (Piece("out", heads=(heads, 0)),)
    pieces["b_O"] = (Piece("out.bias"),)
    present = dict(module.named_parameters())
    return Attention(
        heads,
        heads,
        module.W_Q.shape[1] // heads,
        {name: cut for name, cut in pieces.items() if name in present},
        scale=module.scale,
        causal=module.causal,
        between=("linear",) if module.attention == "linear" else (),
    )


FAMILIES = [
    Family(
        "curvlens",
        names={
            nets.GPT: {
                "token": "embed.token",
                "position": "embed.position",
                "blocks.*": "layer.*",
                "norm": "norm",
                "head": "head",
            },
            nets.Unembedding: {"W_U": "", "W_E": ""},
            nets.Block: {"norm1": "norm1", "attn": "attn", "norm2": "norm2", "mlp": "mlp"},
            nets.MLP: {"W_1": "up", "b_1": "up.bias", "W_2": "down", "b_2": "down.bias"},
            nets.LinearMLP: {"weights.*": "layer.*"},
        },
        attention={nets.SelfAttention: _attention},
    )
]
