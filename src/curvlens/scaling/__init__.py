"""Scaling: how the landscape settles as samples are added, and how curvature follows model and data size.

The room is called as a function too, `cl.scaling(family, sizes)`, which is `scaling.sizes.scaling`: the function and
the room have one name, and a module can be given a call.
"""

import sys
from types import ModuleType
from typing import Any

from curvlens.scaling import families
from curvlens.scaling.convergence import LandscapeConvergence, landscape_convergence
from curvlens.scaling.law import PowerLaw, fit
from curvlens.scaling.need import Need
from curvlens.scaling.sizes import MEASURES, Scaling, scaling

__all__ = [
    "MEASURES",
    "LandscapeConvergence",
    "Need",
    "PowerLaw",
    "Scaling",
    "families",
    "fit",
    "landscape_convergence",
    "scaling",
]


class _Callable(ModuleType):
    __doc__ = __doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Scaling:
        return scaling(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
