"""Attention as a differentiable function: four maps that are one another's derivatives.

    map         its tangent          its transpose
    Attn        AttnJvp              AttnBwd
    AttnJvp     –                    AttnBwd in the tangents, AttnBwdTan in the primals
    AttnBwd     AttnBwdTan           AttnBwdTan in the primals, AttnJvp in `do`
    AttnBwdTan  third order: raises

`o` and `lse` are passed on from map to map as if they were free, but are functions of `q, k, v`. Tangents of them are
given by `AttnJvp`, and used. In reverse mode, whole derivatives with respect to `q, k, v` are returned, and none for
`o` and `lse`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from curvlens.kernels import ops
from curvlens.kernels.pattern import Pattern

THIRD = (
    "expected at most second derivatives of curvlens.kernels.attention, got a request for a third; "
    "run it inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH) with torch's own scaled_dot_product_attention"
)
TWICE_FORWARD = (
    "expected a second derivative of curvlens.kernels.attention with at least one reverse pass, got forward mode "
    "over forward mode; use jvp of grad, grad of jvp, or grad of grad"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
) -> Tensor:
    """`softmax(scale · q kᵀ + mask) v`, twice differentiable in any mode, in memory linear in the length.

    As `torch.nn.functional.scaled_dot_product_attention`, whose fused kernels can be differentiated once only and
    whose plain one needs several matrices of L × M for each head. Works with `torch.func.grad`, `vjp`, `jvp`,
    `jvp(grad)`, `grad(jvp)`, `linearize`, `vmap`, with `torch.autograd.grad` twice and `torch.autograd.forward_ad`.

    query      `[…, H, L, d]`
    key, value `[…, H, M, d]`, `[…, H, M, e]`; with `enable_gqa`, of fewer heads that divide H
    attn_mask  boolean (true where a key is seen) or added to the scores; without a gradient
    is_causal  query i sees key j only if j ≤ i; with a mask, both hold
    window     query i sees key j only if |i − j| < window

    A row that sees no key gives zero, as with torch. Cost: a gradient is 7 products of L × M × d for each head, a
    Hessian product 23 more, half of each if causal.
    """
    lead = query.shape[:-2]
    if enable_gqa and query.dim() >= 3:
        key, value = (x.expand(*lead[:-1], *x.shape[-3:]) for x in (key, value))
    else:
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    _check(query, key, value, attn_mask, window)
    if torch.is_autocast_enabled(query.device.type):
        kind = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    pattern = Pattern(1 / math.sqrt(query.shape[-1]) if scale is None else scale, is_causal, window)
    mask = _four(attn_mask, lead, query.shape[-2], key.shape[-2])
    o, _ = Attn.apply(_heads(query), _heads(key), _heads(value), mask, pattern)
    return o.reshape(*lead, *o.shape[-2:])


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> None:
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or q.dim() < 2:
        raise ValueError(
            "expected query […, L, d], key […, M, d] and value […, M, e], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.dim() > 2 and (k.shape[-3] != v.shape[-3] or not k.shape[-3] or q.shape[-3] % k.shape[-3]):
        raise ValueError(
            "expected as many heads in value as in key, and a number that divides the query's, "
            f"got {q.shape[-3]}, {k.shape[-3]} and {v.shape[-3]}"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()) or not q.device == k.device == v.device:
        raise ValueError(
            "expected query, key and value in one floating-point precision on one device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if mask is not None and needs_derivative(mask):
        raise ValueError(
            "expected a mask without a gradient, got one that is differentiated; "
            "use torch's scaled_dot_product_attention inside sdpa_kernel(SDPBackend.MATH)"
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"expected a boolean or floating-point mask, got {mask.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1, got {window}")


def needs_derivative(x: Tensor) -> bool:
    """Whether a tensor is differentiated in either mode, at any level of torch.func."""
    functorch = torch._C._functorch
    while True:
        if x.requires_grad or torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            return True
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)


def _heads(x: Tensor) -> Tensor:
    """`[B, H, L, d]`."""
    if x.dim() == 4:
        return x
    heads = x.shape[-3] if x.dim() > 2 else 1
    return x.reshape(math.prod(x.shape[:-3]), heads, *x.shape[-2:])


def _four(mask: Tensor | None, lead: torch.Size, length: int, keys: int) -> Tensor | None:
    """The mask as `[1 or B, 1 or H, 1 or L, 1 or M]`."""
    if mask is None:
        return None
    whole = (*lead, length, keys)
    try:
        fits = torch.broadcast_shapes(mask.shape, whole) == whole
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"expected a mask that broadcasts to {whole}, got {tuple(mask.shape)}")
    if len(lead) <= 2:
        return mask[(None,) * (4 - mask.dim())]
    mask = mask[(None,) * (len(whole) - mask.dim())]
    if any(size > 1 for size in mask.shape[:-3]):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)


def _or_zero(tangent: Tensor | None, primal: Tensor) -> Tensor:
    return torch.zeros_like(primal) if tangent is None else tangent


class Attn(Function):
    """`q, k, v ↦ o, lse`."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> Any:
        return ops.forward(q, k, v, mask, pattern)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, mask, ctx.pattern = inputs
        ctx.save_for_backward(q, k, v, *output, mask)
        ctx.save_for_forward(q, k, v, *output, mask)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(
        ctx: Any, q_dot: Tensor | None, k_dot: Tensor | None, v_dot: Tensor | None, mask_dot: Any, _: Any
    ) -> Any:
        *primals, mask = ctx.saved_tensors
        if mask_dot is not None:
            raise ValueError("expected a mask without a tangent, got one")
        tangents = [_or_zero(t, x)[None] for t, x in zip((q_dot, k_dot, v_dot), primals, strict=False)]
        o_dot, lse_dot = AttnJvp.apply(*primals, *tangents, mask, ctx.pattern)
        return o_dot[0], lse_dot[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: Any) -> Any:
        # `lse` leaves this file only as an argument of the other maps, which return no derivative for it
        *primals, mask = ctx.saved_tensors
        if do is None:
            return (None,) * 5
        return *AttnBwd.apply(*primals, do, mask, ctx.pattern), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _over_batch(Attn, info, in_dims, arguments, tangents=())


