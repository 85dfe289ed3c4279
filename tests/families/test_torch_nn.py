"""Names of the Transformers of torch.nn, alone and inside of a user's module."""

import pytest
from torch import nn

from curvlens import families
from models import MODELS, names_of_layers

ATTENTION = ["query", "key", "value", "query.bias", "key.bias", "value.bias", "out", "out.bias"]
ATTN, CROSS = (" ".join(f"{kind}.{name}" for name in ATTENTION) for kind in ("attn", "cross"))
MLP = "mlp.up mlp.up.bias mlp.down mlp.down.bias"
ENCODER = f"{ATTN} {MLP} norm1 norm1.bias norm2 norm2.bias"
DECODER = f"{ATTN} {CROSS} {MLP} norm1 norm1.bias norm2 norm2.bias norm3 norm3.bias"


def test_encoder_in_a_users_module_goes_by_its_path():
    model, _ = MODELS["torch_encoder"]()
    assert [*families.blocks(model).names] == [
        "embed.weight",
        *names_of_layers(2, ENCODER, "body.layer"),
        "body.norm",
        "body.norm.bias",
        "readout.weight",
        "readout.bias",
    ]
    assert families.find(model).name == "torch.nn"


def test_transformer():
    model, _ = MODELS["torch_transformer"]()
    expected = [
        *names_of_layers(1, ENCODER, "encoder.layer"),
        "encoder.norm",
        "encoder.norm.bias",
        *names_of_layers(2, DECODER, "decoder.layer"),
        "decoder.norm",
        "decoder.norm.bias",
    ]
    assert [*families.blocks(model.transformer).names] == expected
    blocks = families.blocks(model)
    assert [*blocks.names] == ["embed.weight", *(f"transformer.{name}" for name in expected)]
    assert blocks["embed.weight"].aliases == ("readout.weight",)


def test_encoder_alone():
    layer = nn.TransformerEncoderLayer(8, 2, 12, bias=False)
    names = families.blocks(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).names
    plain = " ".join(name for name in ENCODER.split() if not name.endswith("bias"))
    assert [*names] == names_of_layers(2, plain)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ATTENTION),
        ({"bias": False}, ["query", "key", "value", "out"]),
        ({"kdim": 3, "vdim": 5}, ATTENTION),
        ({"add_bias_kv": True}, [*ATTENTION[:6], "key.extra", "value.extra", *ATTENTION[6:]]),
    ],
)
def test_attention_alone(more, names):
    blocks = families.blocks(nn.MultiheadAttention(8, 2, **more))
    assert sorted(blocks.names) == sorted(f"attn.{name}" for name in names)
    assert blocks["attn.key"].shape == (more.get("kdim", 8), 8)
    assert blocks["attn.value"].shape == (more.get("vdim", 8), 8)
    assert all(blocks[f"attn.{role}"].heads == (2, 1) for role in ("query", "key", "value"))


def test_what_only_the_caller_knows_is_left_open():
    (site,) = families.attention_sites(MODELS["torch_attention"]()[0])
    assert (site.self_attention, site.causal) == (None, None)
    assert (site.name, site.module, site.key_argument, site.value_argument) == ("look", "look", 1, 2)
    assert site.between == ("extra",)
