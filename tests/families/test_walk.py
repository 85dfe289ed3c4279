"""What holds for every family: each entry in one block, and names that mean what they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from curvlens import families
from models import MODELS

# float64 sums of a few hundred products of order one
EXACT = 1e-12


def run(model, batch, parameters=None):
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch[:1], {})
    with torch.no_grad():
        return functional_call(model, parameters or {}, args, kwargs)


class Record:
    """What passes one attention: its inputs, the outputs of its heads side by side, and the projected output.

    Only the first sequence, which has no padding.
    """

    def __init__(self, model, batch, site, blocks, vector):
        modules = dict(model.named_modules())
        inside = site.output == site.module  # no module of its own is the output projection
        seen = {}
        hooks = [
            modules[site.input].register_forward_pre_hook(lambda _, args: seen.update(queries=args)),
            modules[site.memory].register_forward_pre_hook(lambda _, args: seen.update(memory=args)),
            modules[site.output].register_forward_pre_hook(lambda _, args: seen.update(mixed=args)),
            modules[site.output].register_forward_hook(lambda _, args, out: seen.update(out=out)),
        ]
        try:
            run(model, batch, blocks.to_parameters(vector))
            self.x, self.out = seen["queries"][0][0], first(seen["out"])[0]
            self.keys_from = seen["memory"][site.key_argument][0]
            self.values_from = seen["memory"][site.value_argument][0]
            if inside:  # its output is that of the heads when the projection is the identity
                plain = blocks.split(vector.clone())
                plain[site.out].copy_(torch.eye(*plain[site.out].shape))
                if f"{site.out}.bias" in plain:
                    plain[f"{site.out}.bias"].zero_()
                run(model, batch, blocks.to_parameters(blocks.join(plain)))
            self.mixed = (first(seen["out"]) if inside else seen["mixed"][0])[0]
        finally:
            for hook in hooks:
                hook.remove()
        self.heads = self.mixed.unflatten(-1, (site.heads, -1))


def first(output):
    return output[0] if isinstance(output, tuple) else output


CASES = [(name, site.name) for name in MODELS for site in families.attention_sites(MODELS[name]()[0])]


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    name, where = request.param
    model, batch = MODELS[name]()
    blocks = families.blocks(model)
    vector = blocks.from_parameters(dict(model.named_parameters()))
    site = next(site for site in families.attention_sites(model) if site.name == where)
    return name, model, batch, site, blocks, vector


def causal(name, site):
    """Whether a mask hides later tokens: told by the site, or here where the caller of the module decides."""
    if site.causal is None:
        return name == "torch_encoder" or ("decoder" in site.layer and site.self_attention)
    return site.causal


def attend(name, model, site, parts, record):
    """The outputs of the heads by the papers' formula, from the blocks alone: `[tokens, heads, head_dim]`."""
    attention = model.get_submodule(site.module)

    def project(x, role, heads):
        y = x @ parts[role] + parts.get(f"{role}.bias", 0)
        return y.unflatten(-1, (heads, -1)).transpose(0, 1)

    q = project(record.x, site.query, site.heads)
    k = project(record.keys_from, site.key, site.kv_heads)
    v = project(record.values_from, site.value, site.kv_heads)
    if "query_norm" in site.between:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if "rotary" in site.between:
        q, k = rotate(model, q), rotate(model, k)
    if "extra" in site.between:  # a learned key and value, and a zero one, behind those of the sequence
        learned = (
            parts[f"{role}.extra"].unflatten(0, (site.heads, 1, -1)) for role in (site.key, site.value)
        )
        k, v = (
            torch.cat([x, more, torch.zeros_like(more)], 1) for x, more in zip((k, v), learned, strict=True)
        )
    k, v = (x.repeat_interleave(site.heads // site.kv_heads, 0) for x in (k, v))
    scores = site.scale * q @ k.mT
    if "position" in site.between:
        stack = site.module.split("block")[0]  # the first layer of a stack has the table for all
        first_layer = model.get_submodule(f"{stack}block.0.layer.0.SelfAttention")
        scores = scores + first_layer.compute_bias(*scores.shape[1:])[0]
    future = torch.ones_like(scores).triu(1).bool() & causal(name, site)
    if "linear" in site.between:
        return (scores.masked_fill(future, 0) @ v).transpose(0, 1)
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1)


def rotate(model, x):
    """Rotary positions in the first dimensions of each head; their angles are float32 in Transformers."""
    frequencies = next(b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq")).float()
    angles = torch.arange(x.shape[-2]).float()[:, None] * torch.cat([frequencies, frequencies])
    half = len(frequencies)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([a, b], -1) * angles.cos().double() + torch.cat([-b, a], -1) * angles.sin().double()
    return torch.cat([turned, rest], -1)


def test_blocks_of_an_attention_are_its_matrices(case):
    name, model, batch, site, blocks, vector = case
    record = Record(model, batch, site, blocks, vector)
    parts = blocks.split(vector)
    torch.testing.assert_close(attend(name, model, site, parts, record), record.heads, rtol=EXACT, atol=EXACT)
    out = record.mixed @ parts[site.out] + parts.get(f"{site.out}.bias", 0)
    torch.testing.assert_close(out, record.out, rtol=EXACT, atol=EXACT)
    assert site.head_dim == parts[site.query].shape[1] // site.heads


def perturbed(blocks, vector, name):
    changed = vector.clone()
    where = blocks.positions(blocks.select(name))
    delta = torch.randn(len(where), generator=torch.Generator().manual_seed(5), dtype=vector.dtype)
    changed[where] += delta
    return changed, delta


def test_a_slice_moves_its_own_heads_and_no_other(case):
    _, model, batch, site, blocks, vector = case
    before = Record(model, batch, site, blocks, vector).heads
    for role, heads in ((site.query, site.heads), (site.key, site.kv_heads), (site.value, site.kv_heads)):
        for kind in ("", ".bias", ".extra"):
            if role + kind not in blocks:
                continue
            for head in range(heads):
                changed, _ = perturbed(blocks, vector, f"{role}{kind}.head.{head}")
                moved = (Record(model, batch, site, blocks, changed).heads - before).abs().amax((0, 2))
                own = torch.arange(site.heads) // (site.heads // heads) == head
                assert (moved[~own] < EXACT).all()
                # the same vector added to every key changes no softmax, unless something lies between
                if not (role == site.key and kind == ".bias" and not set(site.between) - {"position"}):
                    assert moved[own].amin() > 1e-3


def test_a_slice_of_out_takes_its_own_head(case):
    _, model, batch, site, blocks, vector = case
    before = Record(model, batch, site, blocks, vector)
    for head in range(site.heads):
        changed, delta = perturbed(blocks, vector, f"{site.out}.head.{head}")
        after = Record(model, batch, site, blocks, changed)
        own = before.heads[:, head] @ delta.view(before.heads.shape[-1], -1)
        assert own.abs().amax() > 1e-3
        torch.testing.assert_close(after.out - before.out, own, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(after.heads, before.heads, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "t5_gated"])
def test_what_enters_down_is_linear_in_up_and_not_in_gate(name):
    model, batch = MODELS[name]()
    blocks = families.blocks(model)
    vector = blocks.from_parameters(dict(model.named_parameters()))
    layer = families.attention_sites(model)[1].layer
    down = model.get_submodule(blocks[f"{layer}.mlp.down"].source.parameter.removesuffix(".weight"))

    def entering(weights):
        seen = {}
        hook = down.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
        run(model, batch, blocks.to_parameters(weights))
        hook.remove()
        return seen["x"]

    for role, linear in (("up", True), ("gate", False)):
        changed, _ = perturbed(blocks, vector, f"{layer}.mlp.{role}")
        curvature = entering(changed) - 2 * entering(vector) + entering(2 * vector - changed)
        assert (curvature.abs().amax() < 100 * EXACT) == linear


# -- every entry in one block


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_is_in_one_block(name):
    model, _ = MODELS[name]()
    blocks = families.blocks(model)
    count = {n: torch.zeros(p.shape, dtype=torch.long) for n, p in model.named_parameters()}
    for block in blocks.heads():
        block.source.view(count[block.source.parameter]).add_(1)
    assert all(bool((times == 1).all()) for times in count.values())
    assert blocks.size == sum(p.numel() for p in model.parameters())
    assert list(blocks.parameters) == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_make_the_round_trip(name):
    model, _ = MODELS[name]()
    blocks = families.blocks(model)
    parameters = dict(model.named_parameters())
    again = blocks.to_parameters(blocks.from_parameters(parameters))
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[n], p) for n, p in parameters.items())


