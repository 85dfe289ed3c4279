"""Entries of the Hessian at the authors' smallest size: what A-1 and A-4 measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.study import Config, mean95
from curvlens.studies.top_layer import of_network

LOWEST, HIGHEST, BINS = -12.0, 0.0, 72  # of a histogram of log10 of the absolute entries


@dataclass(frozen=True, kw_only=True)
class Entries(Config):
    width: int = 16
    sequences: int = 64
    repeats: int = 20


def diagonal_block(config: Entries, seed: int, attention: str, block: str) -> Tensor:
    """One diagonal block of the Hessian of the whole network, dense and exact."""
    net = network(config.width, seed, config.device, attention=attention)
    layer = of_network(net, *addition(config.sequences, seed, config.device))
    return layer.operator("total").block(block).dense()


def described(matrix: Tensor) -> dict[str, Any]:
    """Median and largest absolute entry, Frobenius norm, and counts on a logarithmic scale."""
    sizes = matrix.abs().flatten()
    counts = torch.histc(sizes[sizes > 0].log10(), BINS, LOWEST, HIGHEST)
    return {
        "median": float(sizes.median()),
        "largest": float(sizes.max()),
        "norm": float(matrix.norm()),
        "zero": int((sizes == 0).sum()),
        "counts": [int(count) for count in counts],
        "smallest eigenvalue": float(torch.linalg.eigvalsh(matrix)[0]),
    }


def summary(measured: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mean over repeats of each number of a block, with its 95 % error; counts added up."""
    runs = [unit[name] for unit in measured.values()]
    made: dict[str, Any] = {
        key: mean95([run[key] for run in runs])
        for key in ("median", "largest", "norm", "zero", "smallest eigenvalue")
    }
    made["counts"] = [sum(counts) for counts in zip(*(run["counts"] for run in runs), strict=True)]
    return made
