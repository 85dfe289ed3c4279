"""Names of GPT-NeoX, whose fused matrix is interleaved by heads."""

import torch

from curvlens import families
from models import MODELS, names_of_layers

LAYER = (
    "norm1 norm1.bias norm2 norm2.bias attn.query attn.key attn.value attn.query.bias attn.key.bias "
    "attn.value.bias attn.out attn.out.bias mlp.up mlp.up.bias mlp.down mlp.down.bias"
)


def test_names():
    model, _ = MODELS["gpt_neox"]()
    assert families.find(model).name == "gpt-neox"
    names = families.blocks(model).names
    assert [*names] == ["embed.token", *names_of_layers(2, LAYER), "norm", "norm.bias", "head"]
    assert families.blocks(model.gpt_neox).names == names[:-1]


def test_interleaved_heads_are_gathered():
    model, _ = MODELS["gpt_neox"]()
    blocks = families.blocks(model)
    fused = model.gpt_neox.layers[0].attention.query_key_value
    weight, bias = fused.weight.view(2, 3, 4, 8), fused.bias.view(2, 3, 4)
    parts = blocks.split(blocks.from_parameters(dict(model.named_parameters())))
    for i, role in enumerate(("query", "key", "value")):
        assert torch.equal(parts[f"layer.0.attn.{role}"], weight[:, i].flatten(0, 1).T)
        assert torch.equal(parts[f"layer.0.attn.{role}.bias"], bias[:, i].flatten())
        heads = blocks[f"layer.0.attn.{role}"].split_heads()
        assert [torch.equal(h.source.view(fused.weight), weight[n, i].T) for n, h in enumerate(heads)] == [
            True
        ] * 2
