"""The structured Hessians of token-wise layers against autograd, for both losses and both parts."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian, jacobian

import curvlens.exact as exact
from curvlens.exact.linear import Linear
from curvlens.exact.mlp import LinearMLP
from curvlens.exact.norm import LayerNorm, RMSNorm
from curvlens.structured import KroneckerSum
from tests.exact.jets import relative, unflat
from tests.exact.test_ffn import definition, feed_forward
from tests.exact.test_mlp import product
from tests.exact.test_norm import layer_norm, randn, rms_norm

LAYERS = {
    "gelu": (feed_forward(3, 5, 4, "gelu", False, True), definition("gelu")),
    "gelu_tanh": (feed_forward(3, 5, 4, "gelu_tanh", False, False), definition("gelu_tanh")),
    "relu": (feed_forward(3, 5, 4, "relu", False, True), definition("relu")),
    "swiglu": (feed_forward(3, 5, 4, "silu", True, True), definition("silu")),
    "reglu": (feed_forward(3, 5, 4, "relu", True, False), definition("relu")),
    "linear mlp": (LinearMLP([randn(3, 2), randn(2, 4, seed=1), randn(4, 4, seed=2)]), product),
    "linear": (
        Linear(randn(3, 4), randn(4, seed=1)),
        lambda w, X: X @ w["weight"] + w["bias"],
    ),
    "layer norm": (LayerNorm(randn(4), randn(4, seed=1)), layer_norm(1e-5)),
    "rms norm": (RMSNorm(randn(4)), rms_norm(1e-6)),
}


def losses(outputs):
    Y = randn(5, outputs, seed=40)
    classes = torch.tensor([0, 3, -100, 1, 1])
    return {
        "mse": (Y, lambda Z: ((Z - Y) ** 2).mean()),
        "cross-entropy": (classes, lambda Z: F.cross_entropy(Z, classes)),
    }


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("name", LAYERS)
def test_both_parts(name, loss):
    layer, plain = LAYERS[name]
    X = randn(5, 4 if "norm" in name else 3, seed=30)
    Y, value = losses(4)[loss]

    def output(v):
        return plain(unflat(layer, X, torch.cat([v, X.flatten()]))[0], X)

    theta = torch.cat([w.flatten() for w in layer.weights.values()])
    H, J = hessian(lambda v: value(output(v)), theta), jacobian(lambda v: output(v).flatten(), theta)
    B = hessian(lambda z: value(z.view(5, 4)), output(theta).flatten())
    Ho = J.T @ B @ J
    R = exact.hessian(layer, X, Y, loss=loss)
    # 1e-13: float64, sums over five tokens
    assert relative(R.outer.dense(), Ho) < 1e-13
    assert (R.functional.dense() - (H - Ho)).abs().max() < 1e-13 * H.abs().max()
    assert relative(R.total.dense(), H) < 1e-13
    v = randn(len(theta), 2, seed=50)
    assert relative(R.total @ v, H @ v) < 1e-13
    assert relative(R.total.diagonal(), H.diagonal()) < 1e-13
    assert abs(R.total.frobenius() / H.norm() - 1) < 1e-13
    assert R.total.spectral_bound() >= torch.linalg.matrix_norm(H, ord=2) * (1 - 1e-14)


@pytest.mark.parametrize("name", LAYERS)
def test_structure_and_products_agree_with_the_input_added(name):
    layer, _ = LAYERS[name]
    X = randn(2, 3, 4 if "norm" in name else 3, seed=30)
    Y = randn(2, 3, 4, seed=31)
    R, whole = exact.hessian(layer, X, Y), exact.hessian(layer, X, Y, with_input=True)
    for part in ("outer", "functional", "total"):
        restricted = getattr(whole, part).block(layer.blocks, layer.blocks).dense()
        size = whole.total.dense().abs().max()
        # 1e-13 of the largest entry; zero parts are compared as zeros
        assert (getattr(R, part).dense() - restricted).abs().max() < 1e-13 * size
    assert "input" in whole.blocks


def test_no_functional_diagonal_blocks_where_there_are_none():
    """ReLU, and a linear MLP: `H_f(i, i) = 0` exactly, with nothing stored."""
    X, Y = randn(5, 3), randn(5, 4, seed=1)
    for name in ("relu", "linear mlp"):
        layer, _ = LAYERS[name]
        functional = exact.hessian(layer, X, Y).functional
        assert all(functional.cell(block, block) is None for block in functional.codomain.names)
        assert functional.frobenius() > 0


def test_mean_squared_error_of_a_linear_mlp_is_one_kronecker_product_a_block():
    layer, _ = LAYERS["linear mlp"]
    outer = exact.hessian(layer, randn(5, 3), randn(5, 4, seed=1)).outer
    for _, _, cell in outer.cells():
        assert isinstance(cell, KroneckerSum)
        assert [term.a.n for term in cell.terms] == [1]
