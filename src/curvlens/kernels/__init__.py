"""Second order through attention in memory linear in the length.

attention   a function of tensors, twice differentiable in any mode
inside_models
            a context in which models that ask for torch's attention are given this one
forward, jvp, backward, backward_tangent
            the four maps that it is made of, for those who call them one by one
hugging_face
            a module: `register()` makes it an implementation that Hugging Face models can be set to
"""

from curvlens.kernels.functions import attention
from curvlens.kernels.inside_models import inside_models
from curvlens.kernels.ops import backward, backward_tangent, forward, jvp
from curvlens.kernels.pattern import Pattern

__all__ = ["Pattern", "attention", "backward", "backward_tangent", "forward", "inside_models", "jvp"]
