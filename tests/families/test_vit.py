"""Names of ViT, in its present layout and that of version 4 of Transformers."""

from torch import nn

from curvlens import families
from models import MODELS, names_of_layers

LAYER = (
    "attn.query attn.query.bias attn.key attn.key.bias attn.value attn.value.bias attn.out attn.out.bias "
    "norm1 norm1.bias norm2 norm2.bias mlp.up mlp.up.bias mlp.down mlp.down.bias"
)


def test_names():
    model, _ = MODELS["vit"]()
    assert families.find(model).name == "vit"
    blocks = families.blocks(model)
    # the order of modules in a layer is that of the installed version
    assert sorted(blocks.names) == sorted(
        [
            "embed.class",
            "embed.position",
            "embed.patch",
            "embed.patch.bias",
            *names_of_layers(2, LAYER),
            "norm",
            "norm.bias",
            "head",
            "head.bias",
        ]
    )


def test_a_patch_is_a_row_of_pixels():
    model, _ = MODELS["vit"]()
    block = families.blocks(model)["embed.patch"]
    weight = next(p for n, p in model.named_parameters() if n.endswith("projection.weight"))
    assert block.shape == (2 * 2 * 2, 8)
    assert (block.source.view(weight.detach())[:, 3] == weight[3].flatten()).all()


def test_masked_image_model():
    from transformers import ViTConfig, ViTForMaskedImageModeling, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = ViTConfig(**sizes, image_size=4, patch_size=2, encoder_stride=2)
    names = families.blocks(ViTForMaskedImageModeling(config)).names
    assert "embed.mask" in names
    assert names[-2:] == ("head", "head.bias")
    assert families.blocks(ViTModel(config)).names[-2:] == ("pooler", "pooler.bias")


# the modules of version 4, by their names


def _module(name, **children):
    module = type(name, (nn.Module,), {})()
    for child, value in children.items():
        setattr(module, child, value)
    return module


def test_names_of_version_4():
    inner = _module("ViTSelfAttention", **{role: nn.Linear(8, 8) for role in ("query", "key", "value")})
    inner.attention_head_size = 4
    attention = _module(
        "ViTAttention", attention=inner, output=_module("ViTSelfOutput", dense=nn.Linear(8, 8))
    )
    layer = _module(
        "ViTLayer",
        attention=attention,
        intermediate=_module("ViTIntermediate", dense=nn.Linear(8, 12)),
        output=_module("ViTOutput", dense=nn.Linear(12, 8)),
        layernorm_before=nn.LayerNorm(8),
        layernorm_after=nn.LayerNorm(8),
    )
    model = _module("ViTModel", encoder=_module("ViTEncoder", layer=nn.ModuleList([layer])))
    blocks = families.blocks(model)
    assert sorted(blocks.names) == sorted(names_of_layers(1, LAYER))
    assert blocks["layer.0.attn.value"].heads == (2, 1)
