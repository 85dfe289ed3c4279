"""Names of BERT and RoBERTa."""

import pytest

from curvlens import families
from models import MODELS, names_of_layers

EMBED = ["embed.token", "embed.position", "embed.type", "embed.norm", "embed.norm.bias"]
# RoBERTa registers its positions last
EMBED_ROBERTA = ["embed.token", "embed.type", "embed.norm", "embed.norm.bias", "embed.position"]
LAYER = (
    "attn.query attn.query.bias attn.key attn.key.bias attn.value attn.value.bias attn.out attn.out.bias "
    "norm1 norm1.bias mlp.up mlp.up.bias mlp.down mlp.down.bias norm2 norm2.bias"
)
MASKED = ["head.bias", "head.transform", "head.transform.bias", "head.norm", "head.norm.bias"]
HEADS = {
    "bert": MASKED,
    "bert_classifier": ["pooler", "pooler.bias", "head", "head.bias"],
    "roberta": MASKED,
    "roberta_classifier": ["head.transform", "head.transform.bias", "head", "head.bias"],
}


@pytest.mark.parametrize("name", HEADS)
def test_names(name):
    model, _ = MODELS[name]()
    embed = EMBED_ROBERTA if name.startswith("roberta") else EMBED
    blocks = families.blocks(model)
    assert [*blocks.names] == [*embed, *names_of_layers(2, LAYER), *HEADS[name]]
    assert families.find(model).name == name.removesuffix("_classifier")
    assert blocks["embed.token"].aliases == (("head",) if HEADS[name] is MASKED else ())
    bare = families.blocks(model.base_model).names
    assert [*bare[: len(EMBED)]] == embed


def _small(kind, **more):
    import transformers

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return getattr(transformers, f"{kind}Config")(
        **sizes, intermediate_size=12, max_position_embeddings=8, bos_token_id=1, eos_token_id=2, **more
    )


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("ForPreTraining", [*MASKED, "head.pair", "head.pair.bias"]),
        ("ForNextSentencePrediction", ["head.pair", "head.pair.bias"]),
        ("ForTokenClassification", ["head", "head.bias"]),
        ("ForQuestionAnswering", ["head", "head.bias"]),
    ],
)
def test_other_heads(head, names):
    import transformers

    found = families.blocks(getattr(transformers, f"Bert{head}")(_small("Bert"))).names
    assert [*found[-len(names) :]] == names


@pytest.mark.parametrize("kind", ["XLMRoberta", "Camembert"])
def test_kin_of_roberta(kind):
    import transformers

    model = getattr(transformers, f"{kind}ForMaskedLM")(_small(kind, pad_token_id=0))
    blocks = families.blocks(model)
    # the head may be registered first: then the tied block is its
    assert blocks["head"] is blocks["embed.token"]
    names = {*EMBED, *names_of_layers(1, LAYER), *MASKED}
    assert {*blocks.names, *blocks["head"].aliases} - {"head"} == names


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_decoder_with_cross_attention(kind):
    import transformers

    head = "LMHeadModel" if kind == "Bert" else "ForCausalLM"
    config = _small(kind, is_decoder=True, add_cross_attention=True, pad_token_id=0)
    model = getattr(transformers, kind + head)(config)
    cross = LAYER.split(" mlp")[0].replace("attn.", "cross.").replace("norm1", "norm2")
    layer = LAYER.replace("norm2", "norm3").replace(" mlp.up ", f" {cross} mlp.up ")
    assert [*families.blocks(model).names[len(EMBED) : -len(MASKED)]] == names_of_layers(1, layer)
    first, second = families.attention_sites(model)
    assert (first.name, first.self_attention, first.causal) == ("layer.0.attn", True, True)
    assert (second.name, second.self_attention, second.causal) == ("layer.0.cross", False, False)
