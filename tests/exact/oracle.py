"""Automatic differentiation of a layer's own forward pass, block by block in the order of `layer.blocks`."""

import torch

from curvlens.exact.result import Tokens


def autodiff(layer, X, loss_of):
    """`(outer, functional)`, dense, from the forward pass; `loss_of(F)`: a number from the outputs of all tokens."""
    blocks = layer.blocks
    weights = dict(layer.weights)
    weights |= {f"{kind}.bias": b for kind, b in layer.biases.items()}
    theta = torch.cat([weights[name].flatten() for name in blocks.names])

    def outputs(theta):
        F = layer.forward(blocks.split(theta), X)
        return Tokens.of(F).stacked

    total = torch.func.jacfwd(torch.func.grad(lambda theta: loss_of(outputs(theta))))(theta)
    F = outputs(theta)
    J = torch.func.jacrev(lambda theta: outputs(theta).flatten())(theta)
    B = torch.func.jacfwd(torch.func.grad(lambda f: loss_of(f.view_as(F))))(F.flatten())
    outer = J.T @ B @ J
    return outer, total - outer


def mse(Y, lengths):
    def loss(F):
        parts = zip(F.split(lengths), Y.split(lengths), strict=True)
        return sum(((f - y) ** 2).mean() for f, y in parts) / len(lengths)

    return loss


def relative(x, y, scale=None):
    """The largest error relative to the largest entry (of `scale`, or `y`)."""
    size = float((y if scale is None else scale).abs().max())
    return float((x - y).abs().max()) / max(size, 1e-300)
