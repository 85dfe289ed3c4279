"""The matrices of paper A as printed, for those who study them: of full size, so for small problems only.

Rows are stacked by `vec` (Appendix A): `(A ⊗ B) vec X = vec(A X Bᵀ)`. Nothing else in this package needs these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_map import Softmax
from curvlens.exact.moments import Moments
from curvlens.exact.result import Tokens


def vec(X: Tensor) -> Tensor:
    """`vec_r X`: the rows one after the other."""
    return X.reshape(-1)


def kron(*factors: Tensor) -> Tensor:
    """`A ⊗ B ⊗ …` (Definition A.1)."""
    product = factors[0]
    for factor in factors[1:]:
        (m, n), (r, q) = product.shape, factor.shape
        # not torch.kron, which refuses the strides of some matrices of one row or column
        product = (product[:, None, :, None] * factor[None, :, None, :]).reshape(m * r, n * q)
    return product


def commutation(m: int, n: int, like: Tensor | None = None) -> Tensor:
    """`K(m, n)`, `[mn, mn]`, with `K vec W = vec Wᵀ` for `W` `[m, n]` (Lemma B.2)."""
    kind = torch.float64 if like is None else like.dtype
    eye = torch.eye(m * n, dtype=kind, device=None if like is None else like.device)
    return eye.view(m, n, m * n).transpose(0, 1).reshape(m * n, m * n)


def khatri_rao(A: Sequence[Sequence[Tensor]], B: Sequence[Sequence[Tensor]]) -> Tensor:
    """`A * B = (A_ij ⊗ B_ij)_ij` for matrices given as grids of blocks (Definition A.2)."""
    rows = [
        torch.cat([kron(a, b) for a, b in zip(x, y, strict=True)], dim=1) for x, y in zip(A, B, strict=True)
    ]
    return torch.cat(rows)


def rows_of(A: Tensor, height: int = 1) -> list[list[Tensor]]:
    """A matrix as one column of blocks of the given height."""
    return [[block] for block in A.split(height)]


def softmax_first(A: Tensor) -> Tensor:
    """`∂A/∂T = blockdiag(diag A_i − A_i A_iᵀ)`, `[L², L²]` (Lemma B.1)."""
    return torch.block_diag(*(torch.diag(a) - torch.outer(a, a) for a in A))


def softmax_second_entry(a: Tensor, j: int) -> Tensor:
    """`∂²A_ij/∂T_i²  = A_ij (2 A_i A_iᵀ + E_jj − diag A_i − e_j A_iᵀ − A_i e_jᵀ)`, `[L, L]` (Lemma C.1)."""
    e = torch.zeros_like(a)
    e[j] = 1
    outer = torch.outer
    return a[j] * (2 * outer(a, a) + outer(e, e) - torch.diag(a) - outer(e, a) - outer(a, e))


def softmax_second(A: Tensor) -> Tensor:
    """`∂²A/∂T² = blockdiag D_i`, `[L⁴, L²]`, `D_i` the column of the `e_i ⊗ ∂²A_ij/∂T_i²` (Lemma C.1)."""
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    blocks = [
        torch.cat([kron(eye[i][:, None], softmax_second_entry(a, j)) for j in range(len(A))])
        for i, a in enumerate(A)
    ]
    return torch.block_diag(*blocks)


def M1(A: Tensor, X: Tensor) -> Tensor:
    """`A X`, `[L, d]` (Definition 3.1)."""
    return Moments(A, X).first


def M2(A: Tensor, X: Tensor) -> Tensor:
    """Second central moments one below the other, `[L d, d]` (Definition 3.1)."""
    return Moments(A, X).second.flatten(0, 1)


def M3(A: Tensor, X: Tensor) -> Tensor:
    """Third central moments `Σ_j A_ij c_j ⊗ c_j c_jᵀ` one below the other, `[L d², d]` (Definition 3.1)."""
    return Moments(A, X).third.flatten(0, 2)


def Z1(A: Tensor, X: Tensor) -> Tensor:
    """`(I ⊗ Xᵀ)(∂A/∂T)(X ⊗ X)`, `[L d, d²]` (Theorem 3.1); equal to `X * M2` (Remark 3.1)."""
    return kron(_eye(A), X.T) @ softmax_first(A) @ kron(X, X)


def Z2(A: Tensor, X: Tensor) -> Tensor:
    """`(I ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X)`, `[L d³, d²]` (Theorem 3.2); `(I ⊗ K ⊗ I)(X * Xᵀ * M3)` (Remark 3.1)."""
    return kron(_eye(A), X.T, X.T, X.T) @ softmax_second(A) @ kron(X, X)


def shuffle(d: int, like: Tensor) -> Tensor:
    """`S = (I ⊗ K_dd)(vec I ⊗ I)`, `[d³, d]` (Theorem 3.2)."""
    eye = torch.eye(d, dtype=like.dtype, device=like.device)
    return kron(eye, commutation(d, d, like)) @ kron(vec(eye)[:, None], eye)


def duplicated(delta: Tensor, m: int) -> Tensor:
    """`R_m = δᵀ ⊗ I_m` for the residual `δ = vec(F − Y)` (Theorem 3.2)."""
    return kron(delta[None], torch.eye(m, dtype=delta.dtype, device=delta.device))


def theorem_31(layer: SelfAttention, X: Tensor, Y: Tensor) -> dict[tuple[str, str], Tensor]:
    """The blocks of `H_o` as Theorem 3.1 prints them, for one softmax head with `d_V` outputs, `d_V = d`."""
    A, W_Q, W_K, W_V, c, s = _setting(layer, X, Y)
    d, k = W_Q.shape
    I_d, I_L, Z = torch.eye(d, dtype=X.dtype), _eye(A), Z1(A, X)
    middle = kron(I_L, W_V @ W_V.T)
    left = kron(I_d, W_K.T) @ Z.T @ middle @ Z
    first = M1(A, X)
    return {
        ("value", "value"): c * kron(first.T @ first, I_d),
        ("query", "query"): c * s**2 * left @ kron(I_d, W_K),
        ("value", "query"): c * s * kron(first.T, W_V.T) @ Z @ kron(I_d, W_K),
        ("query", "key"): c * s**2 * left @ kron(W_Q, I_d) @ commutation(d, k, X),
    }


def theorem_32(layer: SelfAttention, X: Tensor, Y: Tensor) -> dict[tuple[str, str], Tensor]:
    """The blocks of `H_f` as Theorem 3.2 prints them, in the same setting."""
    A, W_Q, W_K, W_V, c, s = _setting(layer, X, Y)
    d, k = W_Q.shape
    I_d, I_k, I_L = (torch.eye(size, dtype=X.dtype) for size in (d, k, len(A)))
    first, second, S = Z1(A, X), Z2(A, X), shuffle(d, X)
    delta = vec(layer(X) - Y)
    left = duplicated(delta, d * k) @ kron(I_L, W_V.T, I_d, W_K.T) @ second
    score = duplicated(delta, d) @ kron(I_L, W_V.T, I_d) @ kron(first, I_d) @ S
    return {
        ("value", "value"): torch.zeros(d * d, d * d, dtype=X.dtype),
        ("query", "query"): c * s**2 * left @ kron(I_d, W_K),
        ("value", "query"): c * s * duplicated(delta, d * d) @ kron(I_L, S) @ first @ kron(I_d, W_K),
        ("query", "key"): c * s**2 * left @ kron(W_Q, I_d) @ commutation(d, k, X) + c * s * kron(score, I_k),
    }


def attention(layer: SelfAttention, X: Tensor, h: int = 0) -> Tensor:
    """The attention map `A` `[L, L]` of one head."""
    mask = layer.masks(Tokens.of(X))[0]
    return layer.activation.attend(layer.score(X, h), mask)


def _setting(
    layer: SelfAttention, X: Tensor, Y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    known = {"query", "key", "value"} == set(layer.weights) and layer.heads == 1 and not layer.biases
    known = known and layer.turns is None
    square = known and layer.weights["value"].shape[0] == layer.weights["value"].shape[1]
    if not square or not isinstance(layer.activation, Softmax) or X.dim() != 2:
        raise ValueError(
            "expected one softmax head with W_V [d, d] and no output matrix or bias, and one sequence, as the theorems "
            "are printed; cl.exact.hessian gives every other form"
        )
    W_Q, W_K, W_V = (layer.weights[kind] for kind in ("query", "key", "value"))
    return attention(layer, X), W_Q, W_K, W_V, 2 / Y.numel(), layer.scale


def _eye(A: Tensor) -> Tensor:
    return torch.eye(len(A), dtype=A.dtype, device=A.device)
