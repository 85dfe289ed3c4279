import sys

import pytest
import torch

from curvlens.blocks import Blocks
from curvlens.estimate.trace import NystromSketch, RangeSketch, trace
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

METHODS = ("hutchinson", "xtrace", "xnystrace")


@pytest.mark.parametrize("method", ["hutchinson", "xtrace"])
def test_the_error_covers_the_truth(method, operator, calibrated):
    calibrated(lambda seed: trace(operator, samples=12, seed=seed, method=method), operator.trace())


def test_the_error_of_xnystrace_covers_the_truth(semidefinite, calibrated):
    calibrated(
        lambda seed: trace(semidefinite, samples=12, seed=seed, method="xnystrace"), semidefinite.trace()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_error_covers_the_truth_at_the_default_number_of_samples(method, calibrated):
    H = from_spectrum([1 / (1 + i) ** 2 for i in range(100)])
    calibrated(lambda seed: trace(H, seed=seed, method=method), H.trace())


@pytest.mark.parametrize("probe", ["gaussian", "orthogonal"])
def test_hutchinson_with_other_probes(probe, calibrated):
    H = from_spectrum(SPECTRA["flat"] * 4)
    calibrated(lambda seed: trace(H, samples=16, seed=seed, method="hutchinson", probe=probe), H.trace())


def test_hutchinson_is_the_mean_of_quadratic_forms():
    H = from_spectrum(SPECTRA["flat"])
    from curvlens.estimate.probes import probes

    v = probes(H.domain, range(5), seed=2)
    forms = ((v @ H.matrix) * v).sum(1)
    result = trace(H, samples=5, seed=2, method="hutchinson", chunk=2)
    assert result.value == pytest.approx(forms.mean().item(), rel=1e-13)
    # Student's factor for four degrees of freedom makes it a 68.27 % interval
    assert result.stderr == pytest.approx((forms.std() / 5**0.5).item() * 1.141626629090954, rel=1e-9)
    assert (result.samples, result.products, result.converged) == (5, 5, True)


def naive_leave_one_out(H, omega, dropped):
    """The defining formula: exact on the range of the other probes' images, probe i on the rest."""
    n = H.shape[0]
    samples = []
    for i in range(len(omega)):
        if i == dropped:
            samples.append(float("nan"))
            continue
        others = [j for j in range(len(omega)) if j not in (i, dropped)]
        Q, _ = torch.linalg.qr(H.apply(omega[others]).T)
        u = omega[i] - Q @ (Q.T @ omega[i])
        scale = (n - len(others)) / (u @ u)
        samples.append(((Q.T @ H.matrix @ Q).trace() + scale * (u @ H.matrix @ u)).item())
    return samples


def test_the_samples_of_xtrace_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(1)
    H = Dense(torch.randn(15, 15, dtype=torch.float64, generator=generator))  # not symmetric
    from curvlens.estimate.probes import probes
    from curvlens.estimate.run import Run

    sketch = RangeSketch(H, Run("trace", {}), seed=5)
    omega = probes(H.domain, range(6), 5, "gaussian")
    sketch.add(omega[:4])
    sketch.add(omega[4:])
    values, pairs = sketch.leave_one_out()
    assert values.tolist() == pytest.approx(naive_leave_one_out(H, omega, None), rel=1e-11)
    for j in range(6):
        pairs[j, j] = float("nan")
        assert pairs[:, j].tolist() == pytest.approx(naive_leave_one_out(H, omega, j), rel=1e-11, nan_ok=True)


def test_the_samples_of_xnystrace_are_those_of_their_definition():
    H = from_spectrum(SPECTRA["semidefinite"])
    from curvlens.estimate.probes import probes
    from curvlens.estimate.run import Run

    omega = probes(H.domain, range(5), 5, "gaussian")
    sketch = NystromSketch(H, Run("trace", {}), seed=5)
    sketch.add(omega)
    values, pairs = sketch.leave_one_out()
    A, n = H.matrix, H.shape[0]

    def naive(i, others):
        w = omega[others]
        approximation = A @ w.T @ torch.linalg.solve(w @ A @ w.T, w @ A)
        q, _ = torch.linalg.qr(w.T)
        u = omega[i] - q @ (q.T @ omega[i])
        scale = (n - len(others)) / (u @ u)
        return (approximation.trace() + scale * (omega[i] @ (A - approximation) @ omega[i])).item()

    # the shift and the division by an ill-conditioned core cost half of the digits
    for i in range(5):
        assert values[i].item() == pytest.approx(naive(i, [k for k in range(5) if k != i]), rel=1e-7)
        for j in set(range(5)) - {i}:
            others = [k for k in range(5) if k not in (i, j)]
            assert pairs[i, j].item() == pytest.approx(naive(i, others), rel=1e-7)


@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_a_complete_range_gives_the_exact_trace(method):
    H = from_spectrum([3, 2, 1, 0.5] + [0] * 30)
    result = trace(H, samples=10, method=method)
    assert result.value == pytest.approx(6.5, abs=1e-10)  # XNysTrace works with a shift at rounding
    assert result.stderr < 1e-8
    assert result.converged


def test_as_many_probes_as_dimensions_give_the_exact_trace():
    H = from_spectrum(torch.linspace(-1, 2, 7).tolist())
    result = trace(H, samples=32)
    assert result.value == pytest.approx(H.trace().item(), rel=1e-12)
    assert result.converged
    assert result.products <= 14


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_operator_has_trace_zero(method):
    result = trace(Dense(torch.zeros(9, 9, dtype=torch.float64)), samples=4, method=method)
    # XNysTrace adds a shift of one rounding and takes it away again
    assert result.value == pytest.approx(0, abs=1e-13)
    assert result.stderr < 1e-13


@pytest.mark.parametrize("method", METHODS)
def test_a_tolerance_is_met_or_admitted(method):
    H = from_spectrum(SPECTRA["semidefinite"] * 5)
    result = trace(H, samples=4, tol=0.05, method=method)
    assert result.converged
    assert result.stderr <= 0.05 * result.value
    assert result.stopped == "tolerance"
    poor = trace(H, samples=4, tol=1e-9, method=method, max_products=21)
    assert not poor.converged
    assert poor.products <= 21
    assert poor.stopped == "max_products"
    assert abs(poor.value - H.trace()) < 10 * poor.stderr


@pytest.mark.parametrize("method", METHODS)
def test_no_budget_is_no_exception(method):
    H = from_spectrum(SPECTRA["flat"])
    for products in (0, 1, 2, 3):
        result = trace(H, method=method, max_products=products)
        assert not result.converged
        assert result.products <= products
    assert trace(H, method=method, max_minutes=0).stopped == "max_minutes"


@pytest.mark.parametrize("method", METHODS)
def test_chunks_do_not_matter(method):
    H = from_spectrum(SPECTRA["semidefinite"])
    one, other = (trace(H, samples=7, method=method, chunk=chunk) for chunk in (1, 5))
    assert one.value == pytest.approx(other.value, rel=1e-8)
    assert one.stderr == pytest.approx(other.stderr, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_with_the_same_digits(method, resumes_exactly):
    H = from_spectrum(SPECTRA["semidefinite"])
    resumes_exactly(lambda H, **budget: trace(H, samples=9, method=method, chunk=2, **budget), H)
    resumes_exactly(
        lambda H, **budget: trace(H, samples=4, tol=0.02, method=method, chunk=2, max_products=40, **budget),
        H,
    )


def test_float32_agrees_with_float64():
    H = from_spectrum(SPECTRA["flat"])
    single = Dense(H.matrix.float())
    for method in ("hutchinson", "xtrace"):
        a, b = trace(H, samples=8, method=method), trace(single, samples=8, method=method)
        assert a.value == pytest.approx(b.value, rel=1e-4)  # float32 products


def test_what_cannot_have_a_trace_is_refused():
    with pytest.raises(ValueError, match="same rows and columns"):
        trace(Dense(torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="expected a method of xtrace"):
        trace(Dense(torch.eye(3)), method="magic")
    with pytest.raises(ValueError, match="negative curvature"):
        trace(from_spectrum(SPECTRA["flat"]), method="xnystrace", samples=8)


def test_memory_is_asked_for_before(monkeypatch):
    monkeypatch.setattr(sys.modules["curvlens.estimate.trace"], "free_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match="hutchinson"):
        trace(Dense(torch.eye(20)), samples=10)


def test_a_result_reads_well():
    H = Dense(torch.diag(torch.arange(5.0, dtype=torch.float64)), Blocks.of({"w": (5,)}))
    result = trace(H, samples=4, method="hutchinson")
    assert repr(result) == "trace: 10 ± 0e+00 (4 samples, 4 products, converged)"
    assert float(result) == 10
