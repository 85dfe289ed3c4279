"""Bounds are never below the true norms, at any sublayer and through whole blocks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvlens.exact as exact
from curvlens.exact import SelfAttention
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.block import stack
from curvlens.exact.block_bounds import block_bounds, first, second
from curvlens.exact.linear import Linear
from curvlens.exact.mlp import LinearMLP
from curvlens.exact.norm import LayerNorm, RMSNorm
from curvlens.exact.result import Tokens
from tests.exact.test_block import attention, block, randn
from tests.exact.test_ffn import feed_forward

# rounding of singular values only: the bounds hold exactly in exact arithmetic
ROUNDING = 1 + 1e-12


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, ord=2).item()


def check_sublayer(layer, X, g):
    jet = layer.at(Tokens.of(X))
    J, S = layer.jacobian(X), layer.second(X, g)
    names = S.codomain.names
    for a, bound in first(jet).items():
        assert norm(J.block("output", a).dense()) <= bound * ROUNDING
    bounds = second(jet, Tokens.of(g).stacked)
    size = S.dense().abs().max().item()
    for a in names:
        for b in names:
            assert norm(S.block(a, b).dense()) <= bounds.get((a, b), 0.0) * ROUNDING + 1e-14 * size


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(
        [
            "gelu",
            "silu gated",
            "relu",
            "layer norm",
            "rms norm",
            "linear",
            "linear mlp",
            "attention",
            "causal",
        ]
    ),
    L=st.integers(1, 4),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 999),
)
def test_no_sublayer_exceeds_its_bounds(kind, L, scale, seed):
    d = 4
    X = scale * randn(2, L, d, seed=seed)
    make = {
        "gelu": lambda: feed_forward(d, 5, 3, "gelu", False, True, seed),
        "silu gated": lambda: feed_forward(d, 5, 3, "silu", True, True, seed),
        "relu": lambda: feed_forward(d, 2, 3, "relu", False, False, seed),
        "layer norm": lambda: LayerNorm(randn(d, seed=seed), randn(d, seed=seed + 1), 1e-3),
        "rms norm": lambda: RMSNorm(randn(d, seed=seed), 1.0),
        "linear": lambda: Linear(randn(d, 3, seed=seed), randn(3, seed=seed + 1)),
        "linear mlp": lambda: LinearMLP(
            [randn(d, 3, seed=seed), randn(3, 3, seed=seed + 1), randn(3, 2, seed=seed + 2)]
        ),
        "attention": lambda: attention(d, 2, 2, 2, 3, False, True, seed),
        "grouped": lambda: attention(d, 4, 2, 2, 3, False, False, seed, kv_heads=2),
        "causal": lambda: attention(d, 1, 2, 2, None, True, False, seed),
    }
    layer = make[kind]()
    g = randn(*layer(X).shape, seed=seed + 5)
    check_sublayer(layer, X, g)
    if L > 1:  # uneven sequences too
        check_sublayer(layer, [X[0], X[1, 1:]], [g[0], g[1, 1:]])


@settings(max_examples=15, deadline=None)
@given(
    placement=st.sampled_from(["pre", "post", "none"]),
    L=st.integers(1, 3),
    scale=st.sampled_from([0.3, 1.0, 3.0]),
    causal=st.booleans(),
    seed=st.integers(0, 999),
)
def test_no_block_exceeds_its_bounds(placement, L, scale, causal, seed):
    layer = block(placement=placement, heads=2, causal=causal, seed=seed)
    X, Y = scale * randn(2, L, 3, seed=seed), randn(2, L, 3, seed=seed + 1)
    found = block_bounds(layer, X, Y)
    assert (found.true <= found.total * ROUNDING + 1e-14 * found.true.max()).all()
    assert torch.equal(exact.bounds(layer, X, Y).total, found.total)
    R = exact.hessian(layer, X, Y)
    assert norm(R.total.dense()) <= found.whole * ROUNDING
    assert norm(R.outer.dense()) <= norm(found.outer) * ROUNDING
    assert norm(R.functional.dense()) <= norm(found.functional) * ROUNDING


def test_a_stack_with_a_head_under_cross_entropy():
    blocks = [block(placement="pre", heads=2, seed=s) for s in (0, 100)]
    model = stack(blocks, LayerNorm(randn(3, seed=7), randn(3, seed=8)), Linear(randn(3, 4, seed=9)))
    X, Y = randn(2, 3, 3), torch.tensor([[1, 0, 3], [-100, 2, 2]])
    found = block_bounds(model, X, Y, loss="cross-entropy")
    assert (found.true <= found.total * ROUNDING).all()
    assert "bound/true" in str(found)
    assert "layer.1.attn.query" in str(found)


def test_the_largest_second_derivative_of_a_norm():
    """`2/√3` is reached: at `ρ = |n|/√d = 1`, with `u` at `cos² t = 1/3` to `n`."""
    layer = RMSNorm(torch.ones(4, dtype=torch.float64), 0.0)
    x = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    u = torch.tensor([[math.sqrt(1 / 3), math.sqrt(2 / 3), 0, 0]], dtype=torch.float64)
    S = layer.second(x, u).block("input").dense()
    bound = second(layer.at(Tokens.of(x)), u)["input", "input"]
    # 1e-14: the bound is attained, up to rounding
    assert abs(norm(S) / bound - 1) < 1e-14


def test_attention_of_all_to_one_has_norm_root_L():
    """Every token attends to the first: `‖A‖₂ = √L`, which a bound of 1 would miss."""
    L = 9
    X = torch.zeros(L, 2, dtype=torch.float64)
    X[:, 1] = 1
    X[0, 0] = 1e3
    W = torch.eye(2, dtype=torch.float64)
    toward_first = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    layer = AttentionLayer(SelfAttention(toward_first, W, W))
    jet = layer.at(Tokens.of(X))
    assert abs(norm(jet.A[0, 0]) - math.sqrt(L)) < 1e-12
    assert first(jet)["value"] >= norm(layer.jacobian(X).block("output", "value").dense())


def test_bounds_of_queries_are_within_twice_the_truth():
    """Three keys, two of them opposite and a quarter of the attention each, values that tell the third apart."""
    s = 1 / math.sqrt(2)
    keys = torch.tensor([[1.0, 0], [-1, 0], [0, math.log(2) / s]], dtype=torch.float64)
    values = torch.tensor([[1.0], [1], [-1]], dtype=torch.float64)
    X = torch.cat([keys, values], dim=1)
    eye = torch.eye(3, dtype=torch.float64)
    layer = AttentionLayer(SelfAttention(0 * eye[:, :2], eye[:, :2], eye[:, 2:], b_Q=eye[1, :2]))
    g = torch.zeros(3, 1, dtype=torch.float64)
    g[0] = 1
    S = layer.second(X, g).block("query.bias").dense()
    reach = len(X)  # the bias moves the queries of all three tokens, the gradient is at one of them
    bound = second(layer.at(Tokens.of(X)), g)["query.bias", "query.bias"] / reach
    assert bound / 2 == pytest.approx(norm(S), rel=1e-12)


def test_a_skip_adds_one():
    """`x + x W` for a small `W`: a bound without the skip would be small."""
    W = 0.01 * randn(3, 3)
    model = exact.Chain(
        [("in", Linear(randn(3, 3, seed=1))), ("", exact.Chain([("skipped", Linear(W))], residual=True))]
    )
    X, Y = randn(4, 3, seed=2), randn(4, 3, seed=3)
    found = block_bounds(model, X, Y)
    assert (found.true <= found.total * ROUNDING).all()
    # ‖B‖ ‖X‖² (1 + ‖W‖)² against the true norm: W is all that separates the two
    assert found.outer[0, 0] <= found.true[0, 0] * 1.1


def test_unknown_layers_are_named():
    class Odd:
        pass

    with pytest.raises(TypeError, match="got Odd"):
        first(Odd())
