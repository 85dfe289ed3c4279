"""The four maps on a GPU: torch's fused kernels for the primals where they fit, Triton's for the tangents.

The signatures are those of `chunked`, which serves what is left: float64, and primals under masks or windows. Before a
kernel is used in a new form (precision, sizes, pattern) its result on a small random case is compared with `chunked`;
one that disagrees or does not compile is left alone, with a warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from curvlens.kernels import chunked
from curvlens.kernels.pattern import Pattern

aten = torch.ops.aten
SIZES = (16, 256)  # of a head, that the kernels take
# of factors in float32: three products of TF32, as good as float32; "ieee" is exact to the last bit, and slow
PRECISION = "tf32x3"
FITTING = 64  # the largest head of which more than one result at a time fits into the registers
# rows, columns, warps, stages that the tuner tries; which of them spill registers says benchmarks/attention.md
TILES = [
    (64, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 8, 2),
    (128, 32, 8, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (32, 32, 8, 1),
    (16, 32, 4, 1),
]
AGREEMENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def serves(q: Tensor) -> bool:
    """Whether primals of such tensors are taken."""
    fit = SIZES[0] <= q.shape[-1] <= SIZES[1]
    return q.device.type == "cuda" and q.dtype in AGREEMENT and fit and find_spec("triton") is not None


# -- primals: the library's kernels


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """`o, lse`."""
    if not _library_fits(q, k, v, mask, pattern):
        return chunked.forward(q, k, v, mask, pattern)
    return _library_forward(q, *_each_its_keys(q, k, v), pattern)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, mask: Tensor | None, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`."""
    if not _library_fits(q, k, v, mask, pattern):
        return chunked.backward(q, k, v, o, lse, do, mask, pattern)
    dq, dk, dv = _library_backward(q, *_each_its_keys(q, k, v), o, lse, do.contiguous(), pattern)
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _library_fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> bool:
    """Torch's causal kernels count from the last query and key, so that they must be as many."""
    plain = mask is None and pattern.window is None and (not pattern.causal or q.shape[2] == k.shape[2])
    sizes = (
        q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and min(q.shape[2], k.shape[2], q.shape[0]) > 0
    )
    return plain and sizes and _agrees("library", q.device, q.dtype, q.shape[-1], q.shape[-1], pattern.causal)


