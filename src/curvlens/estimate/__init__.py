"""What can be learnt of a large operator from its products, each number with its error."""

from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.norms import block_norms, block_traces, frobenius
from curvlens.estimate.result import BlockMap, Estimate
from curvlens.estimate.trace import trace

__all__ = [
    "BlockMap",
    "Eigenpairs",
    "Estimate",
    "block_norms",
    "block_traces",
    "eigsh",
    "frobenius",
    "trace",
]
