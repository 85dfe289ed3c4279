"""The estimators on a tiny Transformer, beside its dense matrices, and on a closed form, beside its exact numbers."""

import pytest
import torch
from tests.models import MODELS

import curvlens as cl
from curvlens.estimate import block_norms, block_traces, density, eigsh, frobenius, trace

PARTS = {"H": cl.hessian, "H_o": cl.gauss_newton, "H_f": cl.functional}


@pytest.fixture(scope="module")
def land():
    model, batch = MODELS["own_gpt"]()
    return cl.Landscape(model, batch)


@pytest.mark.parametrize("part", list(PARTS))
def test_norms_and_traces_of_blocks_of_each_part(land, part):
    H = PARTS[part](land)
    matrix = H.dense()
    spans = list(H.domain.ranges.values())
    norms, traces = block_norms(H, samples=24), block_traces(H, samples=48)
    exact = torch.tensor([[matrix[a, b].norm() for b in spans] for a in spans], dtype=torch.float64)
    # blocks that are zero, as H_f of the values, are found to be; a norm of few entries has a skewed estimate
    floor = 1e-12 * float(matrix.norm())
    assert bool(((norms.value - exact).abs() <= 8 * norms.stderr + floor).all())
    truth = torch.stack([matrix[a, a].trace() for a in spans])
    assert bool(((traces.value - truth).abs() <= 6 * traces.stderr + floor).all())
    near = ((norms.value - exact).abs() <= norms.stderr + floor).double().mean()
    assert (
        0.4 < float(near) <= 1
    )  # entries share probes, so that their share of 68 % moves much from run to run


def test_eigenpairs_and_moments(land):
    H = cl.hessian(land)
    matrix = H.dense()
    values = torch.linalg.eigvalsh(matrix)
    found = eigsh(H, k=6, which="both", tol=1e-8)
    expected = torch.cat([values[:3], values[-3:]]).sort().values
    torch.testing.assert_close(found.values.sort().values, expected, rtol=1e-10, atol=1e-10)
    residuals = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
    torch.testing.assert_close(found.residuals, residuals, rtol=0.01, atol=1e-11 * float(values.abs().max()))
    spectrum = density(H, samples=32, steps=4)
    second = spectrum.moment(2)
    assert abs(second.value - float(values.square().mean())) <= 5 * second.stderr


def test_a_closed_form_knows_the_numbers_that_are_estimated():
    """Exact norm, trace and the ± pairs of multiplicity d_K of the part that the scores curve (Lemma D.2)."""
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, width, generator=g, dtype=torch.float64) for width in (3, 3, 4)]
    X, Y = (torch.randn(7, width, generator=g, dtype=torch.float64) for width in (6, 4))
    R = cl.exact.hessian(cl.exact.SelfAttention(*weights), X, Y)
    for H in (R.outer, R.functional, R.total):
        size, whole = frobenius(H, samples=48), trace(H, samples=12)
        assert abs(size.value - float(H.frobenius())) <= 5 * size.stderr
        assert abs(whole.value - float(H.trace())) <= 5 * whole.stderr + 1e-12
    pairs = eigsh(R.t_functional, k=12, which="LM", tol=1e-8)
    largest = R.t_functional.eigenvalues().abs().sort(descending=True).values[:12]
    torch.testing.assert_close(pairs.values.abs(), largest, rtol=1e-9, atol=0)
    assert int((pairs.values > 0).sum()) == 6  # three copies of each sign, twice
