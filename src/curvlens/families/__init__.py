"""Families: what every parameter slice of a model does, and where its attention is.

`blocks(model)` names the parameters of a model by what they do, in whichever way it stores them:

    embed.token, .position, .type, .patch, .class, .norm      layer.0.norm1, .norm2, …, in the order of use
    layer.0.attn.query, .key, .value, .out, .position         layer.0.mlp.up, .gate, .down
    layer.0.attn.query_norm, .key_norm                        norm (the last), head, head.transform, head.norm
    layer.0.cross.query, … (attention to another sequence)    encoder.layer.0…, decoder.layer.0…

with ".bias" behind for a bias. Linear maps are `[inputs, outputs]`, and those of attention divide into heads. What
no family names keeps the name of its parameter. Inside of a user's module, names begin with the path to the model.

`attention_sites(model)` lists the attention modules. A model of one's own takes a few lines:

    families.register(families.Family(
        "mine",
        names={"MyModel": {"tokens": "embed.token", "blocks.*": "layer.*", "readout": "head"},
               "MyBlock": {"attention": "attn", "fc1": "mlp.up", "fc2": "mlp.down", "ln": "norm1"}},
        attention={"MyAttention": lambda m: families.projections(m, m.head_dim, "q", "k", "v", "o")},
    ))
"""

from curvlens.families import bert, gpt2, gpt_neox, llama, own, t5, torch_nn, vit
from curvlens.families.family import Attention, Family, Piece, projections
from curvlens.families.layers import layers
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
    "layers",
    "projections",
    "register",
]
