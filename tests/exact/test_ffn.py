"""Feed-forward sublayers against autograd through their definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlens.exact.activations import ACTIVATIONS
from curvlens.exact.ffn import FeedForward
from tests.exact.jets import check_by_differences, check_jet, relative

TORCH = {
    "identity": lambda h: h,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def feed_forward(d, m, e, activation, gated, biased, seed=0):
    biases = {"up": randn(m, seed=seed + 4), "down": randn(e, seed=seed + 5)} if biased else {}
    if biased and gated:
        biases["gate"] = randn(m, seed=seed + 6)
    return FeedForward(
        randn(d, m, seed=seed + 1),
        randn(m, e, seed=seed + 2),
        randn(d, m, seed=seed + 3) if gated else None,
        activation,
        biases,
    )


def definition(activation):
    def plain(w, X):
        up = X @ w["up"] + w.get("up.bias", 0)
        if "gate" in w:
            a = TORCH[activation](X @ w["gate"] + w.get("gate.bias", 0)) * up
        else:
            a = TORCH[activation](up)
        return a @ w["down"] + w.get("down.bias", 0)

    return plain


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 2),
    L=st.integers(1, 4),
    d=st.integers(1, 4),
    m=st.integers(1, 5),
    e=st.integers(1, 3),
    activation=st.sampled_from(sorted(TORCH)),
    gated=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_its_definition_differentiated(n, L, d, m, e, activation, gated, biased, seed):
    layer = feed_forward(d, m, e, activation, gated, biased, seed)
    check_jet(layer, randn(n, L, d, seed=seed), definition(activation), seed)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_differences(activation, gated):
    layer = feed_forward(4, 6, 3, activation, gated, True)
    check_by_differences(layer, randn(2, 3, 4), definition(activation))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_derivatives(name):
    """Values and derivatives against torch over the whole range, tails included."""
    h = torch.linspace(-12, 12, 4001, dtype=torch.float64).add(1e-3).requires_grad_()
    sigma, value = ACTIVATIONS[name], TORCH[name](h)
    first = torch.autograd.grad(value.sum(), h, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), h)[0] if first.requires_grad else torch.zeros_like(h)
    h = h.detach()
    # absolute, as autograd itself loses digits in the tails: the terms it cancels there are up to h³ in size
    assert (sigma.value(h) - value).abs().max() < 1e-13
    assert (sigma.first(h) - first).abs().max() < 1e-13
    assert (sigma.second(h) - second).abs().max() < 1e-12


def test_relu_creates_no_curvature_on_its_own():
    """`σ'' = 0`: what is left of the second derivative is between different matrices only."""
    layer = feed_forward(3, 5, 3, "relu", False, True)
    S = layer.second(randn(4, 3), randn(4, 3, seed=9))
    assert torch.count_nonzero(S.block("up").dense()) == 0
    assert torch.count_nonzero(S.block("input").dense()) == 0
    assert torch.count_nonzero(S.block("up", "down").dense()) > 0


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"expected an activation among .*gelu_tanh"):
        FeedForward(torch.ones(2, 2), torch.ones(2, 2), activation="swish")


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="expected up"):
        FeedForward(torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="expected a bias"):
        FeedForward(torch.ones(2, 3), torch.ones(3, 2), biases={"up": torch.ones(2)})


def test_dense_input_derivatives():
    layer, X, g = feed_forward(3, 5, 2, "silu", True, False), randn(4, 3), randn(4, 2, seed=8)
    assert relative(layer.input_jacobian(X)[0], layer.jacobian(X).block("output", "input").dense()) < 1e-14
    assert relative(layer.input_hessian(X, g)[0], layer.second(X, g).block("input").dense()) < 1e-14
