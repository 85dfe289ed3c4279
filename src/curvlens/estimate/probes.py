"""Random probe vectors that depend on nothing but the seed, the index and the block.

Every block of every probe has its own counter-based stream (Philox), keyed by `(seed, index, block name)` and
drawn on the CPU. So the k-th probe is the same for any batching, chunking, device, dtype and number of
processes, and a probe supported on one block is that block of the full probe.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from curvlens.blocks import Block, Blocks
from curvlens.estimate import vectors
from curvlens.operator import Operator

KINDS = ("rademacher", "gaussian", "orthogonal")
GROUP = 32  # orthogonal probes are orthogonal within groups of this many


def probes(
    blocks: Blocks,
    indices: Iterable[int],
    seed: int = 0,
    kind: str = "rademacher",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The probes of the given indices over the blocks: a stack `[K, n]` with `E v v^T = I`.

    "rademacher": random signs. "gaussian": standard normal. "orthogonal": Gaussian directions, orthogonal in
    consecutive groups of `GROUP` (at most n), each of length sqrt(n); entries within a group are dependent.
    """
    if kind not in KINDS:
        raise ValueError(f"expected one of the probes {', '.join(KINDS)}, got {kind!r}")
    indices = list(indices)
    if kind == "orthogonal":
        return _orthogonal(blocks, indices, seed, dtype, device)
    stack = torch.empty(len(indices), blocks.size, dtype=dtype)
    for row, index in zip(stack, indices, strict=True):
        for block in blocks:
            row[blocks.ranges[block.name]] = _draw(block, index, seed, kind, dtype)
    return stack.to(device)


def probes_like(operator: Operator, indices: Iterable[int], seed: int, kind: str) -> Tensor:
    """Probes over an operator's domain, in its dtype, on its device."""
    return probes(operator.domain, indices, seed, kind, operator.dtype, operator.device)


def _draw(block: Block, index: int, seed: int, kind: str, dtype: torch.dtype) -> Tensor:
    key = hashlib.blake2b(f"{kind} {seed} {index} {block.name}".encode(), digest_size=16).digest()
    source = np.random.Philox(key=int.from_bytes(key, "little"))
    if kind == "gaussian":  # always drawn in float64, so that every dtype rounds the same numbers
        return torch.from_numpy(np.random.Generator(source).standard_normal(block.size)).to(dtype)
    words = source.random_raw(-(-block.size // 64))
    octets = torch.from_numpy(np.atleast_1d(words).astype("<u8").view(np.uint8)).to(torch.int32)
    return _signs(dtype).index_select(0, octets).view(-1)[: block.size]


@lru_cache
def _signs(dtype: torch.dtype) -> Tensor:
    """Row i: the eight bits of i as signs."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (2 * bits - 1).to(dtype)


def _orthogonal(
    blocks: Blocks, indices: list[int], seed: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Gram-Schmidt in the order of the index: a probe depends only on those before it in its group."""
    size = min(GROUP, blocks.size)
    wanted: dict[int, Tensor] = {}
    for group in sorted({index // size for index in indices}):
        last = max(index for index in indices if index // size == group)
        members = range(group * size, last + 1)
        basis = torch.empty(
            len(members), blocks.size, dtype=torch.float64
        )  # on the CPU: the same on all devices
        for i, index in enumerate(members):
            row = probes(blocks, [index], seed, "gaussian")
            vectors.project_out(row, basis[:i])
            basis[i] = row[0] / vectors.norm(row).item()
            wanted[index] = basis[i]
    scale = math.sqrt(blocks.size)
    return torch.stack([scale * wanted[index] for index in indices]).to(device, dtype)
