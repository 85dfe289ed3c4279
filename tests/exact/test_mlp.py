"""The linear MLP against autograd through its definition."""

import itertools
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlens.exact.mlp import LinearMLP
from tests.exact.jets import check_jet


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(weights, X):
    return reduce(torch.matmul, weights.values(), X)


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=5), L=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_is_its_definition_differentiated(widths, L, seed):
    matrices = [randn(a, b, seed=seed + i) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    check_jet(LinearMLP(matrices), randn(2, L, widths[0], seed=seed + 50), product, seed)


def test_matrices_must_chain():
    with pytest.raises(ValueError, match="expected matrices that chain"):
        LinearMLP([torch.ones(2, 3), torch.ones(2, 3)])