def _each_its_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for every query head."""
    shared = q.shape[1] // k.shape[1]
    return (k, v) if shared == 1 else (k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))


def _library_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    if q.dtype == torch.float32:
        found = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, pattern.causal, scale=pattern.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, pattern.causal, False, scale=pattern.scale
        )
    return found[0].contiguous(), found[1][..., : q.shape[2]].float().contiguous()


def _library_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(
        (), dtype=torch.int64, device=q.device
    )  # the random state of a dropout that is not there
    if q.dtype == torch.float32:
        rows = -(-q.shape[2] // 32) * 32  # of `lse`, as this kernel wants it
        padded = torch.nn.functional.pad(lse, (0, rows - q.shape[2]), value=float("inf"))
        needed = [True, True, True, False]
        found = aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, padded, none, none, 0.0, needed, pattern.causal, scale=pattern.scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, pattern.causal, none, none,
            scale=pattern.scale,
        )  # fmt: skip
    return tuple(x.contiguous() for x in found[:3])


# -- tangents: the kernels


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
    q, k, v, o, lse, q_dot, k_dot, v_dot = (x.contiguous() for x in (q, k, v, o, lse, q_dot, k_dot, v_dot))
    count = len(q_dot)
    o_dot, lse_dot = o.new_empty(count, *o.shape), lse.new_empty(count, *lse.shape)
    mean, mean_dot = _mean(k), _mean(k_dot)
    for part, together in _passes(count, "tangent", q):
        _launch(
            "tangent", (q, k, v, mask, pattern), together, len(q_dot[part]),
            [q, k, v, o, lse, q_dot[part], k_dot[part], v_dot[part], mean, mean_dot[part], o_dot[part], lse_dot[part]],
        )  # fmt: skip
    return o_dot, lse_dot


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
    q, k, v, lse, do, lse_dot, q_dot, k_dot, v_dot = (
        x.contiguous() for x in (q, k, v, lse, do, lse_dot, q_dot, k_dot, v_dot)
    )
    delta, delta_dot = _row_sums(do, o), _row_sums(do, o_dot)
    if do_dot is not None:
        do_dot = do_dot.contiguous()
        delta_dot += _row_sums(do_dot, o)
    mean, mean_dot = _mean(k), _mean(k_dot)
    count = len(q_dot)
    dq_dot, dk_dot, dv_dot = (x.new_empty(count, *x.shape) for x in (q, k, v))
    moving = {"MOVING": do_dot is not None}
    tangents = (lse_dot, delta_dot, q_dot, k_dot, v_dot, do if do_dot is None else do_dot)

    def given(part: slice) -> list[Tensor]:
        return [q, k, v, lse, do, delta, *(x if x is do else x[part] for x in tangents)]

    about = q, k, v, mask, pattern
    for part, together in _passes(count, "query_tangent", q):
        tensors = [*given(part), mean, mean_dot[part], dq_dot[part]]
        _launch("query_tangent", about, together, len(q_dot[part]), tensors, **moving)
    for part, together in _passes(count, "key_tangent", q):
        tensors = [*given(part), dk_dot[part], dv_dot[part]]
        for made in _made_at_once(q):
            _launch("key_tangent", about, together, len(q_dot[part]), tensors, **moving, **made)
    return dq_dot, dk_dot, dv_dot


def _mean(k: Tensor) -> Tensor:
    return k.mean(-2, dtype=torch.float32) if k.shape[-2] else k.new_zeros(*k.shape[:-2], k.shape[-1]).float()


def _row_sums(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(-1)


def _passes(count: int, kernel: str, q: Tensor) -> Iterator[tuple[slice, int]]:
    """Tangents that go through a kernel two at a time, where registers allow, and those that are left."""
    two = kernel != "key_tangent" and q.dtype != torch.float32 and q.shape[-1] <= FITTING
    even = count // 2 * 2 if two else 0
    if even:
        yield slice(0, even), 2
    if even < count:
        yield slice(even, count), 1


def _made_at_once(q: Tensor) -> list[dict[str, bool]]:
    """`dk̇` and `dv̇` by one launch, or where registers would spill by two."""
    if q.shape[-1] <= FITTING:
        return [{"KEYS": True, "VALUES": True}]
    return [{"KEYS": True, "VALUES": False}, {"KEYS": False, "VALUES": True}]


# -- launching


def _launch(
    kernel: str, about: tuple[Any, ...], together: int, count: int, tensors: list[Tensor], **form: bool
) -> None:
    q, k, v, mask, pattern = about
    samples, heads, L, M = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if 0 in (count, samples, heads, L, M):
        for made in tensors[-2:]:  # empty, or of no key
            made.zero_()
        return
    keys = kernel == "key_tangent"
    resident, rows, heads_of_grid = ("COLUMNS", M, k.shape[1]) if keys else ("ROWS", L, heads)

    def grid(options: dict[str, Any]) -> tuple[int, int, int]:
        return -(-rows // options[resident]), samples * heads_of_grid, count // together

    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    given = q if mask is None else mask.view(torch.uint8) if kind == 1 else mask
    strides = (0,) * 4 if mask is None else _broadcast_strides(mask)
    _kernel(kernel)[grid](
        *tensors, given, *strides, samples, heads, heads // k.shape[1], L, M, pattern.scale,
        D=q.shape[-1], E=v.shape[-1], WIDE_D=_wide(q.shape[-1]), WIDE_E=_wide(v.shape[-1]),
        CAUSAL=pattern.causal, WINDOW=pattern.window or 0, MASK=kind, TANGENTS=together, PRECISION=PRECISION,
        **form, **_tile(),
    )  # fmt: skip


def _broadcast_strides(mask: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True))


def _wide(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@cache
def _kernel(name: str) -> Any:
    """The kernel, tuned when it is first used with each form; as it is under Triton's interpreter."""
    import triton

    from curvlens.kernels import fused_kernels

    kernel = getattr(fused_kernels, name)
    if _interpreted():
        return kernel
    configs = [
        triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in TILES
    ]
    key = ["D", "E", "CAUSAL", "WINDOW", "MASK", "TANGENTS", *(["MOVING"] if name != "tangent" else [])]
    return triton.autotune(configs, key=[*key, *(["KEYS", "VALUES"] if name == "key_tangent" else [])])(
        kernel
    )


