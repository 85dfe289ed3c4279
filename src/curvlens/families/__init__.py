"""Families: what a model is made of."""

from torch import nn

from curvlens.blocks import Block, Blocks, Slice


def blocks(model: nn.Module) -> Blocks:
    """Blocks by parameter name."""
    return Blocks(
        Block(name, tuple(p.shape), Slice.of(name, p.shape))
        for name, p in model.named_parameters()
        if p.requires_grad
    )
