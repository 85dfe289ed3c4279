"""Norms and traces of heads against dense blocks of the autodiff operator, in every family."""

import json
import math

import pytest
import torch

import curvlens as cl
import models
from curvlens import families
from curvlens.engine.quantity import split_gradient
from curvlens.exact import head_rows, heads
from curvlens.exact.head_grams import BLOCKS, KEY_BLOCKS

# float64: sums of a few thousand terms of both signs, whose squares agree to about 1e-14
EXACT = 1e-10
FAMILIES = [
    *(
        "gpt2",
        "gpt2_classifier",
        "gpt2_cross",
        "gpt_neox",
        "llama",
        "llama_classifier",
        "mistral",
        "qwen2",
        "bert",
    ),
    *("bert_classifier", "roberta", "vit", "t5", "torch_encoder", "torch_transformer", "nanogpt", "own_gpt"),
    *("own_tied", "digit_addition"),
]


def landscape(name, **more):
    model, batch = models.MODELS[name]()
    return cl.Landscape(model, batch, **more)


def dense(land, site, block, head):
    """The block of the functional Hessian at the layer's output; `head` counts query heads, or key heads for KK, VK."""
    group = site.heads // site.kv_heads
    key_head = head if block in KEY_BLOCKS else head // group
    names = {
        "Q": f"{site.query}.head.{head}",
        "K": f"{site.key}.head.{key_head}",
        "V": f"{site.value}.head.{key_head}",
    }
    H = cl.functional(land, at=site.output or None)
    rows, columns = (H.codomain.select(names[letter]) for letter in block)
    return H.block(rows, columns).dense(), rows[0].shape == columns[0].shape


def assert_same(result, land, layers=slice(None)):
    sites = [site for site in families.attention_sites(land.model) if site.name in result.layers]
    for i, site in list(enumerate(sites))[layers]:
        for block in BLOCKS:
            for head in range(site.kv_heads if block in KEY_BLOCKS else site.heads):
                matrix, square = dense(land, site, block, head)
                norm, trace = result.norms[block][i, head].item(), result.traces[block][i, head].item()
                assert norm == pytest.approx(matrix.norm().item(), rel=EXACT), (site.name, block, head)
                if square:  # against the norm: a trace may be close to zero
                    scale = matrix.norm().item() * math.sqrt(len(matrix))
                    assert trace == pytest.approx(matrix.trace().item(), abs=EXACT * scale), (
                        site.name,
                        block,
                    )
                else:
                    assert math.isnan(trace)


@pytest.mark.parametrize("name", FAMILIES)
def test_against_the_operator(name):
    """Padding, causal and other masks, grouped heads, rotary positions, biases, cross-attention, tied weights."""
    land = landscape(name)
    result = heads(land, budget=math.inf)
    assert not result.omitted
    assert result.layers == tuple(site.name for site in families.attention_sites(land.model))
    assert all(exact.all() for exact in result.exact.values())
    assert all((error == 0).all() or error.isnan().any() for error in result.stderr.values())
    assert_same(result, land)


def test_tiles(monkeypatch):
    """Shortcuts for causal and symmetric products, which take tiles of rows, on sequences longer than a tile."""
    for module in (head_rows, cl.exact.head_grams):
        monkeypatch.setattr(module, "TILE", 2)
    monkeypatch.setattr(cl.exact.head_grams, "CACHED", 8)
    for name in ("gpt2", "bert", "llama"):
        land = landscape(name)
        assert_same(heads(land, budget=math.inf), land, slice(1, None))


