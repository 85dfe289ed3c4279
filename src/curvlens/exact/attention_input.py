"""The attention sublayer's derivatives with respect to its input, as matrices, for one sequence.

The input acts as query, key and value. Write `u_i = (q_i, k_i, v_i)` for the three roles of token `i` in one
head, `A` for the attention, `o_i = Σ_j A_ij v_j`, `κ_ij = k_j − Σ_m A_im k_m` for the centred keys, `y_i` for the
gradient at `o_i`, `e_ij = y_i·(v_j − o_i)`, and `p_i = Σ_j A_ij e_ij κ_ij`. First derivatives:

    ∂o_i/∂q_i = s Σ_j A_ij (v_j − o_i) κ_ijᵀ,    ∂o_i/∂k_m = s A_im (v_m − o_i) q_iᵀ,    ∂o_i/∂v_m = A_im I,

and with `R_i = diag(A_i ∘ e_i) − A_i (A_i ∘ e_i)ᵀ − (A_i ∘ e_i) A_iᵀ`, the second derivative of the softmax against
`y_i·v_j`, the second derivatives of `Σ_i y_i·o_i` are

    q_i, q_i:  s² Σ_j A_ij e_ij κ_ij κ_ijᵀ                   k_j, k_m:  s² Σ_i R_i[j, m] q_i q_iᵀ
    q_i, k_m:  s A_im (s (e_im κ_im − p_i) q_iᵀ + e_im I)     k_j, v_m:  s Σ_i A_ij (δ_jm − A_im) q_i y_iᵀ
    q_i, v_m:  s A_im κ_im y_iᵀ                               v_j, v_m:  0

and zero for queries of two tokens. The three-token sum `k, k` is what makes attention curve across tokens. As
`q = x W_Q` and so on, derivatives by the input are these times `W = [W_Q W_K W_V]` on either side, and mixed
ones, by a weight and the input, `x` on the side of the weight, plus the gradient at the role itself where
weight and input meet. The moments of `attention` are the sums over `j` here: `Σ_j A_ij κ_ij κ_ijᵀ = W_Kᵀ M2_i W_K`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_jet import AttentionJet
from curvlens.exact.attention_map import Softmax
from curvlens.exact.result import Tokens


@dataclass(frozen=True)
class Roles:
    """The derivatives of one sequence by the roles `(q, k, v)` of its tokens, in each of `h` heads."""

    W: Tensor  # [h, d, w]: the three matrices side by side, w = 2 d_K + d_V
    jacobian: Tensor  # [h, i, d_V, m, w]: ∂o_i/∂u_m
    gradient: Tensor  # [h, m, w]: of Σ y·o by u_m
    hessian: Tensor  # [h, j, w, m, w]: of Σ y·o by u_j and u_m

    @classmethod
    def of(cls, layer: SelfAttention, x: Tensor, g: Tensor) -> Roles:
        usual = not layer.stacked and "query_key" not in layer.weights and layer.turns is None
        if not (
            usual and isinstance(layer.activation, Softmax) and set(layer.groups.values()) == {layer.heads}
        ):
            raise ValueError(
                "expected softmax attention with W_Q and W_K, heads side by side, and as many key and value heads as "
                "query heads, not turned, for these matrices; for others take AttentionLayer(layer).input_hessian(x, g)"
            )
        jet = AttentionJet(layer, Tokens(x, (len(x),)))
        q, k, v, A, o = (part[0] for part in (jet.q, jet.k, jet.v, jet.A, jet.o))  # [h, L, …]
        y = jet.by.split(g @ jet.out.W.mT if jet.out else g)[0]
        W = torch.cat(
            [layer.weights[n].unflatten(1, (layer.heads, -1)) for n in ("query", "key", "value")], dim=2
        )
        kappa = k[:, None] - (A @ k)[:, :, None]  # [h, i, j, d_K]
        J = _first(layer.scale, q, v, A, o, kappa)
        return cls(
            W.transpose(0, 1),
            J,
            torch.einsum("hic,hicmw->hmw", y, J),
            _second(layer.scale, q, v, A, o, kappa, y),
        )


def _first(s: float, q: Tensor, v: Tensor, A: Tensor, o: Tensor, kappa: Tensor) -> Tensor:
    L, d_V = v.shape[1:]
    eye = torch.eye(L, dtype=v.dtype, device=v.device)
    off = v[:, None] - o[:, :, None]  # v_m − o_i: [h, i, m, d_V]
    by_query = s * torch.einsum("hij,hijc,hijb,im->hicmb", A, off, kappa, eye)
    by_key = s * torch.einsum("him,himc,hib->hicmb", A, off, q)
    by_value = torch.einsum("him,cb->hicmb", A, torch.eye(d_V, dtype=v.dtype, device=v.device))
    return torch.cat([by_query, by_key, by_value], dim=-1)


def _second(s: float, q: Tensor, v: Tensor, A: Tensor, o: Tensor, kappa: Tensor, y: Tensor) -> Tensor:
    L, d_K = q.shape[1:]
    eye_L = torch.eye(L, dtype=v.dtype, device=v.device)
    eye_K = torch.eye(d_K, dtype=v.dtype, device=v.device)
    Ae = A * (y @ v.mT - (y * o).sum(-1, keepdim=True))  # A_im e_im
    p = torch.einsum("hij,hijb->hib", Ae, kappa)
    cross = A[..., :, None] * Ae[..., None, :]
    R = torch.diag_embed(Ae) - cross - cross.mT
    qq = s * s * torch.einsum("hij,hijb,hijc,im->hibmc", Ae, kappa, kappa, eye_L)
    kk = s * s * torch.einsum("hijm,hib,hic->hjbmc", R, q, q)
    column = Ae[..., None] * kappa - A[..., None] * p[:, :, None]  # A_im (e_im κ_im − p_i)
    qk = s * s * torch.einsum("himb,hic->hibmc", column, q) + s * torch.einsum("him,bc->hibmc", Ae, eye_K)
    qv = s * torch.einsum("him,himb,hic->hibmc", A, kappa, y)
    kv = s * torch.einsum("hij,jm,hib,hic->hjbmc", A, eye_L, q, y)
    kv = kv - s * torch.einsum("hij,him,hib,hic->hjbmc", A, A, q, y)
    vv = v.new_zeros(*v.shape, *v.shape[1:])

    def adjoint(block: Tensor) -> Tensor:
        return block.permute(0, 3, 4, 1, 2)

    rows = [[qq, qk, qv], [adjoint(qk), kk, kv], [adjoint(qv), adjoint(kv), vv]]
    return torch.cat([torch.cat(row, dim=4) for row in rows], dim=2)


def input_jacobian(layer: SelfAttention, x: Tensor) -> Tensor:
    """`∂z/∂x`: `[L o, L d]` for one sequence `x: [L, d]`."""
    roles = Roles.of(layer, x, x.new_zeros(len(x), layer.outputs))
    J = torch.einsum("hicmw,hdw->ihcmd", roles.jacobian, roles.W).flatten(1, 2)
    if "out" in layer.weights:
        J = torch.einsum("icmd,co->iomd", J, layer.weights["out"])
    return J.flatten(2).flatten(0, 1)


def input_hessian(layer: SelfAttention, x: Tensor, g: Tensor) -> Tensor:
    """`Σ_m g_m ∂²z_m/∂x²`: `[L d, L d]` for one sequence."""
    roles = Roles.of(layer, x, g)
    H = torch.einsum("haw,hjwmz,hbz->jamb", roles.W, roles.hessian, roles.W)
    return H.flatten(2).flatten(0, 1)


def mixed_hessian(layer: SelfAttention, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """`Σ_m g_m ∂²z_m/∂θ∂x` of every weight: `[weight entries, L d]` for one sequence."""
    roles, d = Roles.of(layer, x, g), x.shape[1]
    to_input = torch.einsum("hjwmz,hbz->hjwmb", roles.hessian, roles.W)  # by u_j and x_m
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    found, start = {}, 0
    for name in ("query", "key", "value"):
        width = layer.weights[name].shape[1] // layer.heads
        part, y = to_input[:, :, start : start + width], roles.gradient[..., start : start + width]
        own = torch.einsum("ja,hjwmb->ahwmb", x, part) + torch.einsum("ab,hmw->ahwmb", eye, y)
        found[name] = own.flatten(3).flatten(0, 2)
        found[f"{name}.bias"] = part.sum(1).flatten(2).flatten(0, 1)
        start += width
    if "out" in layer.weights:
        by_input = torch.einsum("hicmw,hdw->hcimd", roles.jacobian, roles.W)
        found["out"] = torch.einsum("hcimd,io->hcomd", by_input, g).flatten(3).flatten(0, 2)
    found["out.bias"] = x.new_zeros(g.shape[1], x.numel())
    return {name: block for name, block in found.items() if name in layer.blocks}
