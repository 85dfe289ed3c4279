"""The loss's curvature at the output of an attention layer, where it is local to a token: `B_i = ∂²L/∂F_i²`.

What follows the top attention of a model acts token by token (output projection, skip, norms, MLP, head), so that
`∂²L/∂F_i ∂F_j` is zero between tokens. Then one product with the unit vector `e_c` at every token gives column `c` of
all `B_i`. Whether it is so is not assumed of the architecture but asked of the loss: with numbers `s_i`, another for
each token, the second derivative must map `s_i z_i` to `s_i` times the image of `z_i`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvlens import guards
from curvlens.batches import Batch
from curvlens.engine.quantity import replaced_output, share
from curvlens.exact.head_capture import Unsupported, batched
from curvlens.families import AttentionSite
from curvlens.landscape import Landscape
from curvlens.operator import free_memory

ROUNDING = 1e4  # of the sums behind one product, in units of the last place


def token_curvature(land: Landscape, piece: Batch, site: AttentionSite) -> Tensor:
    """`B` `[batch, tokens, o, o]` in what one piece adds to the loss; `Unsupported` where tokens meet above the layer.

    Cost: two products with the second derivative of what follows the layer, and then one a column of `B`.
    """
    module = land.model.get_submodule(site.module)
    with guards.twice_differentiable(land.model, land.device):
        try:
            with replaced_output(land, site.output) as cut:
                value = share(land, land.parameters(), piece)
            F = cut().replacement
        except (TypeError, ValueError) as error:  # a module that runs twice, or has no one output
            raise Unsupported(str(error)) from error
        (g,) = torch.autograd.grad(value, F, create_graph=True, materialize_grads=True, allow_unused=True)

        def image(z: Tensor) -> Tensor:
            if not g.requires_grad:  # the loss is linear in the output
                return torch.zeros_like(F)
            (moved,) = torch.autograd.grad(
                g, F, z, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            return moved

        _require_local(image, F)
        width = F.shape[-1]
        need, free = F.numel() * width * F.element_size(), free_memory(land.device)
        if need > free // 2:
            raise Unsupported(
                f"the loss's curvature at {F.numel() // width:,} tokens takes {need / 2**30:,.1f} GiB, and "
                f"{free / 2**30:,.1f} GiB are free; take fewer tokens, or products of cl.gauss_newton(land, at=...)"
            )
        unit = torch.eye(width, dtype=F.dtype, device=F.device)
        return torch.stack([batched(image(e.expand_as(F)), module) for e in unit], dim=-1)


def _require_local(image: Callable[[Tensor], Tensor], F: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    # normal numbers: signs may agree by chance on all tokens of a short sequence
    z, s = (torch.randn(shape, generator=generator).to(F) for shape in (F.shape, (*F.shape[:-1], 1)))
    apart, together = image(s * z), s * image(z)
    if (apart - together).norm() > ROUNDING * torch.finfo(F.dtype).eps * together.norm():
        raise Unsupported(
            "the loss's curvature at its output is not local to a token, as it is at the top attention; "
            "cl.gauss_newton(land, at=...) has its products"
        )
