"""Whole blocks and stacks against autograd through their definition, and against Theorem 5's own matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian, jacobian

import curvlens.exact as exact
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.block import TransformerBlock, stack
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.linear import Linear
from curvlens.exact.norm import LayerNorm, RMSNorm
from tests.exact.jets import check_by_differences, check_jet, relative, unflat
from tests.exact.test_ffn import TORCH


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def self_attention(
    d, heads=1, k=2, v=2, out=None, causal=False, biased=False, seed=0, kv_heads=None, **options
):
    kv_heads = kv_heads or heads
    widths = {"Q": heads * k, "K": kv_heads * k, "V": kv_heads * v, "O": out}
    biases = {
        f"b_{n}": randn(w, seed=seed + 9 + i) for i, (n, w) in enumerate(widths.items()) if biased and w
    }
    return exact.SelfAttention(
        randn(d, heads * k, seed=seed + 1),
        randn(d, kv_heads * k, seed=seed + 2),
        randn(d, kv_heads * v, seed=seed + 3),
        W_O=None if out is None else randn(heads * v, out, seed=seed + 4),
        heads=heads,
        causal=causal,
        **biases,
        **options,
    )


def attention(*shape, **options):
    return AttentionLayer(self_attention(*shape, **options))


def plain_attention(w, X, heads, causal, prefix=""):
    """Attention by its definition, one sequence and one head at a time."""
    batch = X if X.dim() == 3 else X[None]
    w = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
    results = []
    for x in batch:
        q, k, v = (
            (x @ w[name] + w.get(f"{name}.bias", 0)).chunk(heads, -1) for name in ("query", "key", "value")
        )
        parts = []
        for qh, kh, vh in zip(q, k, v, strict=True):
            T = qh @ kh.T / math.sqrt(qh.shape[1])
            if causal:
                T = T.masked_fill(torch.ones_like(T).triu(1).bool(), -math.inf)
            parts.append(T.softmax(-1) @ vh)
        z = torch.cat(parts, -1)
        results.append(z @ w["out"] + w.get("out.bias", 0) if "out" in w else z)
    return torch.stack(results).reshape(*X.shape[:-1], -1)


def plain_norm(w, X, name, eps, centred=True):
    m = X - X.mean(-1, keepdim=True) if centred else X
    return w[name] * m / ((m * m).mean(-1, keepdim=True) + eps).sqrt() + w.get(f"{name}.bias", 0)


def plain_mlp(w, Y, activation, prefix):
    up = Y @ w[f"{prefix}up"] + w.get(f"{prefix}up.bias", 0)
    gate = w.get(f"{prefix}gate")
    a = TORCH[activation](up) if gate is None else TORCH[activation](Y @ gate) * up
    return a @ w[f"{prefix}down"] + w.get(f"{prefix}down.bias", 0)


def plain_block(w, X, placement, heads, causal, activation, eps=1e-5, prefix="", centred=True):
    def norm(x, name):
        return plain_norm(w, x, prefix + name, eps, centred)

    def attn(x):
        return plain_attention(w, x, heads, causal, f"{prefix}attn.")

    def mlp(x):
        return plain_mlp(w, x, activation, f"{prefix}mlp.")

    if placement == "none":
        Y = X + attn(X)
        return Y + mlp(Y)
    if placement == "pre":
        Y = X + attn(norm(X, "norm1"))
        return Y + mlp(norm(Y, "norm2"))
    Y = norm(X + attn(X), "norm1")
    return norm(Y + mlp(Y), "norm2")


def block(d=3, m=5, placement="post", heads=1, causal=False, activation="gelu", rms=False, seed=0, **options):
    attn = self_attention(d, heads, out=d, causal=causal, seed=seed, **options)
    mlp = FeedForward(
        randn(d, m, seed=seed + 21),
        randn(m, d, seed=seed + 22),
        activation=activation,
        biases={"up": randn(m, seed=seed + 23)},
    )
    if placement == "none":
        return TransformerBlock(attn, mlp, norm="none")
    if rms:
        norms = [RMSNorm(randn(d, seed=seed + 24 + i), eps=1e-5) for i in range(2)]
    else:
        norms = [
            LayerNorm(randn(d, seed=seed + 24 + i), randn(d, seed=seed + 26 + i), 1e-5) for i in range(2)
        ]
    return TransformerBlock(attn, mlp, *norms, norm=placement)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 2),
    L=st.integers(1, 4),
    d=st.integers(1, 3),
    heads=st.integers(1, 3),
    k=st.integers(1, 2),
    v=st.integers(1, 2),
    out=st.sampled_from([None, 2]),
    causal=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_with_respect_to_weights_and_input(n, L, d, heads, k, v, out, causal, biased, seed):
    layer = attention(d, heads, k, v, out, causal, biased, seed)
    X = randn(n, L, d, seed=seed)
    check_jet(layer, X, lambda w, X: plain_attention(w, X, heads, causal), seed)


@pytest.mark.parametrize("placement", ["post", "pre", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 2, "causal": True, "biased": True},
        {"activation": "relu", "rms": True, "m": 2},
        {"activation": "silu", "heads": 2, "k": 1},
    ],
    ids=["single", "causal", "relu-rms", "silu"],
)
def test_block_is_its_definition_differentiated(placement, options):
    layer, X = block(placement=placement, **options), randn(2, 3, 3)
    heads, causal = options.get("heads", 1), options.get("causal", False)
    activation, centred = options.get("activation", "gelu"), not options.get("rms", False)

    def plain(w, X):
        return plain_block(w, X, placement, heads, causal, activation, centred=centred)

    check_jet(layer, X, plain)
    check_by_differences(layer, X, plain)


@pytest.mark.parametrize("activation", ["linear", "sigmoid", "row map"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_other_attention_maps_shared_heads_and_masks(activation, kv_heads):
    maps = {"linear": lambda T: T, "sigmoid": torch.sigmoid, "row map": lambda T: T.softmax(-1)}

    def softmax_first(T):
        p = T.softmax(-1)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]

    def softmax_second(T, u):
        p = T.softmax(-1)
        e = p * (u - (p * u).sum(-1, keepdim=True))
        return torch.diag_embed(e) - p[..., :, None] * e[..., None, :] - e[..., :, None] * p[..., None, :]

    named = (
        exact.RowMap(maps["row map"], softmax_first, softmax_second) if "row" in activation else activation
    )
    mask = torch.tensor([[True, False, True], [True, True, False], [True, True, True]])
    layer = attention(3, 2, out=3, biased=True, kv_heads=kv_heads, activation=named, mask=mask)

    def definition(w, X):
        results = []
        for x in X:
            q, k, v = ((x @ w[n] + w[f"{n}.bias"]).split(2, dim=-1) for n in ("query", "key", "value"))
            parts = []
            for h in range(2):
                T = q[h] @ k[h * kv_heads // 2].T / math.sqrt(2)
                if activation == "row map":
                    A = maps[activation](T.masked_fill(~mask, -math.inf))
                else:
                    A = maps[activation](T) * mask
                parts.append(A @ v[h * kv_heads // 2])
            results.append(torch.cat(parts, -1) @ w["out"] + w["out.bias"])
        return torch.stack(results)

    check_jet(layer, randn(2, 3, 3), definition)


@pytest.mark.parametrize(
    "form", ["stack", "stack with out", "one matrix", "stack of one matrix", "grouped stack"]
)
def test_other_forms_of_attention(form):
    """Stacks of heads, whose outputs are added, and `W_QK`, against the layer's own forward pass."""
    H, d = 3, 4
    W_Q, W_K, W_V, W_O = (
        randn(H, *shape, seed=i) for i, shape in enumerate([(d, 2), (d, 2), (d, 3), (3, d)])
    )
    made = {
        "stack": lambda: exact.SelfAttention(W_Q, W_K, W_V, b_Q=randn(H, 2, seed=7), b_V=randn(H, 3, seed=8)),
        "stack with out": lambda: exact.SelfAttention(
            W_Q, W_K, W_V, W_O=W_O, b_O=randn(d, seed=9), causal=True
        ),
        "one matrix": lambda: exact.SelfAttention(W_QK=randn(d, d), W_V=randn(d, 3, seed=1), temperature=1.7),
        "stack of one matrix": lambda: exact.SelfAttention(W_QK=0.5 * randn(H, d, d), W_V=W_V),
        "grouped stack": lambda: exact.SelfAttention(W_Q, W_K[:1], W_V[:1], W_O=W_O),
    }
    attention = made[form]()
    layer = AttentionLayer(attention)
    assert layer.blocks.names == attention.blocks.names
    check_jet(layer, randn(2, 3, d, seed=5), attention.forward)


