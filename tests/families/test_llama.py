"""Names of Llama, Mistral and Qwen."""

import pytest
import transformers

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
    assert (
        site.between
        == {
            "llama": ("rotary",),
            "mistral": ("rotary", "window"),
            "qwen2": ("rotary",),
            "qwen3": ("query_norm", "rotary"),
        }[name]
    )


def test_biases_have_heads():
    blocks = families.blocks(MODELS["qwen2"]()[0])
    assert blocks["layer.0.attn.query.bias"].heads == (4, 0)
    assert blocks["layer.0.attn.value.bias"].heads == (2, 0)


SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
QUERY_NORMS = "attn.query_norm attn.key_norm"


@pytest.mark.parametrize(
    ("kind", "layer", "norm", "head"),
    [
        ("Gemma", f"{PLAIN} {MLP} {NORMS}", ["norm"], []),
        ("Gemma2", f"{PLAIN} {MLP} norm1 norm2 norm3 norm4", ["norm"], []),
        ("Olmo", f"{PLAIN} {MLP}", [], ["head"]),
        ("Olmo2", f"{PLAIN} {QUERY_NORMS} {MLP} {NORMS}", ["norm"], ["head"]),
        ("Cohere", f"{PLAIN} {MLP} norm1", ["norm"], []),
        ("SmolLM3", f"{PLAIN} {MLP} {NORMS}", ["norm"], []),
    ],
)
def test_kin_with_norms_in_other_places(kind, layer, norm, head):
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this version of transformers has no {kind}")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**SIZES))
    blocks = families.blocks(model)
    assert families.find(model).name == "llama-like"
    assert [*blocks.names] == ["embed.token", *names_of_layers(2, layer), *norm, *head]
    width = families.attention_sites(model)[0].head_dim
    assert blocks["layer.1.attn.query"].shape == (8, 4 * width)
    assert blocks["layer.1.attn.value"].heads == (2, 1)


def test_kin_with_other_modules_keep_their_own_names():
    from transformers import StableLmConfig, StableLmForCausalLM

    model = StableLmForCausalLM(StableLmConfig(**SIZES, qk_layernorm=True))
    names = families.blocks(model).names
    assert "layer.0.attn.query" in names
    assert any(name.startswith("model.layers.0.self_attn.q_layernorm") for name in names)
