"""Oracles for jets: the same layer as a plain function, differentiated by autograd, and by differences."""

import torch
from torch.autograd.functional import hessian, jacobian

from curvlens.exact.jet import Layer


def relative(got, expected):
    """The largest error, relative to the largest entry expected."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert torch.isfinite(got).all()
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


def flat(layer, X):
    """The weights and the input as one vector, in the order of the operators."""
    return torch.cat([w.flatten() for w in layer.weights.values()] + [X.flatten()])


def unflat(layer, X, vector):
    """The weights by name, and the input."""
    sizes = [w.numel() for w in layer.weights.values()]
    parts = vector.split([*sizes, X.numel()])
    weights = {name: p.view(w.shape) for (name, w), p in zip(layer.weights.items(), parts[:-1], strict=True)}
    return weights, parts[-1].view(X.shape)


def autodiff_jacobian(layer, X, plain):
    """`∂f/∂(θ, x)` by reverse mode through the plain function."""
    return jacobian(lambda v: plain(*unflat(layer, X, v)).flatten(), flat(layer, X))


def autodiff_second(layer, X, plain, g):
    """`Σ_m g_m ∂²f_m` over `(θ, x)` by double backward through the plain function."""
    return hessian(lambda v: (g * plain(*unflat(layer, X, v))).sum(), flat(layer, X))


def check_jet(layer: Layer, X, plain, seed=0, tolerance=1e-11):
    """Value, Jacobian, adjoint, and second derivative of a layer against its plain function.

    1e-11: float64 keeps some 1e-15 of the largest entry, times the conditioning of a norm of small variance.
    """
    generator = torch.Generator().manual_seed(seed)
    value = plain(layer.weights, X)
    g = torch.randn(value.shape, generator=generator, dtype=X.dtype)
    assert relative(layer(X), value) < tolerance
    J, expected = layer.jacobian(X), autodiff_jacobian(layer, X, plain)
    assert relative(J.dense(), expected) < tolerance
    assert relative(J.T.dense(), expected.T) < tolerance
    S, expected = layer.second(X, g), autodiff_second(layer, X, plain, g)
    assert relative(S.dense(), expected) < tolerance


def check_by_differences(layer: Layer, X, plain, seed=0):
    """The second derivative along one direction, against central differences of the plain gradient."""
    generator = torch.Generator().manual_seed(seed)
    point = flat(layer, X)
    g = torch.randn(plain(layer.weights, X).shape, generator=generator, dtype=X.dtype)
    v = torch.randn(point.shape, generator=generator, dtype=X.dtype)

    def gradient(at):
        at = at.requires_grad_()
        return torch.autograd.grad((g * plain(*unflat(layer, X, at))).sum(), at)[0]

    # five points: h⁴ of the fifth derivative (1e-12 or so where a norm curves on the scale of 0.01), and
    # 1e-16 / h = 1e-11 of rounding, times what the layer magnifies
    h = 1e-5
    near, far = (gradient(point + c * v) - gradient(point - c * v) for c in (h, 2 * h))
    assert relative(layer.second(X, g) @ v, (8 * near - far) / (12 * h)) < 1e-7