def _tile() -> dict[str, int]:
    """Under the interpreter small tiles, so that small cases have several; elsewhere the tuner's."""
    return {"ROWS": 16, "COLUMNS": 16} if _interpreted() else {}


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


# -- trust


def serves_tangents(q: Tensor, v: Tensor, mask: Tensor | None, pattern: Pattern) -> bool:
    """Whether `jvp` and `backward_tangent` take these, and are right in this form."""
    if not serves(q):
        return False
    kind = "none" if mask is None else str(mask.dtype)
    form = (q.shape[-1], v.shape[-1], pattern.causal, pattern.window is not None, kind)
    return _agrees("Triton", q.device, q.dtype, *form)


@cache
def _agrees(
    whose: str,
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    e: int,
    causal: bool,
    window: bool = False,
    mask: str = "none",
) -> bool:
    """Whether the kernels give what `chunked` gives, on 2 samples of 37 tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    length = 37
    pattern = Pattern(d**-0.5, causal, 9 if window else None)
    q, k, v, do = (draw(2, 2, length, size) for size in (d, d, e, e))
    dots = [draw(3, 2, 2, length, size) for size in (d, d, e, e)]
    given = None
    if mask != "none":
        seen = torch.rand(2, 1, length, length, generator=generator).to(device) > 0.2
        given = seen if mask == "torch.bool" else draw(2, 1, length, length)
    try:
        if whose == "library":
            found = _of_library(q, k, v, do, pattern)
            exact = _of_chunked(q, k, v, do, pattern)
        else:
            o, lse = chunked.forward(q, k, v, given, pattern)
            found = _second(jvp, backward_tangent, q, k, v, o, lse, do, dots, given, pattern)
            exact = _second(chunked.jvp, chunked.backward_tangent, q, k, v, o, lse, do, dots, given, pattern)
        far = max(
            ((a.float() - b.float()).norm() / b.float().norm()).item()
            for a, b in zip(found, exact, strict=True)
        )
        reason = f"a relative error of {far:.1e}" if not far <= AGREEMENT[dtype] else ""
    except Exception as error:  # of a compiler, a driver, a library of another version
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if reason:
        warnings.warn(
            f"expected attention kernels ({whose}, {dtype}, heads of {d}) that agree with plain PyTorch on {device}, "
            f"got {reason}; plain PyTorch is used, which is slower",
            stacklevel=4,
        )
    return not reason


def _of_library(q: Tensor, k: Tensor, v: Tensor, do: Tensor, pattern: Pattern) -> list[Tensor]:
    o, lse = _library_forward(q, k, v, pattern)
    return [o, lse, *_library_backward(q, k, v, o, lse, do, pattern)]


def _of_chunked(q: Tensor, k: Tensor, v: Tensor, do: Tensor, pattern: Pattern) -> list[Tensor]:
    o, lse = chunked.forward(q, k, v, None, pattern)
    return [o, lse, *chunked.backward(q, k, v, o, lse, do, None, pattern)]


def _second(
    tangent: Any,
    second_tangent: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dots: list[Tensor],
    mask: Tensor | None,
    pattern: Pattern,
) -> list[Tensor]:
    o_dot, lse_dot = tangent(q, k, v, o, lse, *dots[:3], mask, pattern)
    return [o_dot, lse_dot, *second_tangent(q, k, v, o, lse, do, o_dot, lse_dot, *dots, mask, pattern)]
