"""Heads whose queries and keys are turned between projection and softmax, by rotary positions: `q_i = R_i W_Qᵀ x_i`.

The query block stays a sum of Kronecker products, `QQ = s² Σ_i x_i x_iᵀ ⊗ (R_iᵀ Kᵀ E_i K R_i)`, with the turned keys
`K`. A key's share depends on its own turn, so blocks of the key are no Kronecker products of a token any more; their
traces are sums over one coordinate of the key at a time. `R_i` may be any matrix: tables of sines and cosines are
rounded, so even that of rotary positions is no rotation to the last digit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.exact.head_grams import Shared, dot
from curvlens.exact.head_rows import Rows, below


def query_curvature(rows: Rows) -> Tensor:
    """`s² R_iᵀ Kᵀ E_i K R_i`, `[n, k²]`."""
    outer = (rows.k[:, :, None] * rows.k[:, None, :]).flatten(1)
    G = below(rows.D, outer, rows.reach).unflatten(1, (rows.k.shape[1], -1))
    crossed = rows.H[:, :, None] * rows.M[:, None, :]
    G = G - crossed - crossed.mT
    R = rows.sequence.turn_q
    if R is not None:
        G = R.mT @ G @ R
    return (rows.s**2 * G).flatten(1)


def query_inner(a: Rows, b: Rows, shared: Shared) -> Tensor:
    """`⟨QQ of a, QQ of b⟩`."""
    return dot(shared.xx, query_curvature(a) @ query_curvature(b).T)


def turned_traces(rows: Rows) -> dict[str, Tensor]:
    """The traces as `head_grams.traces` gives them. Work: `k` products of L × L matrices."""
    sequence, s, A, D = rows.sequence, rows.s, rows.A, rows.D
    x, y, n = sequence.x, sequence.y, len(rows.q)
    R, P = _matrices(sequence.turn_q, n, rows.q), _matrices(sequence.turn_k, len(y), rows.q)
    keys, crossed = y @ y.T, x @ y.T
    wide = x.shape[1] == y.shape[1] and R.shape[2] == P.shape[2]
    M, H = _back(R, rows.M), _back(R, rows.H)
    xx, yy = _squares(x), keys.diagonal()
    QQ, KK, QK = (x.new_zeros((), dtype=torch.float64) for _ in range(3))
    VK = torch.zeros_like(A)  # γ_iᵀ P_lᵀ q_i
    for c in range(P.shape[2]):
        w = rows.q @ P[:, :, c].T  # (P_lᵀ q_i)_c
        weighted = D * w
        KK = KK + dot(weighted, w * yy) - 2 * dot(below(weighted, keys, rows.reach), A, w)
        if rows.g.shape[1] == P.shape[2]:
            VK.addcmul_(w, rows.g[:, c, None])
        if wide:
            e = D * (R[:, :, c] @ rows.k.T - M[:, c, None]) - A * H[:, c, None]
            QK = QK + dot(crossed, w, e)
    for c in range(R.shape[2]):
        r = R[:, :, c] @ rows.k.T  # (R_iᵀ k_j)_c
        QQ = QQ + dot(xx, (D * r * r).sum(1) - 2 * H[:, c] * M[:, c])
    found = {"QQ": s * s * QQ, "KK": s * s * KK}
    if wide:
        found["QK"] = s * s * QK + s * dot(crossed, D, R.flatten(1) @ P.flatten(1).T)
    if rows.g.shape[1] == P.shape[2]:
        found["VK"] = s * dot(A, VK, yy - below(A, keys, rows.reach))
    if x.shape[1] == y.shape[1] and rows.g.shape[1] == R.shape[2]:
        g = torch.einsum("nac,nc->na", R, rows.g)  # R_i γ_i
        about = g @ rows.k.T - (g * rows.M).sum(1, keepdim=True)
        found["VQ"] = s * dot(crossed, A, about)
    return found


def _matrices(turn: Tensor | None, tokens: int, like: Tensor) -> Tensor:
    if turn is not None:
        return turn
    width = like.shape[-1]
    return torch.eye(width, dtype=like.dtype, device=like.device).expand(tokens, width, width)


def _back(R: Tensor, vectors: Tensor) -> Tensor:
    """`R_iᵀ v_i`."""
    return torch.einsum("nac,na->nc", R, vectors)


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1)
