"""Every identity of paper A's Appendix A to C, and its theorems as printed, against definitions and closed forms."""

import pytest
import torch

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.literal import commutation, khatri_rao, kron, rows_of, vec


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def close(x, y, tolerance=1e-13):
    assert x.shape == y.shape, (x.shape, y.shape)
    assert float((x - y).abs().max()) <= tolerance * max(float(y.abs().max()), 1.0)


def test_kronecker_products():
    A, B, C, D = randn(2, 3), randn(4, 5, seed=1), randn(3, 2, seed=2), randn(5, 3, seed=3)
    X = randn(3, 5, seed=4)
    close(kron(A, B) @ kron(C, D), kron(A @ C, B @ D))  # equation 9
    close(kron(A, B).T, kron(A.T, B.T))  # 10
    close(kron(kron(A, B), C), kron(A, kron(B, C)))  # 8
    close(kron(A, B) @ vec(X), vec(A @ X @ B.T))
    a, b = randn(3, 1), randn(4, 1, seed=1)
    close(kron(a.T, b), b @ a.T)  # 11
    close(kron(b, a.T), b @ a.T)
    close(B @ kron(a.T, randn(5, 2, seed=6)), kron(a.T, B @ randn(5, 2, seed=6)))  # 12
    close(vec(A), kron(A, eye(3)) @ vec(eye(3)))  # 13


def test_kronecker_products_of_one_row_or_column():
    a, B = randn(1, 3), randn(3, 3, seed=1)
    for x in (a, a.T, a.T.contiguous().T, B[:, :1], B[:1]):
        for y in (B, B.T, a, a.T, B[:, :1]):
            expected = torch.cat([torch.cat([entry * y for entry in row], 1) for row in x])
            close(kron(x, y), expected, 0)


def test_block_diagonal_times_kronecker_product():
    A, B, C = [randn(2, 3, seed=i) for i in range(4)], randn(4, 5, seed=5), randn(3, 2, seed=6)
    product = torch.block_diag(*A) @ kron(B, C)
    close(product, torch.cat([kron(B[i : i + 1], A[i] @ C) for i in range(4)]))  # 14


def test_commutation():
    W, A, B = randn(3, 4), randn(2, 3, seed=1), randn(4, 5, seed=2)
    close(commutation(3, 4) @ vec(W), vec(W.T))
    close(commutation(3, 4).T @ commutation(3, 4), eye(12))
    close(commutation(4, 3), commutation(3, 4).T)
    close(commutation(2, 4) @ kron(A, B) @ commutation(5, 3), kron(B, A))  # Lemma B.2's interchange


def test_derivatives_of_vec_calculus():
    jacobian = torch.func.jacrev
    A, B, X, Y = randn(2, 3), randn(4, 5, seed=1), randn(3, 4, seed=2), randn(2, 5, seed=3)
    close(jacobian(lambda x: vec(A @ x.view(3, 4) @ B))(vec(X)), kron(A, B.T))  # 15
    n, q, p, r = 3, 4, 2, 5
    layout = kron(eye(n), commutation(q, p), eye(r))
    close(
        jacobian(lambda x: vec(torch.kron(x.view(n, q), Y)))(vec(X)),
        layout @ kron(eye(n * q), vec(Y)[:, None]),
    )  # 16
    close(
        jacobian(lambda y: vec(torch.kron(X, y.view(p, r))))(vec(Y)),
        layout @ kron(vec(X)[:, None], eye(p * r)),
    )  # 17
    close(jacobian(lambda x: vec(x.view(3, 4).T))(vec(X)), commutation(3, 4))  # 18


def test_khatri_rao_of_one_block_is_the_kronecker_product():
    A, B = randn(2, 3), randn(4, 5, seed=1)
    close(khatri_rao([[A]], [[B]]), kron(A, B))
    grids = [[A, A], [A, A]], [[B, 2 * B], [3 * B, 4 * B]]
    expected = torch.cat(
        [torch.cat([kron(A, B), 2 * kron(A, B)], 1), torch.cat([3 * kron(A, B), 4 * kron(A, B)], 1)]
    )
    close(khatri_rao(*grids), expected)


@pytest.mark.parametrize("L", [1, 2, 3])
def test_softmax_derivatives(L):
    T = randn(L, L)

    def rows(t):
        return torch.softmax(t.view(L, L), -1).flatten()

    A = rows(T).view(L, L)
    close(literal.softmax_first(A), torch.func.jacrev(rows)(T.flatten()))  # Lemma B.1
    second = torch.func.jacfwd(torch.func.jacrev(rows))(T.flatten())
    close(literal.softmax_second(A), second.reshape(L**4, L**2))  # Lemma C.1