@pytest.mark.parametrize("name", MODELS)
def test_heads_lie_where_their_blocks_say(name):
    model, _ = MODELS[name]()
    blocks, parameters = families.blocks(model), dict(model.named_parameters())
    heads = blocks.heads()
    vector = blocks.from_parameters(parameters)
    assert torch.equal(heads.from_parameters(parameters), vector[blocks.positions(heads)])


@pytest.mark.parametrize("name", MODELS)
def test_no_parameter_keeps_its_own_name_but_in_a_users_module(name):
    model, _ = MODELS[name]()
    own = {n for n, _ in model.named_parameters()} & set(families.blocks(model).names)
    user = ("embed.", "readout.", "queries.", "keys.", "values.") if name.startswith("torch") else ("norm.",)
    # a norm of torch.nn that is already called "norm" has a bias of the right name
    assert {n for n in own if not n.startswith(user) and not n.endswith("norm.bias")} == set()


# -- which parameters


def test_frozen_parameters_are_left_out():
    model, _ = MODELS["gpt2"]()
    model.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    names = families.blocks(model).names
    assert "layer.0.attn.query" not in names
    assert "layer.0.attn.query.bias" in names
    assert "layer.1.attn.query" in names


def test_named_parameters_alone():
    model, _ = MODELS["gpt2"]()
    model.requires_grad_(False)
    blocks = families.blocks(model, ["transformer.h.1.attn.c_attn.weight", "lm_head.weight"])
    assert blocks.names == ("embed.token", "layer.1.attn.query", "layer.1.attn.key", "layer.1.attn.value")
    assert blocks["head"].name == "embed.token"
    assert len(families.blocks(model)) == 0
    with pytest.raises(KeyError, match=r"got 'lm_hed.weight'; did you mean 'lm_head.weight'"):
        families.blocks(model, ["lm_hed.weight"])


