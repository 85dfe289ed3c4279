"""The explicit matrices of attention by its input against autograd, and against the jet's products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian, jacobian

from curvlens.exact.attention_input import Roles, input_hessian, input_jacobian, mixed_hessian
from curvlens.exact.attention_jet import AttentionLayer
from tests.exact.jets import relative
from tests.exact.test_block import plain_attention, randn, self_attention

SHAPES = {
    "L": st.integers(1, 4),
    "d": st.integers(1, 3),
    "heads": st.integers(1, 2),
    "k": st.integers(1, 2),
    "v": st.integers(1, 3),
    "out": st.sampled_from([None, 2]),
    "causal": st.booleans(),
    "biased": st.booleans(),
    "seed": st.integers(0, 99),
}


@settings(max_examples=25, deadline=None)
@given(**SHAPES)
def test_matrices(L, d, heads, k, v, out, causal, biased, seed):
    layer, x = self_attention(d, heads, k, v, out, causal, biased, seed), randn(L, d, seed=seed)
    products = AttentionLayer(layer)
    g = randn(L, out or heads * v, seed=seed + 1)

    def plain(w, x):
        return plain_attention(w, x, heads, causal)

    # 1e-12 of the largest first, or second, derivative: float64, sums of a few dozen terms
    J = jacobian(lambda x: plain(products.weights, x).flatten(), x).flatten(1)
    assert relative(input_jacobian(layer, x), J) < 1e-12
    H = hessian(lambda x: (g * plain(products.weights, x)).sum(), x).view(L * d, L * d)
    S = products.second(x, g)
    size = S.dense().abs().max()
    assert (input_hessian(layer, x, g) - H).abs().max() <= 1e-12 * size
    for name, block in mixed_hessian(layer, x, g).items():
        assert (block - S.block(name, "input").dense()).abs().max() <= 1e-12 * size
    assert set(mixed_hessian(layer, x, g)) == set(products.weights)


def test_zero_where_the_formula_says_zero():
    """Values do not curve among themselves, nor queries of different tokens."""
    layer, x = self_attention(3, 2, 2, 2), randn(4, 3)
    H = Roles.of(layer, x, randn(4, 4, seed=1)).hessian
    queries, values = slice(0, 2), slice(4, 6)
    assert torch.count_nonzero(H[:, :, values, :, values]) == 0
    across = H[:, :, queries, :, queries].clone()
    across[:, range(4), :, range(4)] = 0
    assert torch.count_nonzero(across) == 0
    assert torch.count_nonzero(H[:, 0, 2:4, 1, 2:4]) > 0  # keys of different tokens do


def test_shared_heads_are_refused_by_name():
    layer = self_attention(3, 2, kv_heads=1)
    with pytest.raises(ValueError, match="as many key and value heads as"):
        input_hessian(layer, randn(2, 3), randn(2, 4))
