"""LayerNorm and RMSNorm against autograd through their definition, and against the papers' matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import curvlens.exact as exact
from curvlens.exact.norm import LayerNorm, RMSNorm
from tests.exact.jets import check_by_differences, check_jet, relative


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_norm(eps):
    def plain(weights, X):
        m = X - X.mean(-1, keepdim=True)
        z = weights["weight"] * m / ((m * m).mean(-1, keepdim=True) + eps).sqrt()
        return z + weights["bias"] if "bias" in weights else z

    return plain


def rms_norm(eps):
    return lambda weights, X: weights["weight"] * X / ((X * X).mean(-1, keepdim=True) + eps).sqrt()


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 3),
    L=st.integers(1, 4),
    d=st.integers(3, 6),  # at 2 and without ε the norm is constant, and nothing is left to compare
    eps=st.sampled_from([0.0, 1e-5, 3.0]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_layer_norm_is_its_definition_differentiated(n, L, d, eps, scale, seed):
    X = scale * randn(n, L, d, seed=seed)
    # a draw whose rows hardly vary has no digits left to compare
    X = X + scale * torch.linspace(-1, 1, d, dtype=X.dtype)
    layer = LayerNorm(randn(d, seed=seed + 1), randn(d, seed=seed + 2), eps)
    check_jet(layer, X, layer_norm(eps), seed)


@settings(max_examples=15, deadline=None)
@given(
    L=st.integers(1, 4), d=st.integers(2, 6), eps=st.sampled_from([0.0, 1e-5, 3.0]), seed=st.integers(0, 99)
)
def test_rms_norm_is_its_definition_differentiated(L, d, eps, seed):
    X = randn(L, d, seed=seed) + 0.1
    check_jet(RMSNorm(randn(d, seed=seed + 1), eps), X, rms_norm(eps), seed)


def test_variance_far_below_epsilon():
    X = 5 + 1e-9 * randn(3, 4)
    # rows of mean 5 hold their deviations of 1e-9 with 1e-16 * 5 / 1e-9 = 5e-7 relative error in n, but n itself
    # is of size 1e-9 * eps^-1/2 and does not matter beside C: compare with the same rounding on both sides
    check_jet(LayerNorm(randn(4, seed=1), eps=1e-5), X, layer_norm(1e-5), tolerance=1e-10)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-18])
def test_single_precision_of_small_variance(scale):
    """Rows of tiny variance, against float64 on the same rounded numbers."""
    X, g = (scale * randn(3, 5)).float(), randn(3, 5, seed=2)
    layer = LayerNorm(randn(5, seed=1))
    low_layer = LayerNorm(layer.weights["weight"].float())
    low = exact.hessian(low_layer, X, g=g.float(), with_input=True).functional.dense()
    high = exact.hessian(layer, X.double(), g=g, with_input=True).functional.dense()
    assert bool(low.isfinite().all())
    assert float((low.double() - high).norm()) <= 1e-5 * float(high.norm()) + 1e-30


def test_differences():
    layer = LayerNorm(randn(5, seed=1), randn(5, seed=2), 1e-5)
    check_by_differences(layer, randn(2, 3, 5), layer_norm(1e-5))
    check_by_differences(RMSNorm(randn(5, seed=1), 1e-6), randn(2, 3, 5), rms_norm(1e-6))


def papers_layer_norm(X):
    """Theorems 2 and 3 of arXiv 2510.16927 in the paper's own matrices: the Jacobian and the Hessian.

    `LN(X) = P M`, `P = diag(1/σ)`, `M = X − mean`; `G = ∂M/∂X = I − (I_L ⊗ 11ᵀ)/d`. Theorem 2:
    `J = (P ⊗ I) G + (I ⊗ Mᵀ) ∂P/∂X`. Theorem 3, its derivative, as `[L d, L d, L d]`: `G` is constant, so what
    is left is the derivative of `P` against `G`, of `M` against `∂P/∂X`, and the second derivative of `P`.
    """
    L, d = X.shape
    M = X - X.mean(-1, keepdim=True)
    sigma = (M * M).mean(-1).sqrt()
    eye_L, eye_d = torch.eye(L, dtype=X.dtype), torch.eye(d, dtype=X.dtype)
    P = torch.diag(1 / sigma)
    G = torch.eye(L * d, dtype=X.dtype) - torch.kron(eye_L, torch.ones(d, d, dtype=X.dtype)) / d
    dP = torch.zeros(L, L, L, d, dtype=X.dtype)
    ddP = torch.zeros(L, L, L, d, L, d, dtype=X.dtype)
    for i in range(L):
        m = M[i]
        dP[i, i, i] = -m / (d * sigma[i] ** 3)
        centring = eye_d - 1 / d
        ddP[i, i, i, :, i, :] = 3 * torch.outer(m, m) / (d**2 * sigma[i] ** 5) - centring / (
            d * sigma[i] ** 3
        )
    dP, ddP = dP.view(L * L, L * d), ddP.view(L * L, L * d, L * d)
    times_M = torch.kron(eye_L, M.T.contiguous())
    J = torch.kron(P, eye_d) @ G + times_M @ dP
    dP4, G3 = dP.view(L, L, L * d), G.view(L, d, L * d)
    H = torch.einsum("ijc,jab->iabc", dP4, G3).reshape(L * d, L * d, L * d)
    H = H + torch.einsum("ijb,jac->iabc", dP4, G3).reshape(L * d, L * d, L * d)
    return J, H + torch.einsum("mn,nbc->mbc", times_M, ddP)


def test_theorems_2_and_3():
    X = randn(3, 4)
    layer = LayerNorm(torch.ones(4, dtype=X.dtype), eps=0.0)
    J, H = papers_layer_norm(X)
    # 1e-13: a dozen operations on entries of size one
    assert relative(layer.input_jacobian(X)[0], J) < 1e-13
    g = randn(3, 4, seed=7)
    assert relative(layer.input_hessian(X, g)[0], torch.einsum("m,mbc->bc", g.flatten(), H)) < 1e-13
    rows = torch.arange(3)
    assert relative(layer.row_jacobians(X), J.view(3, 4, 3, 4)[rows, :, rows]) < 1e-13
    assert relative(layer.row_hessians(X), H.view(3, 4, 3, 4, 3, 4)[rows, :, rows, :, rows]) < 1e-13


@pytest.mark.parametrize("layer", [LayerNorm(randn(5, seed=1)), RMSNorm(randn(5, seed=1))])
def test_rows_agree_with_products(layer):
    X, g = randn(2, 3, 5), randn(2, 3, 5, seed=3)
    J = torch.stack(layer.input_jacobian(X)).view(2, 3, 5, 3, 5)
    H = torch.stack(layer.input_hessian(X, g)).view(2, 3, 5, 3, 5)
    for i in range(3):
        assert relative(layer.row_jacobians(X)[:, i], J[:, i, :, i]) < 1e-13
        assert (
            relative(torch.einsum("nabc,na->nbc", layer.row_hessians(X)[:, i], g[:, i]), H[:, i, :, i])
            < 1e-13
        )


def test_scale_invariance_without_epsilon():
    """`f(c x) = f(x)` at `ε = 0`, so `J x = 0` and, differentiating `J(x) x = 0`, `∂²f[x, ·] = −J`."""
    X = randn(1, 1, 6)
    for layer in (LayerNorm(randn(6, seed=1), eps=0.0), RMSNorm(randn(6, seed=1), eps=0.0)):
        J, H = layer.row_jacobians(X)[0, 0], layer.row_hessians(X)[0, 0]
        assert (J @ X[0, 0]).abs().max() < 1e-14 * J.abs().max() * 6
        assert relative(torch.einsum("abc,b->ac", H, X[0, 0]), -J) < 1e-13


def test_a_constant_row_without_epsilon_is_an_error():
    with pytest.raises(ValueError, match="rows that are not constant, or eps > 0"):
        LayerNorm(torch.ones(3), eps=0.0)(torch.ones(2, 3))


def test_width_is_checked():
    with pytest.raises(ValueError, match="expected an input of width 3"):
        LayerNorm(torch.ones(3))(torch.ones(2, 4))
