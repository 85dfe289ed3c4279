import pytest
import torch

from curvlens.estimate.norms import block_norms, block_traces, frobenius
from curvlens.operator import Product
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

SHAPES = {"query": (4, 3), "key": (20,), "norm": (8,)}


def exact_norms(H):
    spans = H.domain.ranges.values()
    return torch.tensor([[H.matrix[a, b].norm() for b in spans] for a in spans], dtype=torch.float64)


def test_the_error_of_the_norm_covers_the_truth(operator, calibrated):
    calibrated(lambda seed: frobenius(operator, samples=12, seed=seed), operator.frobenius())


@pytest.mark.parametrize("name", ["indefinite", "rank-deficient"])
def test_the_errors_of_block_norms_cover_the_truth(name, calibrated):
    H = from_spectrum(SPECTRA[name], shapes=SHAPES)
    calibrated(lambda seed: block_norms(H, seed=seed), exact_norms(H))


@pytest.mark.parametrize("name", ["indefinite", "rank-deficient"])
def test_the_errors_of_block_traces_cover_the_truth(name, calibrated):
    H = from_spectrum(SPECTRA[name], shapes=SHAPES)
    truth = torch.stack([H.block(name).trace() for name in SHAPES])
    calibrated(lambda seed: block_traces(H, samples=12, seed=seed), truth)


def test_block_norms_of_a_map_that_is_not_symmetric():
    generator = torch.Generator().manual_seed(0)
    H = Dense.over(torch.randn(40, 40, dtype=torch.float64, generator=generator), SHAPES)
    result = block_norms(H, samples=400, chunk=100)
    # 400 probes: every entry within five of its errors
    assert ((result.value - exact_norms(H)).abs() < 5 * result.stderr).all()
    assert (result.stderr < 0.05 * result.value).all()
    assert result.products == 3 * 400


def test_pooling_makes_the_map_symmetric():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    result = block_norms(H)
    assert torch.equal(result.value, result.value.T)
    assert torch.equal(result.stderr, result.stderr.T)


def test_a_diagonal_operator_is_exact():
    H = Dense.over(torch.diag(torch.linspace(-1, 2, 40).double()), SHAPES)
    result = block_norms(H, samples=3)
    torch.testing.assert_close(result.value, exact_norms(H), rtol=1e-13, atol=0)
    assert (result.stderr < 1e-13).all()
    traces = block_traces(H, samples=3)
    torch.testing.assert_close(traces.value, torch.stack([H.block(n).trace() for n in SHAPES]))


def test_generic_blocks_give_the_same_map():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    identity = Dense.over(torch.eye(40, dtype=torch.float64), SHAPES)
    generic = Product(H, identity, symmetric=True)
    torch.testing.assert_close(block_norms(generic).value, block_norms(H).value, rtol=1e-12, atol=0)


def test_block_norms_meet_a_tolerance():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    result = block_norms(H, samples=4, tol=0.1)
    assert result.converged
    assert (result.stderr <= 0.1 * result.value).all()


def test_a_budget_gives_what_it_allows():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    nothing = block_norms(H, max_products=0)
    assert nothing.value.isnan().all()
    one = block_norms(H, max_products=2)  # two of three columns, and by symmetry all but one entry
    assert one.value.isnan().sum() == 1
    assert one.stderr.isfinite().sum() == 2  # the pair that two products have measured
    some = block_norms(H, max_products=13)
    assert (some.samples, some.products, some.converged) == (4, 13, False)
    assert some.stderr.isfinite().all()
    assert frobenius(H, max_products=0).stopped == "max_products"
    assert block_traces(H, max_products=0).value.isnan().all()


def test_killed_runs_end_with_the_same_digits(resumes_exactly):
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    resumes_exactly(lambda H, **budget: block_norms(H, samples=5, chunk=2, **budget), H)
    resumes_exactly(lambda H, **budget: block_norms(H, samples=3, tol=0.2, chunk=2, **budget), H)
    resumes_exactly(lambda H, **budget: block_traces(H, samples=7, chunk=2, **budget), H)
    resumes_exactly(lambda H, **budget: frobenius(H, samples=7, chunk=2, **budget), H)


def test_a_map_is_asked_by_name():
    H = from_spectrum(SPECTRA["flat"], shapes=SHAPES)
    norms = block_norms(H)
    assert norms["query", "key"].value == norms.value[0, 1]
    assert block_traces(H)["norm"].what == "block traces[norm]"
    with pytest.raises(KeyError, match="query, key, norm"):
        norms["value", "key"]
    assert "query" in repr(norms)
    assert "±" in repr(norms)
    assert "norm" in repr(block_traces(H))
