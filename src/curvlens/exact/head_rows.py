"""One attention head in one sequence, its weights and their first derivative, as every formula of `heads` takes them.

For a head with queries `q_i`, keys `k_j`, values `v_j` as they enter the softmax, weights `A = softmax(s q kᵀ)` and
`γ_i = ∂L/∂o_i` at its output `o = A v`, let `u_ij = γ_i·v_j` and

    D_ij = A_ij (u_ij − Σ_l A_il u_il)      = ∂L/∂S_ij
    F_i  = diag A_i − A_i A_iᵀ              = ∂A_i/∂S_i
    E_i  = diag D_i − D_i A_iᵀ − A_i D_iᵀ   = ∂²⟨γ_i, o_i⟩/∂S_i²

(Lemmas B.1 and C.1 of Ormaniec, Dangel, Singh, 2025). `D_i` sums to zero, and `E_i 1 = F_i 1 = 0`: keys and their
inputs may be taken about any point, so they are taken about their mean, where least is lost to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

TILE = 128
PACKED = 128  # tokens of short sequences together: their products still take less time than the calls for one


@dataclass(frozen=True, eq=False)
class Sequence:
    """What one attention layer has seen of one sequence, all heads: `n` queries that matter to the loss, `l` keys.

    `turn_q` and `turn_k` are what stands between projection and softmax, `q_i = turn_q[i] (W_Qᵀ x_i + b)`; None is
    the identity.
    """

    x: Tensor  # [n, d], inputs of the query projection
    y: Tensor  # [l, m], inputs of the key and value projections
    q: Tensor  # [heads, n, k]
    k: Tensor  # [kv_heads, l, k]
    v: Tensor  # [kv_heads, l, e]
    gradient: Tensor  # [heads, n, e], ∂L/∂(head output)
    mask: Tensor  # [1 or heads, n, l], True where attended
    bias: Tensor | None  # [1 or heads, n, l], added to the scores
    scale: float
    turn_q: Tensor | None = None  # [n, k, k]
    turn_k: Tensor | None = None  # [l, k, k]
    curvature: Tensor | None = None  # [n, o, o], ∂²L/∂F_i² at the layer's output

    @property
    def group(self) -> int:
        """How many query heads share a key and value head."""
        return len(self.q) // len(self.k)

    @cached_property
    def centred(self) -> Tensor:
        """The key inputs about their mean."""
        return self.y - self.y.mean(0)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """For each `TILE` of rows, behind which key none of them nor of the rows before attends; causal: a stair."""
        last = torch.arange(1, self.mask.shape[2] + 1, device=self.mask.device)
        stops = (self.mask.any(0) * last).amax(1).cummax(0).values
        return tuple(int(part[-1]) for part in stops.split(TILE))

    def pruned(self) -> Sequence | None:
        """Without the queries that the loss does not depend on, and the keys that none of the others attends to.

        This is exact, and leaves no trace of padding. None if nothing is left.
        """
        matter = self.gradient.ne(0).any(-1).any(0)
        if self.curvature is not None:
            matter = matter | self.curvature.ne(0).flatten(1).any(1)
        rows = matter.nonzero()[:, 0]
        keys = self.mask[:, rows].any(1).any(0).nonzero()[:, 0]
        if not len(rows) or not len(keys):
            return None
        if len(rows) == len(self.x) and len(keys) == len(self.y):
            return self
        return replace(
            self,
            x=self.x[rows],
            y=self.y[keys],
            q=self.q[:, rows],
            k=self.k[:, keys],
            v=self.v[:, keys],
            gradient=self.gradient[:, rows],
            mask=self.mask[:, rows][:, :, keys],
            bias=None if self.bias is None else self.bias[:, rows][:, :, keys],
            turn_q=None if self.turn_q is None else self.turn_q[rows],
            turn_k=None if self.turn_k is None else self.turn_k[keys],
            curvature=None if self.curvature is None else self.curvature[rows],
        )

    def weights(self, head: int) -> Tensor:
        """`A [n, l]`; a row without keys attends to nothing."""
        scores = self.scale * (self.q[head] @ self.k[head // self.group].T)
        if self.bias is not None:
            scores += self.bias[head % len(self.bias)]
        mask = self.mask[head % len(self.mask)]
        return scores.masked_fill_(~mask, float("-inf")).softmax(-1).nan_to_num_(nan=0.0)


def packed(sequences: list[Sequence]) -> list[Sequence]:
    """Short sequences as fewer of up to `PACKED` tokens, in which rows attend within their own sequence alone.

    Blocks of a head are sums over rows, whichever sequence they are from, so all inner products are those of the same
    sums. Key inputs are taken about the mean of their own sequence. Not for turned keys, whose inputs may not be.
    """
    found: list[list[Sequence]] = []
    for sequence in sequences:
        last = found[-1] if found else []
        if last and sum(max(len(s.x), len(s.y)) for s in (*last, sequence)) <= PACKED:
            last.append(sequence)
        else:
            found.append([sequence])
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in found]


def _joined(parts: list[Sequence]) -> Sequence:
    biases = [s.bias for s in parts if s.bias is not None]
    return Sequence(
        x=torch.cat([s.x for s in parts]),
        y=torch.cat([s.centred for s in parts]),
        q=torch.cat([s.q for s in parts], 1),
        k=torch.cat([s.k for s in parts], 1),
        v=torch.cat([s.v for s in parts], 1),
        gradient=torch.cat([s.gradient for s in parts], 1),
        mask=_block_diagonal([s.mask for s in parts]),
        bias=_block_diagonal(biases) if biases else None,
        scale=parts[0].scale,
    )


def _block_diagonal(parts: list[Tensor]) -> Tensor:
    """`[heads, Σ n, Σ l]` of parts `[1 or heads, n, l]`."""
    heads = max(len(part) for part in parts)
    return torch.stack([torch.block_diag(*(part[h % len(part)] for part in parts)) for h in range(heads)])


class Rows:
    """The rows of one query head: `A`, `D`, `t`, and their products with keys."""

    def __init__(self, sequence: Sequence, head: int):
        self.sequence, self.head = sequence, head
        self.s, self.reach = sequence.scale, sequence.reach
        self.q = sequence.q[head]
        k = sequence.k[head // sequence.group]
        self.k = k - k.mean(0)
        v = self.v = sequence.v[head // sequence.group]
        self.g = sequence.gradient[head]
        self.A = sequence.weights(head)
        u = self.g @ (v - v.mean(0)).T
        u -= torch.linalg.vecdot(self.A, u)[:, None]
        self.D = u.mul_(self.A)

    @cached_property
    def M(self) -> Tensor:
        """`A K`, `[n, k]`."""
        return self.A @ self.k

    @cached_property
    def H(self) -> Tensor:
        """`D K`, `[n, k]`."""
        return self.D @ self.k

    @cached_property
    def t(self) -> Tensor:
        """`t_il = q_i·Σ_j E_i,lj k_j = D_il (q_i·(k_l − M_i)) − A_il (q_i·H_i)`, `[n, l]`."""
        about = self.q @ self.k.T
        about -= torch.linalg.vecdot(self.q, self.M)[:, None]
        return about.mul_(self.D).sub_(self.A * torch.linalg.vecdot(self.q, self.H)[:, None])


def below(A: Tensor, B: Tensor, reach: tuple[int, ...]) -> Tensor:
    """`A B` for a stair `A`, zero behind `reach`; half the work where attention is causal."""
    if reach[0] == len(B):
        return A @ B
    product = A.new_empty(len(A), B.shape[1])
    for rows, stop in zip(range(0, len(A), TILE), reach, strict=True):
        torch.mm(A[rows : rows + TILE, :stop], B[:stop], out=product[rows : rows + TILE])
    return product


def before(B: Tensor, A: Tensor, reach: tuple[int, ...]) -> Tensor:
    """`B A` for a stair `A`, likewise."""
    if reach[0] == A.shape[1]:
        return B @ A
    product = B.new_zeros(len(B), A.shape[1])
    for rows, stop, done in zip(range(0, len(A), TILE), reach, (0, *reach), strict=False):
        # the columns that these rows are the first to reach
        product[:, done:stop] = B[:, rows:] @ A[rows:, done:stop]
    return product


def both_sides(B: Tensor, A: Tensor, reach: tuple[int, ...]) -> Tensor:
    """`B Aᵀ` for a stair `A` where the product is known to be symmetric; a sixth of the work where it is causal."""
    product = B.new_empty(len(A), len(A))
    for rows, stop in zip(range(0, len(A), TILE), reach, strict=True):
        tile = slice(rows, rows + TILE)
        torch.mm(B[rows:, :stop], A[tile, :stop].T, out=product[rows:, tile])
        product[tile, rows + TILE :] = product[rows + TILE :, tile].T
    return product
