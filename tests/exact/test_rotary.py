"""Attention whose queries and keys are turned between projection and scores."""

import math

import pytest
import torch

import curvlens as cl
import curvlens.exact as exact
import models
from curvlens import families
from curvlens.exact.attention_jet import AttentionLayer
from tests.exact.jets import check_jet
from tests.exact.oracle import autodiff, mse, relative
from tests.exact.test_block import block, self_attention
from tests.exact.test_block_bounds import check_sublayer


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated(x, base=10000.0):
    """Rotary positions by complex numbers: entries f and f + k/2 are one number, which turns by i base^(-2f/k)."""
    L, k = x.shape[-2:]
    z = torch.complex(x[..., : k // 2], x[..., k // 2 :])
    rates = torch.tensor([base ** (-2 * f / k) for f in range(k // 2)], dtype=torch.float64)
    z = z * torch.exp(1j * torch.arange(L, dtype=torch.float64)[:, None] * rates)
    return torch.cat([z.real, z.imag], dim=-1)


def definition(heads, kv_heads, causal, k):
    def forward(w, X):
        out = []
        for x in X:
            q, key, v = (
                (x @ w[name] + w[f"{name}.bias"]).unflatten(-1, (n, -1)).transpose(0, 1)
                for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))
            )
            parts = []
            for h in range(heads):
                T = rotated(q[h]) @ rotated(key[h * kv_heads // heads]).T / math.sqrt(k)
                if causal:
                    T = T.masked_fill(torch.ones_like(T).triu(1).bool(), -math.inf)
                parts.append(T.softmax(-1) @ v[h * kv_heads // heads])
            out.append(torch.cat(parts, -1) @ w["out"] + w["out.bias"])
        return torch.stack(out)

    return forward


@pytest.mark.parametrize(("heads", "kv_heads", "causal"), [(1, 1, False), (2, 2, True), (4, 2, True)])
def test_against_autodiff_of_the_definition(heads, kv_heads, causal):
    layer = self_attention(
        3, heads, 4, 2, 3, causal, biased=True, kv_heads=kv_heads, turns=exact.rotary(5, 4)
    )
    check_jet(AttentionLayer(layer), randn(2, 4, 3), definition(heads, kv_heads, causal, 4))


@pytest.mark.parametrize("form", ["side by side", "stack", "any matrices"])
def test_both_parts_on_uneven_sequences(form):
    turns = randn(4, 2, 2, seed=9) if form == "any matrices" else exact.rotary(4, 2)
    if form == "stack":
        layer = exact.SelfAttention(*(randn(2, 3, 2, seed=i) for i in range(3)), turns=turns)
    else:
        layer = exact.SelfAttention(*(randn(3, 4, seed=i) for i in range(3)), heads=2, turns=turns)
    X = [randn(4, 3, seed=5), randn(2, 3, seed=6)]
    Y = randn(6, layer.outputs, seed=7)
    R = exact.hessian(layer, X, list(Y.split([4, 2])))
    outer, functional = autodiff(layer, X, mse(Y, [4, 2]))
    # 1e-12: float64, sums of some thousand products
    assert relative(R.outer.dense(), outer) < 1e-12
    assert relative(R.functional.dense(), functional, outer) < 1e-12
    assert relative(R.total.dense(), outer + functional) < 1e-12
    assert relative(R.total.frobenius(), (outer + functional).norm()) < 1e-12
    part = R.total.block("query.head.1", "key.head.0")
    names = [R.blocks.positions(R.blocks.select(name)) for name in ("query.head.1", "key.head.0")]
    assert relative(part.dense(), (outer + functional)[names[0]][:, names[1]]) < 1e-12


def test_turns_that_do_nothing():
    W, X, Y = [randn(3, 4, seed=i) for i in range(3)], randn(5, 3, seed=5), randn(5, 4, seed=6)
    still = torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    plain, turned = (exact.hessian(exact.SelfAttention(*W, turns=t), X, Y) for t in (None, still))
    for part in ("outer", "functional", "total"):
        assert (
            relative(getattr(turned, part).dense(), getattr(plain, part).dense(), plain.total.dense()) < 1e-13
        )
    # scores depend on differences of positions alone: one turn more for all tokens changes nothing
    later = exact.rotary(9, 4)
    a, b = (exact.SelfAttention(*W, turns=t)(X) for t in (later[:5], later[4:]))
    assert relative(a, b) < 1e-13


def test_bounds_and_propagation():
    layer = self_attention(3, 2, 2, 2, 3, True, biased=True, turns=1.5 * exact.rotary(4, 2))
    X = randn(2, 4, 3)
    check_sublayer(AttentionLayer(layer), X, randn(2, 4, 3, seed=1))
    found = exact.bounds(layer, X, randn(2, 4, 3, seed=2))
    assert (found.true <= found.total * (1 + 1e-12)).all()
    whole = block(placement="pre", heads=2, turns=exact.rotary(4, 2))
    steps = exact.propagation(whole, (X, randn(2, 4, 3, seed=3))).sublayers
    assert [step.name for step in steps] == ["attn", "mlp"]


def test_a_layer_of_llama():
    """The closed form of an attention layer of Llama, and its heads from one gradient: the same norms."""
    model, batch = models.MODELS["llama"]()
    ids = batch["input_ids"][:1]
    land = cl.Landscape(model, {"input_ids": ids}, loss="next-token")
    site = families.attention_sites(model)[1]
    attention, seen = model.get_submodule(site.module), {}
    hooks = [
        attention.register_forward_pre_hook(
            lambda m, args, kwargs: seen.update(x=kwargs["hidden_states"]), with_kwargs=True
        ),
        attention.register_forward_hook(lambda m, args, out: seen.update(F=out[0])),
    ]
    loss = model(input_ids=ids, labels=ids).loss
    g = torch.autograd.grad(loss, seen["F"])[0]
    for hook in hooks:
        hook.remove()
    layer = exact.SelfAttention(
        *(attention.get_submodule(f"{name}_proj").weight.T for name in "qkv"),
        W_O=attention.o_proj.weight.T,
        **{f"b_{name.upper()}": attention.get_submodule(f"{name}_proj").bias for name in "qkvo"},
        heads=site.heads,
        causal=True,
        turns=exact.rotary(ids.shape[1], attention.head_dim, model.config.rope_parameters["rope_theta"]),
    )
    # the model rounds its table of sines to single precision
    assert relative(layer(seen["x"].detach()), seen["F"].detach()) < 1e-6
    R, heads = exact.hessian(layer, seen["x"], g=g), exact.heads(land, budget=math.inf)
    for h in range(site.heads):
        norm = R.functional.block(f"query.head.{h}").frobenius()
        assert norm.item() == pytest.approx(heads.norms["QQ"][1, h].item(), rel=1e-5)
    for h in range(site.kv_heads):
        norm = R.functional.block(f"key.head.{h}").frobenius()
        assert norm.item() == pytest.approx(heads.norms["KK"][1, h].item(), rel=1e-5)


def test_messages():
    W = [randn(3, 4, seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="heads of an even width"):
        exact.rotary(3, 3)
    with pytest.raises(ValueError, match=r"expected turns \[L, 2, 2\].*got \[5, 4, 4\]"):
        exact.SelfAttention(*W, heads=2, turns=exact.rotary(5, 4))
    with pytest.raises(ValueError, match="at most 3 tokens"):
        exact.hessian(exact.SelfAttention(*W, turns=exact.rotary(3, 4)), randn(5, 3), randn(5, 4))
    with pytest.raises(ValueError, match="no turns with W_QK"):
        exact.SelfAttention(W_QK=randn(3, 3), W_V=W[2], turns=exact.rotary(5, 4))