def test_unknown_parameters_keep_their_own_names():
    model, _ = MODELS["gpt2"]()
    model.transformer.h[0].adapter = nn.Linear(8, 2)
    model.transformer.h[1].gain = nn.Parameter(torch.ones(()))
    blocks = families.blocks(model)
    assert blocks["transformer.h.0.adapter.weight"].shape == (2, 8)
    assert blocks["transformer.h.1.gain"].shape == ()
    assert "layer.0.attn.query" in blocks


def test_unknown_models_fall_back_to_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert families.find(model) is families.PARAMETERS
    blocks = families.blocks(model)
    assert blocks.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert blocks["0.weight"].shape == (4, 3)
    assert families.attention_sites(model) == []


def test_a_module_used_twice_has_both_names():
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.layers[1] = model.layers[0]
    blocks = families.blocks(model)
    assert blocks["layer.1.attn.query"].name == "layer.0.attn.query"
    assert blocks.size == sum(p.numel() for p in model.parameters())


def test_two_models_in_one_are_told_apart():
    towers = nn.ModuleDict({"text": MODELS["bert"]()[0], "image": MODELS["vit"]()[0]})
    names = families.blocks(towers).names
    assert "text.layer.0.attn.query" in names
    assert "image.layer.0.attn.query" in names
    assert len({site.name for site in families.attention_sites(towers)}) == 4


def test_wrapped_models_keep_their_names():
    model, _ = MODELS["gpt2"]()
    assert families.blocks(nn.DataParallel(model)).names == families.blocks(model).names
    assert families.blocks(torch.compile(model)).names == families.blocks(model).names
    assert families.find(torch.compile(model)).name == "gpt2"


# -- a family of one's own


class MyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 2
        self.qkv, self.o = nn.Linear(6, 8), nn.Linear(4, 6)


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 6)
        self.rows = nn.ModuleList([MyAttention()])


@pytest.fixture
def families_restored():
    before = list(families.walk._families)
    yield
    families.walk._families[:] = before


@pytest.mark.usefixtures("families_restored")
def test_registering_a_family():
    model = MyModel()
    assert families.blocks(model).names[0] == "tokens.weight"
    mine = families.register(
        families.Family(
            "mine",
            names={"MyModel": {"tokens": "embed.token", "rows.*": "layer.*.attn"}},
            attention={
                "MyAttention": lambda m: families.projections(m, m.head_dim, "qkv", "qkv", "qkv", "o")
            },
        )
    )
    assert families.find(model) is mine
    blocks = families.blocks(model)
    assert blocks.names == (
        "embed.token",
        *(f"layer.0.attn.{n}" for n in ("query", "key", "value", "query.bias", "key.bias", "value.bias")),
        *("layer.0.attn.out", "layer.0.attn.out.bias"),
    )
    # two heads of queries, and one of keys and values, as the widths say
    assert blocks["layer.0.attn.query"].heads == (2, 1)
    assert blocks["layer.0.attn.key"].heads == (1, 1)
    w = dict(model.named_parameters())["rows.0.qkv.weight"]
    torch.testing.assert_close(blocks["layer.0.attn.value"].source.view(w), w[6:8].T)


@pytest.mark.usefixtures("families_restored")
def test_a_family_that_cuts_wrongly_is_refused():
    wrong = families.Attention(
        1,
        1,
        2,
        {"qkv.weight": (families.Piece("query", lambda w: w[:5]), families.Piece("key", lambda w: w[4:]))},
    )
    families.register(families.Family("wrong", attention={"MyAttention": lambda m: wrong}))
    with pytest.raises(
        ValueError, match=r"rows.0.qkv.weight \[8, 6\]: expected every entry in exactly one block"
    ):
        families.blocks(MyModel())