class AttnJvp(Function):
    """`q, k, v, o, lse, q̇, k̇, v̇ ↦ ȯ, l̇`, for K tangents `[K, …]`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return ops.jvp(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.pattern = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Any:
        *tensors, mask = ctx.saved_tensors
        if any(dot is not None for dot in dots[:3]):
            raise NotImplementedError(TWICE_FORWARD)
        moved = [
            _or_zero(t, x) for t, x in zip(dots[5:8], tensors[5:], strict=True)
        ]  # linear in the tangents
        return AttnJvp.apply(*tensors[:5], *moved, mask, ctx.pattern)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: Any) -> Any:
        *tensors, mask = ctx.saved_tensors
        primals, tangents = tensors[:5], tensors[5:]
        if do is None:
            return (None,) * 10
        to_primals: Any = (None, None, None)
        if any(ctx.needs_input_grad[:3]):
            o_dot, lse_dot = AttnJvp.apply(*primals, *tangents, mask, ctx.pattern)
            parts = []
            for t in range(len(do)):
                one = [x[t : t + 1] for x in (o_dot, lse_dot, *tangents)]
                parts.append(AttnBwdTan.apply(*primals, do[t], *one, None, mask, ctx.pattern))
            to_primals = [sum(part[i][0] for part in parts) for i in range(3)]
        to_tangents: Any = (None, None, None)
        if any(ctx.needs_input_grad[5:8]):
            each = [AttnBwd.apply(*primals, one, mask, ctx.pattern) for one in do]
            to_tangents = [torch.stack(stack) for stack in zip(*each, strict=True)]
        return *to_primals, None, None, *to_tangents, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _over_batch(AttnJvp, info, in_dims, arguments, tangents=(5, 6, 7))


class AttnBwd(Function):
    """`q, k, v, o, lse, do ↦ dq, dk, dv`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return ops.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.pattern = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Any:
        *primals, do, mask = ctx.saved_tensors
        q_dot, k_dot, v_dot, o_dot, lse_dot, do_dot = dots[:6]
        if q_dot is None and k_dot is None and v_dot is None:
            return AttnBwd.apply(*primals, do_dot, mask, ctx.pattern)  # linear in `do`
        tangents = [_or_zero(t, x)[None] for t, x in zip((q_dot, k_dot, v_dot), primals, strict=False)]
        if o_dot is None or lse_dot is None:
            o_dots, lse_dots = AttnJvp.apply(*primals, *tangents, mask, ctx.pattern)
        else:
            o_dots, lse_dots = o_dot[None], lse_dot[None]
        do_dots = None if do_dot is None else do_dot[None]
        found = AttnBwdTan.apply(*primals, do, o_dots, lse_dots, *tangents, do_dots, mask, ctx.pattern)
        return tuple(x[0] for x in found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        *primals, do, mask = ctx.saved_tensors
        if all(c is None for c in cotangents):
            return (None,) * 8
        tangents = [_or_zero(c, x)[None] for c, x in zip(cotangents, primals, strict=False)]
        o_dot, lse_dot = AttnJvp.apply(*primals, *tangents, mask, ctx.pattern)
        found: Any = (None, None, None)
        if any(ctx.needs_input_grad[:3]):
            stacks = AttnBwdTan.apply(*primals, do, o_dot, lse_dot, *tangents, None, mask, ctx.pattern)
            found = [x[0] for x in stacks]
        return *found, None, None, o_dot[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _over_batch(AttnBwd, info, in_dims, arguments, tangents=())


class AttnBwdTan(Function):
    """`q, k, v, o, lse, do, ȯ, l̇, q̇, k̇, v̇, ḋo ↦ dq̇, dk̇, dv̇`, for K tangents `[K, …]`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return ops.backward_tangent(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Any:
        raise NotImplementedError(THIRD)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(THIRD)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _over_batch(AttnBwdTan, info, in_dims, arguments, tangents=(6, 7, 8, 9, 10, 11))


def _over_batch(
    function: Any, info: Any, in_dims: Any, arguments: tuple[Any, ...], tangents: tuple[int, ...]
) -> Any:
    """A mapped call as one call: over more tangents where only these are mapped, else over a larger batch."""
    size, tensors = info.batch_size, list(arguments[:-1])
    mapped = [i for i, dim in enumerate(in_dims[:-1]) if dim is not None]
    for i in mapped:
        tensors[i] = tensors[i].movedim(in_dims[i], 0)
    if all(i in tangents for i in mapped):
        for i in tangents:
            if tensors[i] is not None:
                whole = tensors[i] if i in mapped else tensors[i].expand(size, *tensors[i].shape)
                tensors[i] = whole.flatten(0, 1)
        found = function.apply(*tensors, arguments[-1])
        return tuple(x.unflatten(0, (size, -1)) for x in found), (0,) * len(found)
    at_mask = len(tensors) - 1
    samples = tensors[0].shape[1 if 0 in mapped else 0]
    for i, tensor in enumerate(tensors):
        if tensor is None or (i == at_mask and i not in mapped and tensor.shape[0] == 1):
            continue
        batch = 1 if i in tangents else 0  # where a sample's own batch is
        whole = tensor if i in mapped else tensor.expand(size, *tensor.shape)
        if i == at_mask and whole.shape[1] == 1:
            whole = whole.expand(size, samples, *whole.shape[2:])
        tensors[i] = whole.movedim(0, batch).flatten(batch, batch + 1)
    found = function.apply(*tensors, arguments[-1])
    batch = 1 if tangents else 0
    return tuple(x.unflatten(batch, (size, -1)) for x in found), (batch,) * len(found)