def test_one_token():
    layer = block(placement="pre", heads=2)
    check_jet(layer, randn(1, 3), lambda w, X: plain_block(w, X, "pre", 2, False, "gelu"))
    # attention to oneself alone: queries and keys have no say, and that is a zero of the formula, not of the code
    S = layer.second(randn(1, 3), randn(1, 3, seed=5))
    assert S.block("attn.query").dense().abs().max() == 0
    assert S.block("attn.value").dense().abs().max() > 0


def mse(Z, Y):
    return ((Z - Y) ** 2).sum() / Y.numel()


@pytest.mark.parametrize("placement", ["post", "pre", "none"])
def test_every_pair_of_weights_for_mse(placement):
    layer, X, Y = block(placement=placement, heads=2), randn(2, 3, 3), randn(2, 3, 3, seed=4)

    def plain(v):
        weights, _ = unflat(layer, X, torch.cat([v, X.flatten()]))
        return plain_block(weights, X, placement, 2, False, "gelu")

    theta = torch.cat([w.flatten() for w in layer.weights.values()])
    H = hessian(lambda v: mse(plain(v), Y), theta)
    J = jacobian(lambda v: plain(v).flatten(), theta)
    Ho = 2 / Y.numel() * J.T @ J
    R = exact.hessian(layer, X, Y)
    # 1e-12: float64, and some hundred operations of size one to ten
    assert relative(R.outer.dense(), Ho) < 1e-12
    assert relative(R.functional.dense(), H - Ho) < 1e-12
    assert relative(R.total.dense(), H) < 1e-12
    names = R.blocks.names
    for a in names:
        for b in names:
            span = H[R.blocks.ranges[a], R.blocks.ranges[b]]
            assert (R.total.block(a, b).dense() - span).abs().max() < 1e-12 * H.abs().max()
            # no pair of sublayers is without curvature: zero would be a hole in the formula
            assert R.total.block(a, b).dense().abs().max() > 1e-8 * H.abs().max() or span.abs().max() == 0


