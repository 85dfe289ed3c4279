"""Names of the package's own nets."""

from curvlens import families
from models import MODELS, names_of_layers


def test_names():
    layer = (
        "attn.query attn.key attn.value attn.out attn.query.bias attn.key.bias attn.value.bias attn.out.bias "
        "mlp.up mlp.down mlp.up.bias mlp.down.bias norm1 norm1.bias norm2 norm2.bias"
    )
    model, _ = MODELS["own_gpt"]()
    assert families.find(model).name == "curvlens"
    assert [*families.blocks(model).names] == [
        "embed.token",
        "embed.position",
        *names_of_layers(2, layer),
        "norm",
        "norm.bias",
        "head",
    ]


def test_the_tied_head_is_the_token_embedding():
    blocks = families.blocks(MODELS["own_tied"]()[0])
    layer = names_of_layers(1, "attn.query attn.key attn.value attn.out norm1 norm1.bias")
    assert [*blocks.names] == ["embed.token", "embed.position", *layer]
    assert blocks["embed.token"].aliases == ("head",)


def test_layers_of_a_linear_mlp():
    blocks = families.blocks(MODELS["linear_mlp"]()[0])
    assert [*blocks.names] == ["layer.0", "layer.1"]
    assert [block.shape for block in blocks] == [(4, 6), (6, 3)]


def test_sites_tell_of_masks_and_softmax():
    (linear,) = families.attention_sites(MODELS["own_linear_attention"]()[0])
    (tied,) = families.attention_sites(MODELS["own_tied"]()[0])
    assert (linear.between, linear.causal) == (("linear",), True)
    assert (tied.between, tied.causal, tied.head_dim) == ((), False, 3)
