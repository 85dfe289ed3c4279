"""The three kernels of second order through attention, in Triton; `fused` launches them.

    tangent         T1  ȯ, l̇        a tile of queries stays, keys pass by      1 product, and 4 a tangent
    query_tangent   T2  dq̇          likewise                                   2, and 6
    key_tangent     T3  dk̇, dv̇      a tile of keys stays, queries pass by      2, and 8

Symbols are those of `chunked`. Each program takes `TANGENTS` tangents through one pass, which share `S`, `P` and `dP`.
No two programs write to one place. Sums are float32, factors of products the inputs' precision.

Arrays are contiguous: `[heads, rows, columns]` with heads = samples × heads, tangents with a first dimension more.
`mask` has strides of 0 where it is broadcast; MASK says what it is: 0 none, 1 boolean (true where seen), 2 added.
Rows of no key have `lse = ∞`, so that `P = 0` and with it every result.
"""

# mypy: ignore-errors
# (Triton compiles this text; it is not Python that runs)

import triton
import triton.language as tl


@triton.jit
def _rows(x, i, count, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows `i` of an array `[count, SIZE]`, zero outside, in tiles of `WIDE` columns."""
    c = tl.arange(0, WIDE)
    return tl.load(
        x + i[:, None] * SIZE + c[None, :], mask=(i < count)[:, None] & (c < SIZE)[None, :], other=0.0
    )


@triton.jit
def _put(x, i, count, value, SIZE: tl.constexpr, WIDE: tl.constexpr):
    c = tl.arange(0, WIDE)
    where = x + i[:, None] * SIZE + c[None, :]
    tl.store(where, value.to(x.dtype.element_ty), mask=(i < count)[:, None] & (c < SIZE)[None, :])


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _hide(
    S, i, j, L, M, mask, mask_row, mask_column, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr
):
    """Scores with the bias added, −∞ at what is not seen."""
    seen = (i < L)[:, None] & (j < M)[None, :]
    if CAUSAL:
        seen = seen & (i[:, None] >= j[None, :])
    if WINDOW > 0:
        seen = seen & (i[:, None] - j[None, :] < WINDOW) & (j[None, :] - i[:, None] < WINDOW)
    if MASK > 0:
        given = tl.load(
            mask + i[:, None].to(tl.int64) * mask_row + j[None, :] * mask_column, mask=seen, other=0
        )
        if MASK == 1:
            seen = seen & (given != 0)
        else:
            S = S + given
    return tl.where(seen, S, float("-inf"))


@triton.jit
def _keys(i0, M, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The range of keys that queries `i0 … i0 + ROWS − 1` can see, from the first of a tile."""
    first, last = 0, M
    if WINDOW > 0:
        first = tl.maximum(i0 - WINDOW + 1, 0) // COLUMNS * COLUMNS
        last = tl.minimum(M, i0 + ROWS + WINDOW - 1)
    if CAUSAL:
        last = tl.minimum(M, i0 + ROWS)
    return first, last


@triton.jit
def tangent(
    q, k, v, o, lse, q_dot, k_dot, v_dot, mean, mean_dot, o_dot, lse_dot,
    mask, mask_sample, mask_head, mask_row, mask_column,
    samples, heads, shared, L, M, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, TANGENTS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """T1. `Ṡ` is taken less its value at the mean key: what all keys have in common would cost digits."""
    i0 = tl.program_id(0) * ROWS
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) * TANGENTS
    group, queries, keys = head // shared, samples * heads, samples * heads // shared
    i = i0 + tl.arange(0, ROWS)
    mask += head // heads * mask_sample + head % heads * mask_head
    qi = _rows(q + head * L * D, i, L, D, WIDE_D)
    top = tl.load(lse + head * L + i, mask=i < L, other=float("inf"))
    columns = tl.arange(0, WIDE_D)
    centre = tl.load(mean + group * D + columns, mask=columns < D, other=0.0)
    dots, common, sums, totals = (), (), (), ()
    for t in tl.static_range(TANGENTS):
        dot = _rows(q_dot + ((first + t) * queries + head) * L * D, i, L, D, WIDE_D)
        centre_dot = tl.load(
            mean_dot + ((first + t) * keys + group) * D + columns, mask=columns < D, other=0.0
        )
        dots = dots + (dot,)
        common = common + (tl.sum(dot * centre[None, :] + qi * centre_dot[None, :], 1) * scale,)
        sums = sums + (tl.zeros([ROWS, WIDE_E], tl.float32),)
        totals = totals + (tl.zeros([ROWS], tl.float32),)
    begin, end = _keys(i0, M, ROWS, COLUMNS, CAUSAL, WINDOW)
    for j0 in range(begin, end, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        kj = tl.trans(_rows(k + group * M * D, j, M, D, WIDE_D))
        vj = _rows(v + group * M * E, j, M, E, WIDE_E)
        S = _dot(qi, kj, PRECISION) * scale
        S = _hide(S, i, j, L, M, mask, mask_row, mask_column, CAUSAL, WINDOW, MASK)
        P = tl.exp(S - top[:, None])
        new_sums, new_totals = (), ()
        for t in tl.static_range(TANGENTS):
            at = ((first + t) * keys + group) * M
            k_dot_j = tl.trans(_rows(k_dot + at * D, j, M, D, WIDE_D))
            v_dot_j = _rows(v_dot + at * E, j, M, E, WIDE_E)
            W = (_dot(dots[t], kj, PRECISION) + _dot(qi, k_dot_j, PRECISION)) * scale - common[t][:, None]
            W = P * W
            new_totals = new_totals + (totals[t] + tl.sum(W, 1),)
            mixed = _dot(W.to(vj.dtype), vj, PRECISION) + _dot(P.to(vj.dtype), v_dot_j, PRECISION)
            new_sums = new_sums + (sums[t] + mixed,)
        sums, totals = new_sums, new_totals
    oi = _rows(o + head * L * E, i, L, E, WIDE_E)
    for t in tl.static_range(TANGENTS):
        at = ((first + t) * queries + head) * L
        _put(o_dot + at * E, i, L, sums[t] - totals[t][:, None] * oi, E, WIDE_E)
        whole = tl.where(top == float("inf"), 0.0, totals[t] + common[t])
        tl.store(lse_dot + at + i, whole, mask=i < L)


@triton.jit
def query_tangent(
    q, k, v, lse, do, delta, lse_dot, delta_dot, q_dot, k_dot, v_dot, do_dot, mean, mean_dot, dq_dot,
    mask, mask_sample, mask_head, mask_row, mask_column,
    samples, heads, shared, L, M, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, TANGENTS: tl.constexpr,
    MOVING: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """T2. Rows of `dS` and `dṠ` sum to zero; what rounding leaves of their sums is taken from the mean key."""
    i0 = tl.program_id(0) * ROWS
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) * TANGENTS
    group, queries, keys = head // shared, samples * heads, samples * heads // shared
    i = i0 + tl.arange(0, ROWS)
    mask += head // heads * mask_sample + head % heads * mask_head
    qi = _rows(q + head * L * D, i, L, D, WIDE_D)
    doi = _rows(do + head * L * E, i, L, E, WIDE_E)
    top = tl.load(lse + head * L + i, mask=i < L, other=float("inf"))
    level = tl.load(delta + head * L + i, mask=i < L, other=0.0)
    left = tl.zeros([ROWS], tl.float32)  # the rows' sums of dS
    q_dots, do_dots, top_dots, level_dots, sums, lefts = (), (), (), (), (), ()
    for t in tl.static_range(TANGENTS):
        at = ((first + t) * queries + head) * L
        q_dots = q_dots + (_rows(q_dot + at * D, i, L, D, WIDE_D),)
        if MOVING:
            do_dots = do_dots + (_rows(do_dot + at * E, i, L, E, WIDE_E),)
        top_dots = top_dots + (tl.load(lse_dot + at + i, mask=i < L, other=0.0),)
        level_dots = level_dots + (tl.load(delta_dot + at + i, mask=i < L, other=0.0),)
        sums = sums + (tl.zeros([ROWS, WIDE_D], tl.float32),)
        lefts = lefts + (tl.zeros([ROWS], tl.float32),)
    begin, end = _keys(i0, M, ROWS, COLUMNS, CAUSAL, WINDOW)
    for j0 in range(begin, end, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        kj = _rows(k + group * M * D, j, M, D, WIDE_D)
        vj = tl.trans(_rows(v + group * M * E, j, M, E, WIDE_E))
        S = _dot(qi, tl.trans(kj), PRECISION) * scale
        S = _hide(S, i, j, L, M, mask, mask_row, mask_column, CAUSAL, WINDOW, MASK)
        P = tl.exp(S - top[:, None])
        dP = _dot(doi, vj, PRECISION) - level[:, None]
        dS = (P * dP).to(kj.dtype)
        left += tl.sum(dS.to(tl.float32), 1)
        new_sums, new_lefts = (), ()
        for t in tl.static_range(TANGENTS):
            at = ((first + t) * keys + group) * M
            k_dot_j = _rows(k_dot + at * D, j, M, D, WIDE_D)
            v_dot_j = tl.trans(_rows(v_dot + at * E, j, M, E, WIDE_E))
            S_dot = (
                _dot(q_dots[t], tl.trans(kj), PRECISION) + _dot(qi, tl.trans(k_dot_j), PRECISION)
            ) * scale
            dP_dot = _dot(doi, v_dot_j, PRECISION) - level_dots[t][:, None]
            if MOVING:
                dP_dot += _dot(do_dots[t], vj, PRECISION)
            dS_dot = (P * ((S_dot - top_dots[t][:, None]) * dP + dP_dot)).to(kj.dtype)
            new_lefts = new_lefts + (lefts[t] + tl.sum(dS_dot.to(tl.float32), 1),)
            new_sums = new_sums + (sums[t] + _dot(dS_dot, kj, PRECISION) + _dot(dS, k_dot_j, PRECISION),)
        sums, lefts = new_sums, new_lefts
    columns = tl.arange(0, WIDE_D)
    centre = tl.load(mean + group * D + columns, mask=columns < D, other=0.0)
    for t in tl.static_range(TANGENTS):
        centre_dot = tl.load(
            mean_dot + ((first + t) * keys + group) * D + columns, mask=columns < D, other=0.0
        )
        rest = lefts[t][:, None] * centre[None, :] + left[:, None] * centre_dot[None, :]
        at = ((first + t) * queries + head) * L
        _put(dq_dot + at * D, i, L, (sums[t] - rest) * scale, D, WIDE_D)


@triton.jit
def key_tangent(
    q, k, v, lse, do, delta, lse_dot, delta_dot, q_dot, k_dot, v_dot, do_dot, dk_dot, dv_dot,
    mask, mask_sample, mask_head, mask_row, mask_column,
    samples, heads, shared, L, M, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, TANGENTS: tl.constexpr,
    MOVING: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """T3, over all query heads of a group. KEYS and VALUES say which of `dk̇` and `dv̇` this launch makes."""
    j0 = tl.program_id(0) * COLUMNS
    group, first = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) * TANGENTS
    queries, keys = samples * heads, samples * heads // shared
    j = j0 + tl.arange(0, COLUMNS)
    kj = _rows(k + group * M * D, j, M, D, WIDE_D)
    vj = _rows(v + group * M * E, j, M, E, WIDE_E)
    k_dots, v_dots, k_sums, v_sums = (), (), (), ()
    for t in tl.static_range(TANGENTS):
        at = ((first + t) * keys + group) * M
        k_dots = k_dots + (_rows(k_dot + at * D, j, M, D, WIDE_D),)
        v_dots = v_dots + (_rows(v_dot + at * E, j, M, E, WIDE_E),)
        k_sums = k_sums + (tl.zeros([COLUMNS, WIDE_D], tl.float32),)
        v_sums = v_sums + (tl.zeros([COLUMNS, WIDE_E], tl.float32),)
    begin, end = 0, L
    if WINDOW > 0:
        begin = tl.maximum(j0 - WINDOW + 1, 0)
        end = tl.minimum(L, j0 + COLUMNS + WINDOW - 1)
    if CAUSAL:
        begin = j0
    begin = begin // ROWS * ROWS
    for r in range(shared):
        head = group * shared + r
        seen_by = mask + head // heads * mask_sample + head % heads * mask_head
        for i0 in range(begin, end, ROWS):
            i = i0 + tl.arange(0, ROWS)
            qi = _rows(q + head * L * D, i, L, D, WIDE_D)
            doi = _rows(do + head * L * E, i, L, E, WIDE_E)
            top = tl.load(lse + head * L + i, mask=i < L, other=float("inf"))
            level = tl.load(delta + head * L + i, mask=i < L, other=0.0)
            S = _dot(qi, tl.trans(kj), PRECISION) * scale
            S = _hide(S, i, j, L, M, seen_by, mask_row, mask_column, CAUSAL, WINDOW, MASK)
            P = tl.exp(S - top[:, None])
            dP = _dot(doi, tl.trans(vj), PRECISION) - level[:, None]
            dS = (P * dP).to(kj.dtype)
            new_k, new_v = (), ()
            for t in tl.static_range(TANGENTS):
                at = ((first + t) * queries + head) * L
                q_dot_i = _rows(q_dot + at * D, i, L, D, WIDE_D)
                top_dot = tl.load(lse_dot + at + i, mask=i < L, other=0.0)
                level_dot = tl.load(delta_dot + at + i, mask=i < L, other=0.0)
                S_dot = _dot(q_dot_i, tl.trans(kj), PRECISION) + _dot(qi, tl.trans(k_dots[t]), PRECISION)
                P_dot = P * (S_dot * scale - top_dot[:, None])
                dP_dot = _dot(doi, tl.trans(v_dots[t]), PRECISION) - level_dot[:, None]
                value = v_sums[t]
                if VALUES:
                    value += _dot(tl.trans(P_dot.to(vj.dtype)), doi, PRECISION)
                if MOVING:
                    do_dot_i = _rows(do_dot + at * E, i, L, E, WIDE_E)
                    if KEYS:
                        dP_dot += _dot(do_dot_i, tl.trans(vj), PRECISION)
                    if VALUES:
                        value += _dot(tl.trans(P.to(vj.dtype)), do_dot_i, PRECISION)
                new_v = new_v + (value,)
                key = k_sums[t]
                if KEYS:
                    dS_dot = (P_dot * dP + P * dP_dot).to(kj.dtype)
                    key += _dot(tl.trans(dS_dot), qi, PRECISION) + _dot(tl.trans(dS), q_dot_i, PRECISION)
                new_k = new_k + (key,)
            k_sums, v_sums = new_k, new_v
    for t in tl.static_range(TANGENTS):
        at = ((first + t) * keys + group) * M
        if KEYS:
            _put(dk_dot + at * D, j, M, k_sums[t] * scale, D, WIDE_D)
        if VALUES:
            _put(dv_dot + at * E, j, M, v_sums[t], E, WIDE_E)
