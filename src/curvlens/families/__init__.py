"""Families: what every parameter slice of a model does, and where its attention is.

`blocks(model)` names the parameters of a model, "layer.0.attn.query" and so on, in whichever way it stores them;
`attention_sites(model)` lists its attention modules. A model of one's own takes a few lines:

    families.register(families.Family(
        "mine",
        names={"MyModel": {"tokens": "embed.token", "blocks.*": "layer.*", "readout": "head"},
               "MyBlock": {"attention": "attn", "fc1": "mlp.up", "fc2": "mlp.down", "ln": "norm1"}},
        attention={"MyAttention": lambda m: families.projections(m, m.head_dim, "q", "k", "v", "o")},
    ))
"""

from curvlens.families import bert, gpt2, gpt_neox, llama, own, t5, torch_nn, vit
from curvlens.families.family import Attention, Family, Piece, projections
from curvlens.families.walk import PARAMETERS, AttentionSite, attention_sites, blocks, find, register

for _module in (gpt2, gpt_neox, llama, bert, vit, t5, torch_nn, own):
    for _family in _module.FAMILIES:
        register(_family)

__all__ = [
    "PARAMETERS",
    "Attention",
    "AttentionSite",
    "Family",
    "Piece",
    "attention_sites",
    "blocks",
    "find",
    "projections",
    "register",
]
