"""The four maps as functions of plain tensors, not differentiable; each an operator that PyTorch can trace.

A Hessian product through attention, written out:

    o, lse = forward(q, k, v)
    o_dot, lse_dot = jvp(q, k, v, o, lse, q_dot, k_dot, v_dot)
    dq, dk, dv = backward(q, k, v, o, lse, do)
    dq_dot, dk_dot, dv_dot = backward_tangent(
        q, k, v, o, lse, do, o_dot, lse_dot, q_dot, k_dot, v_dot, do_dot
    )

The second-order map is the Hessian of `⟨do, attention(q, k, v)⟩` and symmetric: `backward_tangent` is the tangent of
`backward` and its transpose, which a double backward asks for, alike.

Shapes: `q [B, H, L, d]`, `k [B, G, M, d]`, `v [B, G, M, e]`, H a multiple of G; `lse [B, H, L]` in the precision of
sums. Tangents have the shape of their primals, or K of them a further first dimension: several share the primal work.
`mask` is boolean (true where seen) or added to the scores, `[1 or B, 1 or H, 1 or L, 1 or M]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvlens.kernels import chunked, fused
from curvlens.kernels.pattern import Pattern


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """`o [B, H, L, e]` and `lse [B, H, L]`, `+∞` in rows that see no key (there `o = 0`). 2 products of L × M × d."""
    return _forward(q, k, v, mask, *_plain(pattern))


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
    """The tangents of `o` and `lse`. 1 product, and 4 a tangent."""
    if q_dot.dim() == q.dim():
        o_dot, lse_dot = jvp(q, k, v, o, lse, q_dot[None], k_dot[None], v_dot[None], mask, pattern)
        return o_dot[0], lse_dot[0]
    return _jvp(q, k, v, o, lse, q_dot, k_dot, v_dot, mask, *_plain(pattern))


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, mask: Tensor | None, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv` from the gradient `do` of `o`. 5 products."""
    return _backward(q, k, v, o, lse, do, mask, *_plain(pattern))


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
    """The tangents of `dq, dk, dv`; `do_dot = None` stands for zero. 2 products, and 10 a tangent."""
    if q_dot.dim() == q.dim():
        tangents = (o_dot, lse_dot, q_dot, k_dot, v_dot, do_dot)
        stacks = [None if x is None else x[None] for x in tangents]
        found = backward_tangent(q, k, v, o, lse, do, *stacks, mask, pattern)  # type: ignore
        return found[0][0], found[1][0], found[2][0]
    return _backward_tangent(
        q, k, v, o, lse, do, o_dot, lse_dot, q_dot, k_dot, v_dot, do_dot, mask, *_plain(pattern)
    )


# -- as operators: their graph is one node, so that tracers and `torch.func.linearize` see them whole


def _primals(q: Tensor) -> Any:
    """Where `forward` and `backward` are computed: by kernels for a GPU, or tile by tile in plain PyTorch."""
    return fused if fused.serves(q) else chunked


def _tangents(q: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> Any:
    """Where `jvp` and `backward_tangent` are computed."""
    return fused if fused.serves_tangents(q, v, mask, pattern) else chunked


def _plain(pattern: Pattern) -> tuple[float, bool, int]:
    return pattern.scale, pattern.causal, 0 if pattern.window is None else pattern.window


def _pattern(scale: float, causal: bool, window: int) -> Pattern:
    return Pattern(scale, causal, window or None)


def _lse_like(q: Tensor, *count: int) -> Tensor:
    return q.new_empty(*count, *q.shape[:-1], dtype=chunked.working(q.dtype))


@torch.library.custom_op("curvlens::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        return _primals(q).forward(q, k, v, mask, _pattern(scale, causal, window))


@_forward.register_fake
def _(q, k, v, mask, scale, causal, window):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:-1], v.shape[-1]), _lse_like(q)


@torch.library.custom_op("curvlens::attention_jvp", mutates_args=())
def _jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor,
    k_dot: Tensor,
    v_dot: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    pattern = _pattern(scale, causal, window)
    with torch.autocast(q.device.type, enabled=False):
        return _tangents(q, v, mask, pattern).jvp(q, k, v, o, lse, q_dot, k_dot, v_dot, mask, pattern)


@_jvp.register_fake
def _(q, k, v, o, lse, q_dot, k_dot, v_dot, mask, scale, causal, window):  # type: ignore[no-untyped-def]
    return q.new_empty(len(q_dot), *o.shape), _lse_like(q, len(q_dot))


@torch.library.custom_op("curvlens::attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        return _primals(q).backward(q, k, v, o, lse, do, mask, _pattern(scale, causal, window))


@_backward.register_fake
def _(q, k, v, o, lse, do, mask, scale, causal, window):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("curvlens::attention_backward_tangent", mutates_args=())
def _backward_tangent(
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
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = _pattern(scale, causal, window)
    with torch.autocast(q.device.type, enabled=False):
        return _tangents(q, v, mask, pattern).backward_tangent(
            q, k, v, o, lse, do, o_dot, lse_dot, q_dot, k_dot, v_dot, do_dot, mask, pattern
        )


@_backward_tangent.register_fake
def _(q, k, v, o, lse, do, o_dot, lse_dot, q_dot, k_dot, v_dot, *rest):  # type: ignore[no-untyped-def]
    count = len(q_dot)
    return tuple(x.new_empty(count, *x.shape) for x in (q, k, v))
