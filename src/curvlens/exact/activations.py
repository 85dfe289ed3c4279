"""Activations with their first two derivatives, elementwise and in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """`σ`, `σ'`, `σ''` of a preactivation."""

    name: str
    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]


def activation(name: str) -> Activation:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"expected an activation among {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def _pdf(h: Tensor) -> Tensor:
    return torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)


def _cdf(h: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-h / math.sqrt(2))  # erfc keeps the digits of the lower tail


# GELU's tanh form, ½ h (1 + tanh u) = h p with p = sigmoid(2u), u = √(2/π) (h + 0.044715 h³): the sigmoid keeps
# the digits that 1 + tanh u and 1 − tanh² u lose in the tails
_ROOT, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_parts(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`p`, `p'`, `p''`."""
    u2 = 2 * _ROOT * (h + _CUBIC * h**3)
    p, q = torch.sigmoid(u2), torch.sigmoid(-u2)
    slope, bend = 2 * _ROOT * (1 + 3 * _CUBIC * h * h), 12 * _ROOT * _CUBIC * h
    return p, p * q * slope, p * q * ((q - p) * slope * slope + bend)


def _gelu_tanh(h: Tensor) -> Tensor:
    return h * _tanh_parts(h)[0]


def _gelu_tanh_first(h: Tensor) -> Tensor:
    p, p1, _ = _tanh_parts(h)
    return p + h * p1


def _gelu_tanh_second(h: Tensor) -> Tensor:
    _, p1, p2 = _tanh_parts(h)
    return 2 * p1 + h * p2


def _silu_first(h: Tensor) -> Tensor:
    p = torch.sigmoid(h)
    return p * (1 + h * (1 - p))


def _silu_second(h: Tensor) -> Tensor:
    p = torch.sigmoid(h)
    return p * (1 - p) * (2 + h * (1 - 2 * p))


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("identity", lambda h: h, torch.ones_like, torch.zeros_like),
        Activation("relu", torch.relu, lambda h: (h > 0).to(h.dtype), torch.zeros_like),
        Activation(
            "gelu",
            lambda h: h * _cdf(h),
            lambda h: _cdf(h) + h * _pdf(h),
            lambda h: _pdf(h) * (2 - h * h),
        ),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_first, _gelu_tanh_second),
        Activation("silu", lambda h: h * torch.sigmoid(h), _silu_first, _silu_second),
    )
}
