"""Transformers of torch.nn, on their own or anywhere in a user's module, then under their path in it."""

from __future__ import annotations

from torch import nn

from curvlens.families.family import Attention, Family, Piece, View


def _attention(module: nn.MultiheadAttention) -> Attention:
    width, heads = module.embed_dim, module.num_heads
    own = ("query", "key", "value")
    pieces: dict[str, tuple[Piece, ...]] = {
        "in_proj_weight": tuple(
            Piece(role, _third(i, width, transpose=True), heads=(heads, 1)) for i, role in enumerate(own)
        ),
        "in_proj_bias": tuple(
            Piece(f"{role}.bias", _third(i, width), heads=(heads, 0)) for i, role in enumerate(own)
        ),
        **{f"{role[0]}_proj_weight": (Piece(role, lambda w: w.T, heads=(heads, 1)),) for role in own},
        # a key and a value appended to every sequence
        **{
            f"bias_{role[0]}": (Piece(f"{role}.extra", lambda b: b[0, 0], heads=(heads, 0)),)
            for role in ("key", "value")
        },
        "out_proj.weight": (Piece("out", lambda w: w.T, heads=(heads, 0)),),
        "out_proj.bias": (Piece("out.bias"),),
    }
    present = dict(module.named_parameters())
    return Attention(
        heads,
        heads,
        module.head_dim,
        {name: cut for name, cut in pieces.items() if name in present},
        # out_proj is never called: its weight is an argument of the one function that does it all
        key_argument=1,
        value_argument=2,
        scale=module.head_dim**-0.5,
        between=("extra",) if module.bias_k is not None or module.add_zero_attn else (),
    )


def _third(i: int, width: int, transpose: bool = False) -> View:
    rows = slice(i * width, (i + 1) * width)
    return (lambda w: w[rows].T) if transpose else (lambda w: w[rows])


FAMILIES = [
    Family(
        "torch.nn",
        names={
            nn.Transformer: {"encoder": "encoder", "decoder": "decoder"},
            nn.TransformerEncoder: {"layers.*": "layer.*", "norm": "norm"},
            nn.TransformerDecoder: {"layers.*": "layer.*", "norm": "norm"},
            nn.TransformerEncoderLayer: {
                "self_attn": "attn",
                "linear1": "mlp.up",
                "linear2": "mlp.down",
                "norm1": "norm1",
                "norm2": "norm2",
            },
            nn.TransformerDecoderLayer: {
                "self_attn": "attn",
                "multihead_attn": "cross",
                "linear1": "mlp.up",
                "linear2": "mlp.down",
                "norm1": "norm1",
                "norm2": "norm2",
                "norm3": "norm3",
            },
        },
        attention={nn.MultiheadAttention: _attention},
    ),
]
