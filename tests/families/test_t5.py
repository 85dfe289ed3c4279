"""Names of T5."""

import pytest

from curvlens import families
from models import MODELS, names_of_layers

ATTENTION = "attn.query attn.key attn.value attn.out"
CROSS = "norm1 cross.query cross.key cross.value cross.out norm2"


def stack(prefix, layer):
    """Two layers; the first holds the table of relative positions."""
    first = names_of_layers(1, layer.replace(ATTENTION, f"{ATTENTION} attn.position"), f"{prefix}.layer")
    return [*first, *names_of_layers(2, layer, f"{prefix}.layer")[len(layer.split()) :], f"{prefix}.norm"]


def test_names():
    model, _ = MODELS["t5"]()
    assert families.find(model).name == "t5"
    blocks = families.blocks(model)
    assert [*blocks.names] == [
        "embed.token",
        *stack("encoder", f"{ATTENTION} norm1 mlp.up mlp.down norm2"),
        *stack("decoder", f"{ATTENTION} {CROSS} mlp.up mlp.down norm3"),
    ]
    assert blocks["embed.token"].aliases == ("encoder.embed.token", "decoder.embed.token", "head")
    assert blocks["decoder.layer.0.attn.position"].heads == (2, 1)


def test_gated_encoder():
    model, _ = MODELS["t5_gated"]()
    assert [*families.blocks(model).names] == [
        "embed.token",
        *stack("encoder", f"{ATTENTION} norm1 mlp.gate mlp.up mlp.down norm2"),
        "head",
        "head.bias",
    ]


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("Model", ["decoder.norm"]),
        ("EncoderModel", ["encoder.norm"]),
        ("ForSequenceClassification", ["head.transform", "head.transform.bias", "head", "head.bias"]),
        ("ForQuestionAnswering", ["head", "head.bias"]),
    ],
)
def test_other_heads(kind, last):
    import transformers

    config = transformers.T5Config(vocab_size=11, d_model=8, d_kv=3, d_ff=12, num_layers=1, num_heads=2)
    names = families.blocks(getattr(transformers, f"T5{kind}")(config)).names
    assert names[0] == "embed.token"
    assert names[1] == "encoder.layer.0.attn.query"
    assert [*names[-len(last) :]] == last


@pytest.mark.parametrize("kind", ["MT5", "UMT5"])
def test_kin(kind):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=11, d_model=8, d_kv=3, d_ff=12, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    names = families.blocks(getattr(transformers, f"{kind}ForConditionalGeneration")(config)).names
    assert names[:6] == (
        "embed.token",
        *(f"encoder.layer.0.{n}" for n in f"{ATTENTION} attn.position".split()),
    )
    assert not [name for name in names if name.endswith("weight")]


def test_sites():
    sites = families.attention_sites(MODELS["t5"]()[0])
    assert [site.name for site in sites] == [
        "encoder.layer.0.attn",
        "encoder.layer.1.attn",
        "decoder.layer.0.attn",
        "decoder.layer.0.cross",
        "decoder.layer.1.attn",
        "decoder.layer.1.cross",
    ]
    assert [site.self_attention for site in sites] == [True, True, True, False, True, False]
    assert all(site.scale == 1.0 for site in sites)
