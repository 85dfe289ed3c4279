"""Heads whose queries and keys are turned between projection and softmax, by rotary positions: `q_i = R_i W_Qᵀ x_i`.

The query block stays a sum of Kronecker products, `QQ = s² Σ_i x_i x_iᵀ ⊗ (R_iᵀ Kᵀ E_i K R_i)`, with the turned keys
`K`. A key's share depends on its own turn, so blocks of the key are no Kronecker products of a token any more; their
traces and, but for QK, their inner products are sums over the entries of a key of products of Gram matrices over keys.
`R_i` may be any matrix: tables of sines and cosines are rounded, so even that of rotary positions is no rotation to
the last digit.
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


def turned_inner(a: Rows, b: Rows, shared: Shared, wanted: set[str]) -> dict[str, Tensor]:
    """`⟨block of a, block of b⟩` of the wanted of QQ, VQ (where both are rows of one query head), KK and VK.

    Work: about a product of L × L matrices for each entry of a key; memory: `k L²`.
    """
    found: dict[str, Tensor] = {}
    if a.head == b.head and "QQ" in wanted:
        found["QQ"] = dot(shared.xx, query_curvature(a) @ query_curvature(b).T)
    keys = a.sequence.y @ b.sequence.y.T
    if a.head == b.head and "VQ" in wanted:
        # Z_i = Σ_j A_ij y_j (k_j − M_i)ᵀ R_i, one column for each c
        Z = _spread(_about_queries(a), keys) @ _flat(_about_queries(b)).T
        found["VQ"] = a.s * b.s * dot(shared.x, a.g @ b.g.T, Z)
    if not wanted.isdisjoint(("KK", "VK")):
        KK, VK = _key_blocks(a, b, keys)
        found["KK"], found["VK"] = (a.s * b.s) ** 2 * KK, a.s * b.s * VK
    return found


def _key_blocks(a: Rows, b: Rows, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products, without their scales, of `KK = Σ_j y_j y_jᵀ ⊗ C_j − Σ_i (d_i m_iᵀ + m_i d_iᵀ)` and of
    `VK = Σ_j y_j y_jᵀ ⊗ G_j − Σ_i (A_i Y ⊗ γ_i) m_iᵀ`, with `w_ij = P_jᵀ q_i`, the turned query of row i at key j,

        d_i = Σ_j D_ij y_j ⊗ w_ij,  m_i = Σ_j A_ij y_j ⊗ w_ij,  C_j = Σ_i D_ij w_ij w_ijᵀ,  G_j = Σ_i A_ij γ_i w_ijᵀ.
    """
    wa, wb = _at_keys(a), _at_keys(b)
    da, ma, db, mb = a.D * wa, a.A * wa, b.D * wb, b.A * wb
    Da, Ma = da @ keys, ma @ keys  # d_i·(y_j' ⊗ e_c), [c, i, j']
    Db, Mb = (Da, Ma) if a is b else (db @ keys.T, mb @ keys.T)
    yy = keys.square()
    Ca, Cb = (torch.einsum("cij,dij->jcd", d, w) for d, w in ((da, wa), (db, wb)))
    Ga, Gb = (torch.einsum("ie,cij->jec", rows.g, m) for rows, m in ((a, ma), (b, mb)))
    dd, mm, dm, md = (_flat(p) @ _flat(q).T for p, q in ((Da, db), (Ma, mb), (Da, mb), (Ma, db)))
    KK = dot(yy, Ca.flatten(1) @ Cb.flatten(1).T) + 2 * dot(dd, mm) + 2 * dot(dm, md)
    VK = dot(yy, Ga.flatten(1) @ Gb.flatten(1).T) + dot((a.A @ keys) @ b.A.T, a.g @ b.g.T, mm)
    for C, G, D, M, rows, my in ((Ca, Ga, Db, Mb, b, keys @ b.A.T), (Cb, Gb, Da, Ma, a, (a.A @ keys).T)):
        D, M = D.permute(2, 0, 1), M.permute(2, 0, 1)  # [j, c, i]
        KK = KK - 2 * dot((C @ M).flatten(1), D.flatten(1))
        VK = VK - dot(my, torch.einsum("jei,ie->ji", G @ M, rows.g))
    return KK, VK


def _at_keys(rows: Rows) -> Tensor:
    """`w_ij = P_jᵀ q_i`, `[k, n, l]`."""
    P = _matrices(rows.sequence.turn_k, len(rows.sequence.y), rows.q)
    return torch.einsum("na,jac->cnj", rows.q, P)


def _about_queries(rows: Rows) -> Tensor:
    """`A_ij R_iᵀ (k_j − M_i)`, `[k, n, l]`."""
    R = _matrices(rows.sequence.turn_q, len(rows.q), rows.q)
    return rows.A * (torch.einsum("nac,ja->cnj", R, rows.k) - _back(R, rows.M).T[:, :, None])


def _spread(weights: Tensor, keys: Tensor) -> Tensor:
    """`W^c Γ` for every `c`, `[n, k l]`."""
    return _flat(weights @ keys)


def _flat(weights: Tensor) -> Tensor:
    """From `[k, n, l]` to `[n, k l]`."""
    return weights.transpose(0, 1).flatten(1)


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