def test_cross_entropy_on_a_stack_with_a_head():
    blocks = [block(placement="pre", heads=2, causal=True, seed=s) for s in (0, 100)]
    model = stack(
        blocks, LayerNorm(randn(3, seed=7), randn(3, seed=8)), Linear(randn(3, 4, seed=9), randn(4, seed=10))
    )
    X = [randn(3, 3), randn(2, 3, seed=1)]  # uneven sequences
    Y = [torch.tensor([1, -100, 3]), torch.tensor([0, 2])]

    def plain(v):
        w, _ = unflat(model, X[0], torch.cat([v, X[0].flatten()]))
        logits = []
        for x in X:
            for i in range(2):
                x = plain_block(w, x, "pre", 2, True, "gelu", prefix=f"layer.{i}.")
            logits.append(plain_norm(w, x, "norm", 1e-5) @ w["head"] + w["head.bias"])
        return torch.cat(logits)

    theta = torch.cat([w.flatten() for w in model.weights.values()])
    assert relative(torch.cat(model(X)), plain(theta)) < 1e-13
    H = hessian(lambda v: F.cross_entropy(plain(v), torch.cat(Y)), theta)
    J = jacobian(plain, theta)
    B = hessian(lambda z: F.cross_entropy(z, torch.cat(Y)), plain(theta))
    Ho = torch.einsum("iap,iajb,jbq->pq", J, B, J)
    R = exact.hessian(model, X, Y, loss="cross-entropy")
    # 1e-11: two blocks and three norms deep
    assert relative(R.outer.dense(), Ho) < 1e-11
    assert relative(R.total.dense(), H) < 1e-11
    assert relative(R.functional.dense(), H - Ho) < 1e-11


