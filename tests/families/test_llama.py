"""Names of Llama, Mistral and Qwen."""

import pytest

from curvlens import families
from models import MODELS, names_of_layers

BIASED = "attn.query attn.query.bias attn.key attn.key.bias attn.value attn.value.bias attn.out attn.out.bias"
PLAIN = "attn.query attn.key attn.value attn.out"
MLP = "mlp.gate mlp.up mlp.down"
NORMS = "norm1 norm2"
LAYERS = {
    "llama": f"{BIASED} mlp.gate mlp.gate.bias mlp.up mlp.up.bias mlp.down mlp.down.bias {NORMS}",
    "llama_classifier": f"{PLAIN} {MLP} {NORMS}",
    "mistral": f"{PLAIN} {MLP} {NORMS}",
    "qwen2": f"{BIASED.removesuffix(' attn.out.bias')} {MLP} {NORMS}",
    "qwen3": f"{PLAIN} attn.query_norm attn.key_norm {MLP} {NORMS}",
}


@pytest.mark.parametrize("name", LAYERS)
def test_names(name):
    model, _ = MODELS[name]()
    blocks = families.blocks(model)
    head = ["head"] if name != "qwen2" else []
    assert [*blocks.names] == ["embed.token", *names_of_layers(2, LAYERS[name]), "norm", *head]
    assert families.find(model).name == name.removesuffix("_classifier")
    assert blocks["embed.token"].aliases == (("head",) if name == "qwen2" else ())
    assert families.blocks(model.model).names == blocks.names[: len(blocks) - len(head)]


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim"),
    [("llama", 4, 2, 2), ("mistral", 2, 1, 6), ("qwen2", 4, 2, 2), ("qwen3", 4, 2, 4)],
)
def test_grouped_heads(name, heads, kv_heads, head_dim):
    model, _ = MODELS[name]()
    blocks = families.blocks(model)
    assert blocks["layer.1.attn.query"].shape == (8, heads * head_dim)
    assert blocks["layer.1.attn.query"].heads == (heads, 1)
    assert blocks["layer.1.attn.key"].shape == blocks["layer.1.attn.value"].shape == (8, kv_heads * head_dim)
    assert blocks["layer.1.attn.key"].heads == blocks["layer.1.attn.value"].heads == (kv_heads, 1)
    assert blocks["layer.1.attn.out"].shape == (heads * head_dim, 8)
    assert blocks["layer.1.attn.out"].heads == (heads, 0)
    site = families.attention_sites(model)[1]
    assert (site.heads, site.kv_heads, site.head_dim) == (heads, kv_heads, head_dim)
    assert site.between == (("query_norm", "rotary") if name == "qwen3" else ("rotary",))


def test_biases_have_heads():
    blocks = families.blocks(MODELS["qwen2"]()[0])
    assert blocks["layer.0.attn.query.bias"].heads == (4, 0)
    assert blocks["layer.0.attn.value.bias"].heads == (2, 0)
