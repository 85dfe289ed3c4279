"""Attention and its derivatives tile by tile, in plain PyTorch: any device, any precision, memory `O(L · chunk)`.

With scale `s`, scores `S = s q kᵀ` (+ bias, −∞ where masked), `lse` the logarithm of each row's sum of exponentials
and `P = exp(S − lse)`, a dot for a tangent and `δ = rowsum(do ∘ o)`:

    forward   o = P v
    jvp       Ṡ = s (q̇ kᵀ + q k̇ᵀ),  l̇ = rowsum(P ∘ Ṡ),  ȯ = (P ∘ Ṡ) v + P v̇ − l̇ o
    backward  dP = do vᵀ,  dS = P ∘ (dP − δ);  dq = s dS k,  dk = s dSᵀ q,  dv = Pᵀ do
    its tangent
              Ṗ = P ∘ (Ṡ − l̇),  dṖ = ḋo vᵀ + do v̇ᵀ,  δ̇ = rowsum(ḋo ∘ o + do ∘ ȯ),
              dṠ = Ṗ ∘ (dP − δ) + P ∘ (dṖ − δ̇);
              dq̇ = s (dṠ k + dS k̇),  dk̇ = s (dṠᵀ q + dSᵀ q̇),  dv̇ = Ṗᵀ do + Pᵀ ḋo

Terms that are constant in a row (`lse`, `δ`, `l̇`, …) ride along as one more column of the factors, against ones: a
matrix product subtracts them for nothing, and a tile is passed over only for what is not linear. Two products with a
common shape are one, of the factors side by side. A row that sees no key has `o = 0`, as with torch's own softmax,
and `lse = +∞`, so that each later `P` is zero and with it every derivative.

Shapes: queries `[B, H, L, d]`, keys `[B, G, M, d]`, values `[B, G, M, e]`, with H a multiple of G; `lse` is
`[B, H, L]`. Tangents have a further first dimension K, and share `S`, `P` and `dP`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.kernels.pattern import Pattern

# Entries of a tile. On a CPU half a dozen tiles should stay in the caches; elsewhere launches should be few.
CPU_TILE, DEVICE_TILE = 2**17, 2**24
KEYS = 512  # of a tile on a CPU


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """`o, lse`."""
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=working(q.dtype))
    grid = Grid.of(q, k, mask, pattern)
    Q, K, V, O, LSE = (
        grid.queries(q, pattern.scale),
        grid.keys(k),
        grid.keys(v),
        grid.heads(o),
        grid.heads(lse),
    )
    for heads, rows in grid.query_tiles():
        qi = grid.rows(Q, heads, rows)
        top = qi.new_full((*qi.shape[:-1], 1), -math.inf)  # the largest score so far
        total, mixed = torch.zeros_like(top), qi.new_zeros(*qi.shape[:-1], v.shape[-1])
        for keys in grid.key_tiles(heads, rows):
            S = grid.hide(qi @ K[heads, keys].mT, heads, rows, keys)
            higher = torch.maximum(top, S.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -math.inf, 0.0)
            shrink = torch.exp(top - base)
            P = S.sub_(base).exp_()
            total.mul_(shrink).add_(P.sum(-1, keepdim=True))
            mixed.mul_(shrink).baddbmm_(P, V[heads, keys])
            top = higher
        seen = total > 0
        grid.put(O, heads, rows, mixed.div_(total.masked_fill(~seen, 1.0)))
        grid.put(LSE, heads, rows, torch.where(seen, top + total.log(), math.inf)[..., 0])
    return o, lse


def jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor,
    k_dot: Tensor,
    v_dot: Tensor,
    mask: Tensor | None,
    pattern: Pattern,
) -> tuple[Tensor, Tensor]:
    """`ȯ, l̇`, for K tangents."""
    count = len(q_dot)
    o_dot, lse_dot = o.new_empty(count, *o.shape), lse.new_empty(count, *lse.shape)
    grid = Grid.of(q, k, mask, pattern)
    Q, K, V, O = grid.queries(q, pattern.scale), grid.keys(k), grid.keys(v), grid.heads(o)
    S_left, S_right = beside(Q, -grid.heads(lse)[..., None]), beside(K, 1.0)
    V_one = beside(V, 1.0)
    each = []
    for t in range(count):
        Qt, Kt = grid.queries(q_dot[t], pattern.scale), grid.keys(k_dot[t])
        # Ṡ less a constant of each row, its value at the mean key: what all keys have in common would cost digits
        mean, mean_dot = K.mean(-2, keepdim=True)[:, None], Kt.mean(-2, keepdim=True)[:, None]
        common = (Qt * mean + Q * mean_dot).sum(-1, keepdim=True)
        each.append((beside(Qt, Q, -common), beside(K, Kt, 1.0), grid.keys(v_dot[t]), common))
    O_dot, LSE_dot = [grid.heads(x) for x in o_dot], [grid.heads(x) for x in lse_dot]
    for heads, rows in grid.query_tiles():
        left = grid.rows(S_left, heads, rows)
        lefts = [grid.rows(one[0], heads, rows) for one in each]
        sums = [left.new_zeros(*left.shape[:-1], v.shape[-1] + 1) for _ in each]
        for keys in grid.key_tiles(heads, rows):
            P = grid.hide(left @ S_right[heads, keys].mT, heads, rows, keys).exp_()
            for t, (_, right, Vt, _) in enumerate(each):
                W = (lefts[t] @ right[heads, keys].mT).mul_(P)
                sums[t].baddbmm_(W, V_one[heads, keys])
                sums[t][..., :-1].baddbmm_(P, Vt[heads, keys])
        oi = grid.rows(O, heads, rows)
        seen = grid.rows(grid.heads(lse)[..., None], heads, rows) < math.inf
        for t, (_, _, _, common) in enumerate(each):
            shifted = sums[t][..., -1:]
            grid.put(O_dot[t], heads, rows, sums[t][..., :-1] - shifted * oi)
            whole = (shifted + grid.rows(common, heads, rows)).masked_fill_(~seen, 0.0)
            grid.put(LSE_dot[t], heads, rows, whole[..., 0])
    return o_dot, lse_dot


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    mask: Tensor | None,
    pattern: Pattern,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`."""
    grid = Grid.of(q, k, mask, pattern)
    Q, K, V = grid.queries(q, pattern.scale), grid.keys(k), grid.keys(v)
    O, DO = grid.queries(o), grid.queries(do)
    dq, (dk, dv) = torch.empty_like(q, memory_format=torch.contiguous_format), grid.sums(k, v)
    DQ, DK, DV = grid.heads(dq), grid.flat(dk), grid.flat(dv)
    S_left, S_right = beside(Q, -grid.heads(lse)[..., None]), beside(K, 1.0)
    D_left, D_right = beside(DO, -(DO * O).sum(-1, keepdim=True)), beside(V, 1.0)
    for heads, rows in grid.query_tiles():
        s_left, d_left = grid.rows(S_left, heads, rows), grid.rows(D_left, heads, rows)
        qi, doi = s_left[..., :-1], d_left[..., :-1]
        dqi = torch.zeros_like(qi, memory_format=torch.contiguous_format)
        for keys in grid.key_tiles(heads, rows):
            P = grid.hide(s_left @ S_right[heads, keys].mT, heads, rows, keys).exp_()
            DV[heads, keys].baddbmm_(P.mT, doi)
            dS = (d_left @ D_right[heads, keys].mT).mul_(P)
            DK[heads, keys].baddbmm_(dS.mT, qi)
            dqi.baddbmm_(dS, K[heads, keys])
        grid.put(DQ, heads, rows, dqi.mul_(pattern.scale))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def backward_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    o_dot: Tensor,
    lse_dot: Tensor,
    q_dot: Tensor,
    k_dot: Tensor,
    v_dot: Tensor,
    do_dot: Tensor | None,
    mask: Tensor | None,
    pattern: Pattern,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq̇, dk̇, dv̇`, for K tangents; `do_dot = None` stands for zero."""
    count, scale = len(q_dot), pattern.scale
    grid = Grid.of(q, k, mask, pattern)
    Q, K, V = grid.queries(q, scale), grid.keys(k), grid.keys(v)
    O, DO = grid.queries(o), grid.queries(do)
    dq_dot = q.new_empty(count, *q.shape)
    dk_dot, dv_dot = grid.sums(k, v, count)
    S_left, S_right = beside(Q, -grid.heads(lse)[..., None]), beside(K, 1.0)
    D_left, D_right = beside(DO, -(DO * O).sum(-1, keepdim=True)), beside(V, 1.0)
    each = []
    for t in range(count):
        Qt, Kt, Vt = grid.queries(q_dot[t], scale), grid.keys(k_dot[t]), grid.keys(v_dot[t])
        DOt = None if do_dot is None else grid.queries(do_dot[t])
        delta_dot = (DO * grid.queries(o_dot[t])).sum(-1, keepdim=True)
        if DOt is not None:
            delta_dot += (DOt * O).sum(-1, keepdim=True)
        each.append(
            (
                beside(Qt, Q, -grid.heads(lse_dot[t])[..., None]),
                beside(K, Kt, 1.0),
                beside(DO, -delta_dot) if DOt is None else beside(DO, DOt, -delta_dot),
                beside(Vt, 1.0) if DOt is None else beside(Vt, V, 1.0),
                Kt,
            )
        )
    DQt = [grid.heads(x) for x in dq_dot]
    DKt, DVt = [grid.flat(x) for x in dk_dot], [grid.flat(x) for x in dv_dot]
    d, e = q.shape[-1], v.shape[-1]
    for heads, rows in grid.query_tiles():
        s_left, d_left = grid.rows(S_left, heads, rows), grid.rows(D_left, heads, rows)
        qi, doi = s_left[..., :-1], d_left[..., :-1]
        lefts = [(grid.rows(one[0], heads, rows), grid.rows(one[2], heads, rows)) for one in each]
        dqi = [qi.new_zeros(qi.shape) for _ in each]
        for keys in grid.key_tiles(heads, rows):
            P = grid.hide(s_left @ S_right[heads, keys].mT, heads, rows, keys).exp_()
            dP = d_left @ D_right[heads, keys].mT  # less δ
            dS = P * dP
            for t, (_, right, _, right_d, Kt) in enumerate(each):
                left, left_d = lefts[t]
                P_dot = (left @ right[heads, keys].mT).mul_(P)
                DVt[t][heads, keys].baddbmm_(P_dot.mT, doi)
                dS_dot = (left_d @ right_d[heads, keys].mT).mul_(P).addcmul_(P_dot, dP)
                if do_dot is not None:
                    DVt[t][heads, keys].baddbmm_(P.mT, left_d[..., e : 2 * e])
                DKt[t][heads, keys].baddbmm_(dS_dot.mT, qi).baddbmm_(dS.mT, left[..., :d])
                dqi[t].baddbmm_(dS_dot, K[heads, keys]).baddbmm_(dS, Kt[heads, keys])
        for t, summed in enumerate(dqi):
            grid.put(DQt[t], heads, rows, summed.mul_(scale))
    return dq_dot, dk_dot.to(k.dtype), dv_dot.to(v.dtype)


def working(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def beside(*columns: Tensor | float) -> Tensor:
    """Factors side by side; a number is one more column of it."""
    first = next(c for c in columns if isinstance(c, Tensor))
    return torch.cat(
        [c if isinstance(c, Tensor) else first.new_full((*first.shape[:-1], 1), c) for c in columns], -1
    )


@dataclass(frozen=True)
class Grid:
    """The tiles of queries and keys. Batch and key heads are one dimension N; R query heads share a key head."""

    pattern: Pattern
    mask: Tensor | None  # [1 or B, 1 or H, 1 or L, 1 or M]
    batch: int
    key_heads: int
    shared: int  # R
    length: int  # L
    key_length: int  # M
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, mask: Tensor | None, pattern: Pattern) -> Grid:
        return cls(
            pattern,
            mask,
            q.shape[0],
            k.shape[1],
            q.shape[1] // max(1, k.shape[1]),
            q.shape[2],
            k.shape[2],
            working(q.dtype),
            q.device,
        )

    # -- tensors as [N, R, L, …] and [N, M, …]

    def heads(self, x: Tensor) -> Tensor:
        """A view `[N, R, L, …]` of `[B, H, L, …]`."""
        return x.view(self.batch * self.key_heads, self.shared, *x.shape[2:])

    def queries(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.heads(x.to(self.dtype).contiguous())
        return x if scale == 1.0 else x * scale

    def keys(self, x: Tensor) -> Tensor:
        return self.flat(x.to(self.dtype).contiguous())

    def flat(self, x: Tensor) -> Tensor:
        return x.view(self.batch * self.key_heads, *x.shape[2:])

    def sums(self, k: Tensor, v: Tensor, *count: int) -> list[Tensor]:
        """Zeros in which what belongs to keys and values is summed."""
        return [x.new_zeros(*count, *x.shape, dtype=self.dtype) for x in (k, v)]

    def rows(self, x: Tensor, heads: slice, rows: slice) -> Tensor:
        """`[n, R · queries, …]`: the rows of a tile, all that meet the same keys together."""
        return x[heads, :, rows].flatten(1, 2)

    def put(self, x: Tensor, heads: slice, rows: slice, value: Tensor) -> None:
        x[heads, :, rows] = value.unflatten(1, (self.shared, -1))

    # -- tiles

    def query_tiles(self) -> Iterator[tuple[slice, slice]]:
        size, rows, keys = self._sizes()
        together = max(1, size // max(1, self.shared * rows * min(keys, self.key_length)))
        # a mask of its own for each sample or head cannot be spread over N without a copy
        among = self.key_heads if self._each_its_mask() else self.batch * self.key_heads
        for base in range(0, self.batch * self.key_heads, max(1, among)):
            for n in range(base, base + among, together):
                heads = slice(n, min(n + together, base + among))
                for i in range(0, self.length, rows):
                    yield heads, slice(i, min(i + rows, self.length))

    def key_tiles(self, heads: slice, rows: slice) -> Iterator[slice]:
        for first, last in self.pattern.key_tiles(rows.start, rows.stop, self.key_length, self._sizes()[2]):
            keys = slice(first, last)
            seen = self._mask(heads, rows, keys)
            if seen is not None and seen.dtype == torch.bool and self.device.type == "cpu" and not seen.any():
                continue
            yield keys

    def _sizes(self) -> tuple[int, int, int]:
        """Entries, rows and keys of a tile."""
        if self.device.type == "cpu":
            return CPU_TILE, max(16, CPU_TILE // (KEYS * self.shared)), KEYS
        return DEVICE_TILE, 1024, 1024

    def _each_its_mask(self) -> bool:
        return self.mask is not None and (self.mask.shape[0] > 1 or self.mask.shape[1] > 1)

    def _mask(self, heads: slice, rows: slice, keys: slice) -> Tensor | None:
        """The mask of a tile, `[1 or n, 1 or R, 1 or queries, 1 or keys]`."""
        mask = self.mask
        if mask is None:
            return None
        if mask.shape[0] > 1:
            mask = mask[heads.start // self.key_heads]
        else:
            mask = mask[0]
        if mask.shape[0] > 1:
            first = heads.start % self.key_heads
            mask = mask.unflatten(0, (self.key_heads, self.shared))[first : first + heads.stop - heads.start]
        else:
            mask = mask[None]
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        return mask[..., keys] if mask.shape[3] > 1 else mask

    def hide(self, S: Tensor, heads: slice, rows: slice, keys: slice) -> Tensor:
        """The scores `[n, R · queries, keys]` of a tile with the bias added and −∞ at what is not seen, in place."""
        whole = S.unflatten(1, (self.shared, -1))
        mask = self._mask(heads, rows, keys)
        if mask is not None and mask.dtype == torch.bool:
            if self.device.type != "cpu" or not mask.all():
                whole.masked_fill_(~mask, -math.inf)
        elif mask is not None:
            whole.add_(mask)
        seen = self.pattern.visible(rows.start, rows.stop, keys.start, keys.stop, self.device)
        if seen is not None:
            whole.masked_fill_(~seen, -math.inf)
        return S
