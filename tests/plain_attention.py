"""Attention written out, its derivatives by autodiff, and random cases for kernels to be compared on."""

import math

import torch

from curvlens.kernels import backward, backward_tangent, forward, jvp

# B, H, G, L, M, d, e: odd lengths, one token, grouped heads, unequal lengths and sizes
LAYOUTS = [(2, 3, 3, 17, 17, 4, 4), (2, 4, 2, 9, 21, 5, 3), (1, 4, 1, 33, 7, 4, 6), (3, 2, 2, 1, 1, 2, 2)]
PATTERNS = [(False, None), (True, None), (False, 3), (True, 3), (True, 1)]
MASKS = ["none", "keys", "full", "bias", "heads"]


def draw(layout, kind, seed=0, dtype=torch.float64, size=1.0):
    """Primals and tangents of q, k, v and do, and a mask with some rows that see nothing."""
    B, H, G, L, M, d, e = layout
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, H, L, d), (B, G, M, d), (B, G, M, e), (B, H, L, e)]
    at = [size * torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    tangents = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    masks = {
        "none": None,
        "keys": torch.rand(B, 1, 1, M, generator=g) > 0.3,
        "full": torch.rand(B, 1, L, M, generator=g) > 0.5,
        "bias": torch.randn(1, H, L, M, generator=g, dtype=torch.float64),
        "heads": torch.rand(1, H, L, M, generator=g) > 0.5,
    }
    mask = masks[kind]
    if kind == "full":
        mask[0, 0, L // 2] = False  # a row that sees no key
        mask[:, :, :, : M // 2] = False  # and tiles that nobody sees
    return [x.to(dtype) for x in at], [x.to(dtype) for x in tangents], mask


def plain(q, k, v, mask, pattern):
    """Attention written out, zero in rows that see no key."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    S = pattern.scale * q @ k.mT
    if mask is not None and mask.dtype != torch.bool:
        S, mask = S + mask, None
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None]
    seen = torch.ones_like(distance, dtype=torch.bool) if mask is None else mask
    if pattern.causal:
        seen = seen & (distance >= 0)
    if pattern.window is not None:
        seen = seen & (distance.abs() < pattern.window)
    none = ~seen.any(-1, keepdim=True)
    return torch.softmax(S.masked_fill(~(seen | none), -math.inf), -1).masked_fill(none, 0.0) @ v


def oracle(at, tangents, mask, pattern):
    """`o, ȯ`, the gradient and its tangent, by autodiff."""

    def gradient(q, k, v, do):
        return torch.func.vjp(lambda *a: plain(*a, mask, pattern), q, k, v)[1](do)

    o, o_dot = torch.func.jvp(lambda *a: plain(*a, mask, pattern), tuple(at[:3]), tuple(tangents[:3]))
    first, second = torch.func.jvp(gradient, tuple(at), tuple(tangents))
    return [o, o_dot, *first, *second]


def four_maps(at, tangents, mask, pattern):
    (*qkv, do), (*dots, do_dot) = at, tangents
    o, lse = forward(*qkv, mask, pattern)
    o_dot, lse_dot = jvp(*qkv, o, lse, *dots, mask, pattern)
    first = backward(*qkv, o, lse, do, mask, pattern)
    second = backward_tangent(*qkv, o, lse, do, o_dot, lse_dot, *dots, do_dot, mask, pattern)
    return [o, o_dot, *first, *second]


def error(found, expected):
    """The largest relative error in norm; NaN counts as infinite."""
    errors = []
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        errors.append(
            ((x - y).norm() / y.norm().clamp(min=1e-30)).item() if y.norm() > 0 else x.norm().item()
        )
    return max(math.inf if math.isnan(e) else e for e in errors)