def test_theorems_4_and_5():
    """`∂Z/∂W_i = J_Z B_i` and `∂²Z/∂W_i∂W_j = (J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j`, for a second norm after its sum.

    `S = Y + FFN(Y)` before the norm, `B_i = ∂S/∂W_i`, `ξ_ij = ∂B_i/∂W_j`; `J_Z`, `H_Z` of the norm at `S`.
    """
    layer, X, g = block(placement="post"), randn(3, 3), randn(3, 3, seed=4)
    (_, first), (_, norm1), (_, second), (_, norm2) = layer.layers
    Y = norm1(first(X))
    S = second(Y)
    below = Chain(layer.layers[:3])  # all of the block but its last norm, a chain
    weights = list(below.weights)
    B = below.jacobian(X).dense()
    names = below.jacobian(X).domain.ranges
    J_Z = torch.block_diag(*norm2.row_jacobians(S))
    H_Z = torch.block_diag(*torch.einsum("iabc,ia->ibc", norm2.row_hessians(S), g))
    xi = below.second(X, (J_Z.T @ g.flatten()).view(3, 3))  # (J_Z ⊗ I) ξ, contracted with g
    whole, gradient = layer.second(X, g), layer.jacobian(X)
    for a in weights:
        # Theorem 4: ∂Z/∂W_i = J_Z B_i
        assert relative(gradient.block("output", a).dense(), J_Z @ B[:, names[a]]) < 1e-12
    for a in weights:
        for b in weights:
            expected = xi.block(a, b).dense() + B[:, names[a]].T @ H_Z @ B[:, names[b]]
            # 1e-12 of the largest entry of all blocks
            assert (
                whole.block(a, b).dense() - expected
            ).abs().max() < 1e-12 * H_Z.abs().max() * B.abs().max() ** 2


def test_heads_causal_masks_and_padding_do_not_mix_sequences():
    """A shorter sequence beside a longer one gives what it gives alone."""
    layer = block(placement="pre", heads=2)
    long, short = randn(4, 3), randn(2, 3, seed=1)
    g = [randn(4, 3, seed=2), randn(2, 3, seed=3)]
    both = layer.input_hessian([long, short], g)
    # 1e-13: the same sums in another order
    assert relative(layer([long, short])[1], layer(short)) < 1e-13
    assert relative(both[0], layer.input_hessian(long, g[0])[0]) < 1e-13
    assert relative(both[1], layer.input_hessian(short, g[1])[0]) < 1e-13
    alone = layer.second(long, g[0]).block(layer.blocks, layer.blocks).dense()
    alone = alone + layer.second(short, g[1]).block(layer.blocks, layer.blocks).dense()
    together = layer.second([long, short], g).block(layer.blocks, layer.blocks).dense()
    assert relative(together, alone) < 1e-13


def test_messages():
    with pytest.raises(ValueError, match="norm 'pre', 'post' or 'none'"):
        TransformerBlock(self_attention(2, out=2), FeedForward(randn(2, 2), randn(2, 2)), norm="both")
    with pytest.raises(ValueError, match="expected an output of width 3"):
        Chain([("head", Linear(randn(3, 2)))], residual=True)(randn(2, 3))
