"""curvlens: the curvature of a Transformer, exact and block by block.

Names are loaded when first used, so that `import curvlens` and the command line are there at once, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlens import exact, losses, studies
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
        negative_fraction,  # noqa: F401
        sharpness,
        trace,
    )
    from curvlens.exact.verification import verify
    from curvlens.interop import as_curvlinops, from_curvlinops  # noqa: F401
    from curvlens.landscape import Landscape
    from curvlens.operator import Operator
    from curvlens.report.analyze import analyze
    from curvlens.scaling.convergence import landscape_convergence
    from curvlens.scaling.sizes import scaling
    from curvlens.training.curvature_aware import CurvatureAware
    from curvlens.training.predict import predict_loss
    from curvlens.training.stability import stability
    from curvlens.training.tracker import Tracker

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "CurvatureAware",
    "Landscape",
    "Operator",
    "Tracker",
    "analyze",
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
    "landscape_convergence",
    "losses",
    "predict_loss",
    "scaling",
    "sharpness",
    "stability",
    "studies",
    "trace",
    "verify",
]

# the module of each name; the rest of __all__ are modules themselves
_HOMES = {
    "Blocks": "blocks",
    "Landscape": "landscape",
    "Operator": "operator",
    "Tracker": "training.tracker",
    "as_curvlinops": "interop",  # not in __all__: curvlinops is optional
    "from_curvlinops": "interop",
    "analyze": "report.analyze",
    "landscape_convergence": "scaling",
    "CurvatureAware": "training.curvature_aware",
    "predict_loss": "training.predict",
    "stability": "training.stability",
    "verify": "exact.verification",
    **dict.fromkeys(("fisher", "functional", "gauss_newton", "hessian"), "curvature"),
    **dict.fromkeys(
        (
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
            "negative_fraction",  # not in __all__, which keeps to thirty names
            "sharpness",
            "trace",
        ),
        "estimate",
    ),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"curvlens.{_HOMES[name]}"), name)
    elif name in __all__:
        value = import_module(f"curvlens.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
