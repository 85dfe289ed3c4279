"""The estimators on the Hessian of a real model, beside its dense matrix."""

import pytest
import torch
from torch import nn

from curvlens import Landscape, hessian
from curvlens.estimate import block_norms, block_traces, diagonal, eigsh, sharpness, trace


@pytest.fixture
def setting():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [
        (torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)) for n in (6, 3)
    ]
    land = Landscape(model, batches, loss="mse")
    H = hessian(land)
    return model, H, H.dense()


def test_all_of_them(setting):
    _, H, matrix = setting
    for result, truth in (
        (trace(H, samples=8), matrix.trace()),
        (trace(H, samples=8, method="hutchinson"), matrix.trace()),
    ):
        assert abs(result.value - truth) < 5 * result.stderr
    found = diagonal(H, samples=12)
    assert ((found.value - matrix.diagonal()).abs() < 8 * found.stderr).all()
    spans = H.domain.ranges
    norms = block_norms(H, samples=60)
    for a, rows in spans.items():
        for b, columns in spans.items():
            entry = norms[a, b]
            # a norm of few entries has a skewed estimate: eight errors
            assert abs(entry.value - matrix[rows, columns].norm()) <= 8 * entry.stderr + 1e-12
    traces = block_traces(H, samples=60)
    for name, span in spans.items():
        assert abs(traces[name].value - matrix[span, span].trace()) < 5 * traces[name].stderr
    pairs = eigsh(H, k=6, tol=1e-8)
    largest = torch.linalg.eigvalsh(matrix).abs().sort(descending=True).values[:6]
    torch.testing.assert_close(pairs.values.abs(), largest, rtol=1e-10, atol=0)


def test_sharpness_finds_the_parameters_by_itself(setting):
    model, H, matrix = setting
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    with torch.no_grad():  # the state without the step, so that the matrix is still that of the model
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    P = {
        name: (1 - 0.9) * ((optimizer.state[p]["exp_avg_sq"] / (1 - 0.999)).sqrt() + 1e-8)
        for name, p in model.named_parameters()
    }
    S = H.domain.from_parameters(P).rsqrt()
    largest = torch.linalg.eigvalsh(S[:, None] * matrix * S).max().item()
    assert sharpness(H, optimizer, tol=1e-8).value == pytest.approx(largest, rel=1e-9)
