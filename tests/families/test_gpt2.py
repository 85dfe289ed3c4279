"""Names of GPT-2 and its kin."""

import pytest
import torch
from torch import nn

from curvlens import families
from models import MODELS, names_of_layers

LAYER = (
    "norm1 norm1.bias attn.query attn.key attn.value attn.query.bias attn.key.bias attn.value.bias attn.out "
    "attn.out.bias norm2 norm2.bias mlp.up mlp.up.bias mlp.down mlp.down.bias"
)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_classifier"])
def test_names(name):
    model, _ = MODELS[name]()
    head = ["head"] if name == "gpt2_classifier" else []
    blocks = families.blocks(model)
    assert [*blocks.names] == [
        "embed.token",
        "embed.position",
        *names_of_layers(2, LAYER),
        "norm",
        "norm.bias",
        *head,
    ]
    assert families.find(model).name == "gpt2"


def test_the_bare_model_goes_by_the_same_names():
    model, _ = MODELS["gpt2"]()
    assert families.blocks(model.transformer).names == families.blocks(model).names


def test_the_tied_head_is_the_token_embedding():
    blocks = families.blocks(MODELS["gpt2"]()[0])
    assert blocks["embed.token"].aliases == ("head",)
    assert blocks["head"].shape == (11, 8)


def test_norms_are_counted_in_the_order_of_use_with_cross_attention():
    names = families.blocks(MODELS["gpt2_cross"]()[0]).names
    cross = ["key", "value", "key.bias", "value.bias", "query", "query.bias", "out", "out.bias"]
    cross = " ".join(f"cross.{name}" for name in cross)
    layer = LAYER.replace("norm2 norm2.bias", f"norm3 norm3.bias {cross} norm2 norm2.bias")
    assert [*names[2:-2]] == names_of_layers(2, layer)


def test_a_second_head_has_a_name():
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    config = GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, eos_token_id=2, bos_token_id=1
    )
    assert families.blocks(GPT2DoubleHeadsModel(config)).names[-2:] == ("head.choice", "head.choice.bias")


def test_nanogpt():
    model, _ = MODELS["nanogpt"]()
    assert families.find(model).name == "nanogpt"
    # its second norm has no bias
    layer = LAYER.replace("norm2.bias ", "")
    blocks = families.blocks(model)
    assert [*blocks.names] == [
        "embed.token",
        "embed.position",
        *names_of_layers(2, layer),
        "norm",
        "norm.bias",
    ]
    assert blocks["embed.token"].aliases == ("head",)


class RotaryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = 4, 2, 3
        self.c_q, self.c_k, self.c_v = nn.Linear(8, 12), nn.Linear(8, 6), nn.Linear(8, 6)
        self.c_proj = nn.Linear(12, 8)


def test_nanochat_has_separate_projections_and_grouped_heads():
    blocks = families.blocks(nn.ModuleDict({"attn": RotaryAttention()}))
    assert blocks.names[:2] == ("attn.query", "attn.query.bias")
    assert blocks["attn.query"].heads == (4, 1)
    assert blocks["attn.value"].heads == (2, 1)


def test_kin_without_a_number_of_heads_keep_their_own_names():
    model, _ = MODELS["nanogpt"]()
    del model.transformer["h"][0].attn.n_head
    names = families.blocks(model).names
    assert "transformer.h.0.attn.c_attn.weight" in names
    assert "layer.1.attn.query" in names


def test_scale_follows_the_configuration():
    sites = families.attention_sites(MODELS["gpt2_cross"]()[0])
    # by layer, as scale_attn_by_inverse_layer_idx asks
    assert [site.scale for site in sites] == [0.5, 0.5, 0.25, 0.25]
    assert [site.self_attention for site in sites] == [True, False, True, False]
    assert [site.causal for site in sites] == [True, False, True, False]


def test_a_fused_matrix_is_split_as_the_model_splits_it():
    model, _ = MODELS["gpt2"]()
    fused = model.transformer.h[1].attn.c_attn.weight
    parts = families.blocks(model).split(
        families.blocks(model).from_parameters(dict(model.named_parameters()))
    )
    for role, part in zip(("query", "key", "value"), fused.split(8, dim=1), strict=True):
        assert torch.equal(parts[f"layer.1.attn.{role}"], part)
