"""curvlens: the curvature of a Transformer, exact and block by block."""

from typing import Any

from curvlens import exact, losses
from curvlens.blocks import Blocks
from curvlens.curvature import fisher, functional, gauss_newton, hessian
from curvlens.estimate import (
    block_norms,
    block_traces,
    condition,
    density,
    diagonal,
    effective_dimension,
    effective_rank,
    eigsh,
    frobenius,
    heterogeneity,
    negative_fraction,
    sharpness,
    trace,
)
from curvlens.landscape import Landscape
from curvlens.operator import Operator

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "Landscape",
    "Operator",
    "block_norms",
    "block_traces",
    "condition",
    "density",
    "diagonal",
    "effective_dimension",
    "effective_rank",
    "eigsh",
    "exact",
    "fisher",
    "frobenius",
    "functional",
    "gauss_newton",
    "hessian",
    "heterogeneity",
    "losses",
    "negative_fraction",
    "sharpness",
    "trace",
]


def __getattr__(name: str) -> Any:
    """`as_curvlinops` and `from_curvlinops`, once asked for: curvlinops is optional."""
    if name in ("as_curvlinops", "from_curvlinops"):
        from curvlens import interop

        return getattr(interop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