def test_softmax_second_of_two_tokens_as_printed():
    """Remark C.1."""
    A = randn(2, 2).softmax(-1)
    a, b = A[0, 0], 1 - 2 * A
    off = -A[0, 0] * A[0, 1]
    block = literal.softmax_second(A)[:2, :2]
    expected = torch.stack([(a - a**2) * b[0, 0], off * b[0, 0], off * b[0, 0], off * b[0, 1]]).view(2, 2)
    close(block, expected)


def test_moment_matrices():
    """Remark 3.1."""
    L, d = 3, 2
    A, X = randn(L, L).softmax(-1), randn(L, d, seed=1)
    M2, M3 = literal.M2(A, X), literal.M3(A, X)
    assert M2.shape == (L * d, d)
    assert M3.shape == (L * d * d, d)
    close(literal.Z1(A, X), khatri_rao(rows_of(X), rows_of(M2, d)))
    # X * Xᵀ * M3: token i contributes X_iᵀ ⊗ X_i ⊗ M3_i
    squares = [[kron(x[None], x[:, None])] for x in X]
    layout = kron(eye(L), commutation(d, d), eye(d))
    close(literal.Z2(A, X), layout @ khatri_rao(squares, rows_of(M3, d * d)))


def test_shuffle_in_both_forms():
    d = 3
    S = literal.shuffle(d, eye(1))
    close(S, kron(commutation(d, d), eye(d)) @ kron(eye(d), vec(eye(d))[:, None]))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_theorems_as_printed_are_the_closed_form(k):
    d, L = 3, 4
    layer = exact.SelfAttention(randn(d, k), randn(d, k, seed=1), randn(d, d, seed=2))
    X, Y = randn(L, d, seed=3), randn(L, d, seed=4)
    R = exact.hessian(layer, X, Y)
    for blocks, H in (
        (literal.theorem_31(layer, X, Y), R.outer),
        (literal.theorem_32(layer, X, Y), R.functional),
    ):
        for (row, column), block in blocks.items():
            close(block, H.block(row, column).dense(), 1e-12)


def test_linear_attention_as_printed():
    """Remark 4.1, with Σ = XᵀX / L."""
    d, k, L = 3, 2, 5
    W_Q, W_K, W_V, X, Y = (
        randn(d, k),
        randn(d, k, seed=1),
        randn(d, d, seed=2),
        randn(L, d, seed=3),
        randn(L, d, seed=4),
    )
    layer = exact.SelfAttention(W_Q, W_K, W_V, activation="linear")
    R, S = exact.hessian(layer, X, Y), X.T @ X / L
    c = 2 * L**2 / (d * k)
    close(R.outer.block("value").dense(), c * kron(S @ W_K @ W_Q.T @ S @ W_Q @ W_K.T @ S, eye(d)), 1e-12)
    inner = W_K.T @ S @ W_V
    close(R.outer.block("query").dense(), c * kron(S, inner @ inner.T), 1e-12)
    close(R.outer.block("value", "query").dense(), c * kron(S @ W_K @ W_Q.T @ S, inner.T), 1e-12)
    close(
        R.outer.block("query", "key").dense(),
        c * kron(S @ W_Q, inner @ (S @ W_V).T) @ commutation(d, k),
        1e-12,
    )
    delta, f = vec(layer(X) - Y)[None], 2 / (d * k**0.5)
    shuffle = literal.shuffle(d, X)
    close(
        R.functional.block("value", "query").dense(),
        f * kron(delta, eye(d * d)) @ kron(eye(L), shuffle) @ kron(X, S @ W_K),
        1e-12,
    )
    close(
        R.functional.block("query", "key").dense(),
        f * kron(kron(delta @ kron(X, W_V.T @ S), eye(d)) @ shuffle, eye(k)),
        1e-12,
    )
    for name in ("query", "key", "value"):
        assert float(R.functional.block(name).frobenius()) == 0


def test_messages():
    layer = exact.SelfAttention(randn(3, 2), randn(3, 2), randn(3, 2))
    with pytest.raises(ValueError, match=r"expected one softmax head with W_V \[d, d\]"):
        literal.theorem_31(layer, randn(2, 3), randn(2, 2))
