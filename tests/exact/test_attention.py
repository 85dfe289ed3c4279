import pytest
import torch

import curvlens.exact as exact
from curvlens.exact.attention_map import Elementwise, RowMap
from tests.exact.oracle import autodiff, mse, relative
from tests.structured.contract import check_operator

# float64: a Hessian entry is a sum of some thousand products, so a few hundred roundings of 1e-16 at most.
TOLERANCE = 1e-11


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(d=3, k=2, v=4, seed=0):
    return randn(d, k, seed=seed), randn(d, k, seed=seed + 1), randn(d, v, seed=seed + 2)


def full_softmax(T):
    return T.softmax(-1)


def full_first(T):
    A = T.softmax(-1)
    return torch.diag_embed(A) - A[..., :, None] * A[..., None, :]


def full_second(T, u):
    A = T.softmax(-1)
    mean = (A * u).sum(-1, keepdim=True)
    D = A * (u - mean)
    return torch.diag_embed(D) - D[..., :, None] * A[..., None, :] - A[..., :, None] * D[..., None, :]


GENERAL = RowMap(full_softmax, full_first, full_second)
CUBE = Elementwise(lambda T: T**3, lambda T: 3 * T**2, lambda T: 6 * T)


def causal_mask(L):
    return torch.ones(L, L, dtype=torch.bool).tril()


def layers():
    W = weights()
    yield "softmax", exact.SelfAttention(*W)
    yield "temperature", exact.SelfAttention(*W, temperature=0.6)
    yield "linear", exact.SelfAttention(*W, activation="linear")
    yield "sigmoid", exact.SelfAttention(*W, activation="sigmoid")
    yield "cube", exact.SelfAttention(*W, activation=CUBE)
    yield "row map", exact.SelfAttention(*W, activation=GENERAL)
    yield "row map, causal", exact.SelfAttention(*W, activation=GENERAL, causal=True)
    yield "causal", exact.SelfAttention(*W, causal=True)
    yield "sigmoid, causal", exact.SelfAttention(*W, activation="sigmoid", causal=True)
    yield "single", exact.SelfAttention(W_QK=randn(3, 3), W_V=W[2])
    yield (
        "single, out, biases",
        exact.SelfAttention(W_QK=randn(3, 3), W_V=W[2], W_O=randn(4, 2), b_V=randn(4), b_O=randn(2)),
    )
    yield "wide keys", exact.SelfAttention(*weights(3, 5, 2))
    yield "out", exact.SelfAttention(*W, W_O=randn(4, 2, seed=7))
    yield (
        "biases",
        exact.SelfAttention(
            *W, W_O=randn(4, 2, seed=7), b_Q=randn(2), b_K=randn(2, seed=1), b_V=randn(4), b_O=randn(2)
        ),
    )
    yield (
        "sigmoid, biases",
        exact.SelfAttention(*W, activation="sigmoid", b_Q=randn(2), b_K=randn(2, seed=1), b_V=randn(4)),
    )
    yield "two heads", exact.SelfAttention(*weights(3, 4, 4), heads=2)
    yield (
        "two heads, out",
        exact.SelfAttention(*weights(3, 4, 6), heads=2, W_O=randn(6, 3, seed=8), causal=True),
    )
    yield "stack", exact.SelfAttention(randn(2, 3, 2), randn(2, 3, 2, seed=1), randn(2, 3, 4, seed=2))
    yield (
        "stack, out",
        exact.SelfAttention(
            randn(2, 3, 2),
            randn(2, 3, 2, seed=1),
            randn(2, 3, 2, seed=2),
            W_O=randn(2, 2, 3, seed=3),
            b_Q=randn(2, 2),
        ),
    )
    yield (
        "grouped",
        exact.SelfAttention(
            randn(3, 8),
            randn(3, 4, seed=1),
            randn(3, 6, seed=2),
            heads=4,
            W_O=randn(12, 2, seed=3),
            b_K=randn(4),
            b_V=randn(6),
            b_Q=randn(8),
        ),
    )


LAYERS = dict(layers())
BATCHES = {
    "one": randn(4, 3, seed=20),
    "equal": randn(2, 3, 3, seed=21),
    "uneven": [randn(4, 3, seed=22), randn(1, 3, seed=23), randn(2, 3, seed=24)],
}


def stacked(X):
    return torch.cat(X) if isinstance(X, list) else X.reshape(-1, X.shape[-1])


def lengths(X):
    return [len(x) for x in X] if isinstance(X, list) or X.dim() == 3 else [len(X)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_block_against_autodiff(name, batch):
    layer, X = LAYERS[name], BATCHES[batch]
    n = len(stacked(X))
    Y = randn(n, layer.outputs, seed=30)
    targets = list(Y.split(lengths(X))) if isinstance(X, list) else Y.view(*X.shape[:-1], -1)
    R = exact.hessian(layer, X, targets)
    outer, functional = autodiff(layer, X, mse(Y, lengths(X)))
    assert relative(R.outer.dense(), outer) < TOLERANCE
    assert relative(R.functional.dense(), functional, outer) < TOLERANCE
    assert relative(R.total.dense(), outer + functional) < TOLERANCE
    assert relative(R.loss.value, mse(Y, lengths(X))(stacked_output(layer, X))) < TOLERANCE


def stacked_output(layer, X):
    return stacked(layer(X))


@pytest.mark.parametrize("name", LAYERS)
def test_operators_keep_their_contract(name):
    layer, X = LAYERS[name], BATCHES["uneven"]
    Y = randn(7, layer.outputs, seed=31)
    R = exact.hessian(layer, X, list(Y.split(lengths(X))))
    for H in (R.outer, R.functional, R.total):
        assert H.symmetric
        check_operator(H, tolerance=1e-10)  # norms of nearly cancelling sums lose two digits