@pytest.mark.parametrize("name", ["gpt2", "gpt2_cross", "bert", "t5", "vit"])
def test_packing_short_sequences_changes_nothing(name, monkeypatch):
    land = landscape(name, dtype=torch.float64)
    found = {}
    for most in (0, 12, 128):
        monkeypatch.setattr(head_rows, "PACKED", most)
        found[most] = heads(land, budget=math.inf)
    assert found[0].sequences > 1
    for most in (12, 128):
        for table in ("norms", "traces", "moments"):
            for key, values in getattr(found[0], table).items():
                other = getattr(found[most], table)[key]
                torch.testing.assert_close(other, values, rtol=EXACT, atol=1e-14, equal_nan=True)
        torch.testing.assert_close(found[most].entropy, found[0].entropy, rtol=EXACT, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_batching_and_padding_change_nothing(name):
    model, batch = models.MODELS[name]()
    one = heads(cl.Landscape(model, batch), budget=math.inf)
    single = heads(cl.Landscape(model, batch, micro_batch=1), budget=math.inf)
    uneven = [
        {key: value[start:stop, :width] for key, value in batch.items()}
        for start, stop, width in ((0, 1, 5), (1, 3, 4))
    ]
    split = heads(cl.Landscape(model, uneven), budget=math.inf)
    for other in (single, split):
        assert other.sequences == one.sequences == 3
        for block in BLOCKS:
            torch.testing.assert_close(other.norms[block], one.norms[block], rtol=EXACT, atol=0)
            torch.testing.assert_close(other.traces[block], one.traces[block], rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(other.entropy, one.entropy, rtol=EXACT, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_estimates_meet_the_norms_within_their_errors(name):
    land = landscape(name)
    exact = heads(land, budget=math.inf)
    found = heads(land, budget=0.0, samples=400, seed=3)
    deviations = []
    for block in BLOCKS:
        assert not found.exact[block].any()
        assert (found.stderr[block] > 0).all()
        # of the squares, whose estimates are unbiased: d(n²) = 2 n dn
        error = 2 * found.norms[block] * found.stderr[block]
        deviations.append(((found.norms[block].square() - exact.norms[block].square()) / error).flatten())
        torch.testing.assert_close(found.traces[block], exact.traces[block], rtol=EXACT, atol=0)
    z = torch.cat(deviations)
    # standard normal scores: 5 standard errors a head, and on average about one
    assert z.abs().max() < 5
    assert 0.4 < z.square().mean() < 2.5
    again = heads(land, budget=0.0, samples=400, seed=3)
    assert all(torch.equal(again.norms[block], found.norms[block]) for block in BLOCKS)
    other = heads(land, budget=0.0, samples=400, seed=4)
    assert not torch.equal(other.norms["QQ"], found.norms["QQ"])


def test_budget_decides_what_is_exact():
    land = landscape("llama")
    cheap = heads(land, budget=0.5, samples=2)
    assert cheap.exact["QQ"].all()  # a Gram matrix where the others take one product a column
    assert not cheap.exact["KK"].any()
    assert "±" in str(cheap)
    assert "±" not in str(heads(land, budget=math.inf)).split("\n", 1)[1]


def test_attention_written_out_gives_the_same():
    """Eager attention without padding: queries, keys and values are computed from the inputs, and checked."""
    model, batch = models.MODELS["gpt2"]()
    ids = {"input_ids": batch["input_ids"] + 3 * (batch["attention_mask"] == 0)}
    found = heads(cl.Landscape(model, ids, loss="next-token"))
    model.set_attn_implementation("eager")
    eager = heads(cl.Landscape(model, ids, loss="next-token"))
    for block in BLOCKS:
        torch.testing.assert_close(eager.norms[block], found.norms[block], rtol=EXACT, atol=0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen3", "query_norm"), ("own_linear_attention", "softmax"), ("torch_attention", "two inputs")],
)
def test_what_has_no_closed_form_is_refused_with_the_reason(name, reason):
    with pytest.raises(ValueError, match=reason):
        heads(landscape(name))


def test_layers_without_closed_form_are_left_out():
    model, batch = models.MODELS["gpt2"]()
    model.transformer.h[0].attn.c_attn.requires_grad_(False)
    result = heads(cl.Landscape(model, batch))
    assert result.layers == ("layer.1.attn",)
    assert "frozen" in result.omitted["layer.0.attn"]
    assert "left out: layer.0.attn" in str(result)
    assert_same(result, cl.Landscape(model, batch))


def test_entropy_and_moments():
    """Of one head of the papers' net, by their definitions."""
    model, batch = models.MODELS["digit_addition"]()
    result = heads(cl.Landscape(model, batch, loss="cross-entropy"))
    attention, x = model.blocks[0].attn, (model.token(batch[0]) + model.position.weight).detach()
    x = x[:, : model.length]
    scores = attention.scale * (x @ attention.W_Q) @ (x @ attention.W_K).mT
    A = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf).softmax(-1).detach()
    scored = batch[1] != -100  # without further layers, the loss depends on the queries that are scored
    entropy = -torch.xlogy(A, A).sum(-1)[scored].mean()
    c = x[:, None] - (A @ x)[:, :, None]
    second = (A * c.square().sum(-1)).sum(-1)[scored].mean()
    assert result.entropy[0, 0].item() == pytest.approx(entropy.item(), rel=EXACT)
    assert result.moments["second"][0, 0].item() == pytest.approx(second.item(), rel=EXACT)


def test_result_as_text_and_numbers():
    result = heads(landscape("llama"), budget=math.inf)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["norms"]["QQ"][1][3] == result.norms["QQ"][1, 3].item()
    assert len(data["norms"]["KK"][0]) == 2
    assert len(data["norms"]["QQ"][0]) == 4
    text = str(result)
    assert f"{result.norms['VQ'][0, 2]:.3g}" in text
    assert "3 sequences" in text


def test_the_model_is_left_as_it_was():
    model, batch = models.MODELS["gpt2"]()
    attention = torch.nn.functional.scaled_dot_product_attention
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    heads(cl.Landscape(model, batch))
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="attention of a known family"):
        heads(landscape("linear_mlp", loss="mse"))


def output_jacobian(land, site, heads_of):
    """`∂F/∂(head's block)` over the tokens that the loss depends on: the layer alone, its inputs as constants."""
    module, seen = land.model.get_submodule(site.module), []
    handle = module.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    (piece,) = land.pieces()
    with cl.guards.twice_differentiable(land.model, land.device):
        land.output(land.parameters(), piece)
    handle.remove()
    args, kwargs = seen[0]
    prefix = site.module + "."
    own = {n.removeprefix(prefix): p for n, p in land.parameters().items() if n.startswith(prefix)}

    def output(parameters):
        found = torch.func.functional_call(module, parameters, args, kwargs)
        return found if isinstance(found, torch.Tensor) else found[0]

    with cl.guards.twice_differentiable(land.model, land.device):
        jacobian = torch.func.jacrev(output)(own)  # [batch, tokens, o, *shape] each
        g = split_gradient(land, piece, site.output)
    kept = g.ne(0).any(-1)
    rows = {prefix + name: j[kept].flatten(0, 1) for name, j in jacobian.items()}
    blocks = land.blocks.select(*heads_of)
    return {b.name: b.source.view(rows[b.source.parameter].contiguous()).flatten(1).detach() for b in blocks}


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_outer_blocks_under_the_identity(name):
    land = landscape(name)
    b = 0.7
    result = heads(land, budget=math.inf, outer=b)
    site = families.attention_sites(land.model)[1]
    group = site.heads // site.kv_heads
    counts = {site.query: site.heads, site.key: site.kv_heads, site.value: site.kv_heads}
    J = output_jacobian(land, site, [f"{block}.head.{h}" for block, n in counts.items() for h in range(n)])
    estimate = heads(land, budget=0.0, outer=b, samples=200)
    for block in (*BLOCKS, "VV"):
        assert result.exact[f"outer {block}"].all()
        for head in range(site.heads if "Q" in block else site.kv_heads):
            key_head = head // group if "Q" in block else head
            of = {"Q": (site.query, head), "K": (site.key, key_head), "V": (site.value, key_head)}
            left, right = (J["{}.head.{}".format(*of[letter])] for letter in block)
            expected = b * (left.T @ right).norm().item()
            assert result.norms[f"outer {block}"][1, head].item() == pytest.approx(expected, rel=EXACT)
        off = (estimate.norms[f"outer {block}"] - result.norms[f"outer {block}"]).abs()
        assert not estimate.exact[f"outer {block}"].any()
        assert (off < 5 * estimate.stderr[f"outer {block}"]).all()


TOP = [
    *("gpt2", "gpt2_classifier", "gpt2_cross", "llama", "qwen2", "bert", "vit", "t5", "nanogpt"),
    *("torch_encoder", "own_tied"),
]


@pytest.mark.parametrize("name", TOP)
def test_outer_blocks_under_the_curvature_of_the_loss(name):
    """Against the operator at the top attention; below it tokens meet again, and it says so."""
    land = landscape(name)
    result = heads(land, budget=math.inf, outer="loss")
    sites = families.attention_sites(land.model)
    # attention to another sequence does not mix tokens of its own, so the self-attention below it is at the top too
    below = len(sites) - (2 if sites[-1].name.endswith("cross") else 1)
    assert list(result.omitted) == [f"outer blocks of {site.name}" for site in sites[:below]]
    assert all("not local to a token" in why for why in result.omitted.values())
    for block in (*BLOCKS, "VV"):
        norms = result.norms[f"outer {block}"]
        assert norms[:below].isnan().all()
        assert result.exact[f"outer {block}"].tolist() == [i >= below for i in range(len(sites))]
        for i, site in list(enumerate(sites))[below:]:
            H, group = cl.gauss_newton(land, at=site.output), site.heads // site.kv_heads
            for head in range(site.heads if "Q" in block else site.kv_heads):
                key_head = head // group if "Q" in block else head
                of = {"Q": (site.query, head), "K": (site.key, key_head), "V": (site.value, key_head)}
                rows, columns = ("{}.head.{}".format(*of[letter]) for letter in block)
                expected = H.block(rows, columns).dense().norm().item()
                assert norms[i, head].item() == pytest.approx(expected, rel=EXACT), (block, head)


def test_the_curvature_of_the_loss_in_pieces():
    model, batch = models.MODELS["gpt2"]()
    one = heads(cl.Landscape(model, batch), budget=math.inf, outer="loss")
    single = heads(cl.Landscape(model, batch, micro_batch=1), budget=math.inf, outer="loss")
    estimate = heads(cl.Landscape(model, batch), budget=0.0, samples=200, outer="loss")
    for block in (*BLOCKS, "VV"):
        name = f"outer {block}"
        torch.testing.assert_close(single.norms[name], one.norms[name], rtol=EXACT, atol=0, equal_nan=True)
        off = (estimate.norms[name] - one.norms[name]).abs()[-1]
        assert (off < 5 * estimate.stderr[name][-1]).all()
    with pytest.raises(ValueError, match='number, the curvature of the loss, or "loss"'):
        heads(cl.Landscape(model, batch), outer="mse")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_single_precision(name):
    """Sums in double precision, and keys about their mean where they are not turned."""
    double = heads(landscape(name), budget=math.inf)
    single = heads(landscape(name, dtype=torch.float32), budget=math.inf)
    for block in BLOCKS:
        # rounding of 6e-8, times the terms of a squared norm over what is left of them, up to a thousand here
        torch.testing.assert_close(single.norms[block], double.norms[block], rtol=1e-4, atol=0)


class SequenceFirst(torch.nn.Module):
    """`nn.MultiheadAttention` as it is by default, tokens before batch, with a mask added to the scores."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(models.VOCABULARY, models.WIDTH)
        self.look = torch.nn.MultiheadAttention(models.WIDTH, 2)
        self.readout = torch.nn.Linear(models.WIDTH, models.VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids).transpose(0, 1)
        mask = torch.linspace(-1, 1, len(x) ** 2, dtype=torch.float64).view(len(x), len(x))
        return self.readout(self.look(x, x, x, need_weights=False, attn_mask=mask)[0]).transpose(0, 1)


def test_tokens_before_batch_and_added_biases():
    model = models.randomise(SequenceFirst().double().eval(), torch.Generator().manual_seed(1))
    land = cl.Landscape(model, models.ids_and_targets())
    result = heads(land)
    assert result.layers == ("look",)
    assert_same(result, land)
