"""curvlens: the curvature of a Transformer, exact and block by block.

Names are loaded when first used, so that `import curvlens` and the command line are there at once, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlens import exact, losses
    from curvlens.blocks import Blocks
    from curvlens.curvature import fisher, functional, gauss_newton, hessian
    from curvlens.exact.verification import verify
    from curvlens.interop import as_curvlinops, from_curvlinops  # noqa: F401
    from curvlens.landscape import Landscape
    from curvlens.operator import Operator

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "Landscape",
    "Operator",
    "exact",
    "fisher",
    "functional",
    "gauss_newton",
    "hessian",
    "losses",
    "verify",
]

# where each name lives; a name of __all__ left out is a module of its own
_HOMES = {
    "as_curvlinops": "interop",  # not in __all__, since curvlinops is optional
    "from_curvlinops": "interop",
    "Blocks": "blocks",
    "Landscape": "landscape",
    "Operator": "operator",
    "fisher": "curvature",
    "functional": "curvature",
    "gauss_newton": "curvature",
    "hessian": "curvature",
    "verify": "exact.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if name in __all__:
            return import_module(f"curvlens.{name}")
        raise AttributeError(f"module 'curvlens' has no attribute {name!r}")
    value = getattr(import_module(f"curvlens.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
