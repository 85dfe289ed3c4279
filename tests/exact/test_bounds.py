import pytest
import torch

import curvlens.exact as exact
from curvlens.exact.bounds import unit_attention_bound


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases():
    """Tokens and weights of many sizes, ranks and scales."""
    for seed in range(24):
        g = torch.Generator().manual_seed(seed)
        L, d, k, v = (int(torch.randint(1, 6, (), generator=g)) for _ in range(4))
        size, score = 10 ** (2 * torch.rand(2, generator=g) - 1).double()
        X = size * randn(L, d, seed=seed)
        X = X + 3 * randn(d, seed=seed + 7) * size if seed % 3 == 0 else X
        X = X[:1].expand(L, d).clone() if seed % 8 == 7 else X
        W_Q, W_K, W_V = (
            score * randn(d, k, seed=seed + 1),
            randn(d, k, seed=seed + 2),
            randn(d, v, seed=seed + 3),
        )
        yield exact.SelfAttention(W_Q, W_K, W_V, causal=seed % 2 == 1), X, randn(L, v, seed=seed + 4)


@pytest.mark.parametrize("number", range(24))
def test_bounds_are_never_violated(number):
    layer, X, Y = list(cases())[number]
    found = exact.bounds(layer, X, Y)
    assert {(b.part, b.row, b.column) for b in found} >= {("outer", "query", "key"), ("total", "all", "all")}
    # rounding of both sides
    for b in found:
        room = 1e-12 * max(b.kronecker, b.true, 1e-300)
        assert b.kronecker >= b.true - room, b
        assert b.norms >= b.true - room, b
        if b.true > room:
            assert b.ratio >= 1 - 1e-10


def test_bounds_of_every_other_form():
    X = randn(4, 3)
    layers = [
        exact.SelfAttention(
            randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2), heads=2, W_O=randn(4, 2), b_Q=randn(4)
        ),
        exact.SelfAttention(randn(3, 2), randn(3, 2, seed=1), randn(3, 2, seed=2), activation="linear"),
        exact.SelfAttention(W_QK=randn(3, 3), W_V=randn(3, 2)),
    ]
    for layer in layers:
        for b in exact.bounds(layer, X, randn(4, layer.outputs)):
            assert b.norms is None
            assert b.kronecker >= b.true * (1 - 1e-12)


def test_single_products_and_kronecker_bounds_are_tight_where_they_can_be():
    layer = exact.SelfAttention(randn(3, 2), randn(3, 2, seed=1), randn(3, 2, seed=2))
    found = {(b.part, b.row, b.column): b for b in exact.bounds(layer, randn(5, 3), randn(5, 2))}
    assert abs(found["outer", "value", "value"].ratio - 1) < 1e-10
    assert found["functional", "value", "value"].true == 0
    assert all(b.kronecker <= b.norms * (1 + 1e-9) for b in found.values() if b.row == b.column != "all")


def test_assuming_that_attention_contracts_is_no_bound():
    """All tokens attend to the first: ‖A‖₂ = √L, and the value block exceeds β‖X‖² by up to L."""
    L = 6
    X = torch.diag(torch.tensor([1.0] + [0.1] * (L - 1), dtype=torch.float64))
    first = torch.zeros(L, L, dtype=torch.bool)
    first[:, 0] = True
    layer = exact.SelfAttention(randn(L, 2), randn(L, 2, seed=1), randn(L, 2, seed=2), mask=first)
    R = exact.hessian(layer, X, randn(L, 2))
    value = next(
        b
        for b in exact.bounds(layer, X, randn(L, 2))
        if (b.part, b.row, b.column) == ("outer", "value", "value")
    )
    assert value.true > 5 * unit_attention_bound(R)
    assert value.norms >= value.true * (1 - 1e-12)


def test_large_blocks_are_bounded_without_their_norm():
    layer = exact.SelfAttention(randn(4, 2), randn(4, 2, seed=1), randn(4, 2, seed=2))
    found = exact.bounds(layer, randn(5, 4), randn(5, 2), largest=7)
    assert all(b.true is None and b.ratio is None and b.kronecker >= 0 for b in found)


def test_printed_beside_the_truth():
    layer = exact.SelfAttention(randn(3, 2), randn(3, 2, seed=1), randn(3, 2, seed=2))
    found = exact.bounds(layer, randn(5, 3), randn(5, 2))
    lines = str(found).splitlines()
    assert lines[0].split() == ["part", "block", "true", "Kronecker", "norms"]
    assert len(lines) == 1 + len(found)
    value = next(b for b in found if (b.part, b.row, b.column) == ("outer", "value", "value"))
    line = next(line for line in lines if line.startswith("outer       value, value"))
    assert f"{value.true:.3e}" in line
    assert f"({value.kronecker / value.true:.3g})" in line
