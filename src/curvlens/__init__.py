"""curvlens: the curvature of a Transformer, exact and block by block."""

from curvlens import losses
from curvlens.blocks import Blocks
from curvlens.curvature import fisher, functional, gauss_newton, hessian
from curvlens.landscape import Landscape
from curvlens.operator import Operator

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "Landscape",
    "Operator",
    "fisher",
    "functional",
    "gauss_newton",
    "hessian",
    "losses",
]
