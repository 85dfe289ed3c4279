"""Unmodified models: inside a context, what they ask of torch's attention is done by ours.

Torch's fused attention has no second derivative, and the plain one that has them forms several matrices of L × M a
head. Up to `PLAIN` scores a head that is quicker, and stays; beyond, `attention` takes its place, which gives the same
numbers. What it cannot serve exactly, and code that is being compiled (`torch.compile` drops the `jvp` of an autograd
function without a word, pytorch #192985), is left to torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlens.kernels.functions import attention, needs_derivative

# L × M. On two cores a Hessian product through 512 × 512 scores takes the same time either way
# (benchmarks/attention.md).
PLAIN = 512 * 512

_NAME = "scaled_dot_product_attention"
_TORCHS = F.scaled_dot_product_attention
_found: tuple[int, list[dict[str, Any]]] = (0, [])


@contextmanager
def inside_models() -> Iterator[None]:
    """Inside, `scaled_dot_product_attention` of long sequences is `attention`, wherever its name was imported to."""
    places = [(names, names[_NAME]) for names in _namespaces()]
    try:
        for names, _ in places:
            names[_NAME] = _attend
        yield
    finally:
        for names, before in places:
            names[_NAME] = before


def _namespaces() -> list[dict[str, Any]]:
    """The modules that hold torch's function under its name; looked for again when modules have been loaded."""
    global _found
    if _found[0] != len(sys.modules):
        spaces = [vars(m) for m in list(sys.modules.values()) if hasattr(m, "__dict__")]
        _found = len(sys.modules), [s for s in spaces if s.get(_NAME) in (_TORCHS, _attend)]
    return _found[1]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.shape[-2] * key.shape[-2] > PLAIN and not torch.compiler.is_compiling():
        reason = _cannot_serve(attn_mask, dropout_p)
        if reason is None:
            return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        warnings.warn(
            f"expected attention without dropout and with a constant mask for second derivatives in memory linear "
            f"in the length, got {reason}; torch's plain attention is used, in memory that grows with "
            f"{query.shape[-2]:,} x {key.shape[-2]:,}",
            stacklevel=2,
        )
    return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _cannot_serve(mask: Tensor | None, dropout: float) -> str | None:
    if dropout > 0:
        return f"dropout of {dropout:g}"
    if mask is not None and needs_derivative(mask):
        return "a mask that is differentiated"
    return None
