"""What can be learnt of a large operator from its products, each number with its error."""

from curvlens.estimate.density import Density, Support, block_densities, density
from curvlens.estimate.diagonal import diagonal
from curvlens.estimate.effective import condition, effective_dimension, effective_rank, negative_fraction
from curvlens.estimate.heterogeneity import heterogeneity
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.norms import block_norms, block_traces, frobenius
from curvlens.estimate.probes import probes
from curvlens.estimate.result import BlockMap, Estimate
from curvlens.estimate.sharpness import Sharpness, sharpness
from curvlens.estimate.trace import trace

__all__ = [
    "BlockMap",
    "Density",
    "Eigenpairs",
    "Estimate",
    "Sharpness",
    "Support",
    "block_densities",
    "block_norms",
    "block_traces",
    "condition",
    "density",
    "diagonal",
    "effective_dimension",
    "effective_rank",
    "eigsh",
    "frobenius",
    "heterogeneity",
    "negative_fraction",
    "probes",
    "sharpness",
    "trace",
]
