import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator
from scipy.sparse.linalg import eigsh as scipy_eigsh

from curvlens.estimate.lanczos import eigsh
from curvlens.operator import Operator
from curvlens.structured import Dense
from spectra import from_spectrum

RNG = np.random.default_rng(1)
BULK = (0.2 * RNG.uniform(-1, 1, 300)).tolist()
TOP = [10 / (1 + i) for i in range(12)] + [-6 / (1 + i) for i in range(12)]
WANTED = {
    "LM": lambda e, k: sorted(e, key=abs)[::-1][:k],
    "LA": lambda e, k: sorted(e)[::-1][:k],
    "SA": lambda e, k: sorted(e)[:k],
    "both": lambda e, k: sorted(e)[::-1][: (k + 1) // 2] + sorted(e)[: k // 2],
}


def by_magnitude(values):
    return sorted((abs(v) for v in values), reverse=True)


def check_pairs(H, result):
    """The stated residuals are those of the stated vectors, which are orthonormal."""
    residuals = (H @ result.vectors - result.vectors * result.values).norm(dim=0)
    # a product in float64 rounds at 1e-15 of the norm, about 10
    torch.testing.assert_close(result.residuals, residuals, rtol=1e-6, atol=1e-13)
    k = len(result)
    torch.testing.assert_close(
        result.vectors.T @ result.vectors, torch.eye(k, dtype=torch.float64), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("which", list(WANTED))
@pytest.mark.parametrize("settings", [{}, {"basis": 15}, {"block": 3}], ids=str)
def test_extreme_eigenpairs(which, settings):
    H = from_spectrum(TOP + BULK)
    result = eigsh(H, k=7, which=which, tol=1e-6, **settings)
    assert result.converged
    check_pairs(H, result)
    expected = WANTED[which](TOP + BULK, 7)
    assert (result.residuals <= 1e-6 * result.values.abs()).all()
    # an eigenvalue's error is at most its residual, and near its square over the gap
    assert sorted(result.values.tolist()) == pytest.approx(sorted(expected), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(
    "repeated",
    [
        [5, 5, 5, 3, 2, 2, 1],
        [4] * 4 + [-4] * 4 + [3] * 2 + [-3] * 2,  # the +- pairs of query and key
        [1] * 9,
    ],
    ids=str,
)
def test_repeated_eigenvalues_have_their_multiplicity(repeated, block, seed):
    eigenvalues = repeated + BULK
    H = from_spectrum(eigenvalues)
    result = eigsh(H, k=len(repeated), block=block, seed=seed)
    assert result.converged
    check_pairs(H, result)
    # residuals of 1e-3 relative: values to their square
    assert by_magnitude(result.values.tolist()) == pytest.approx(by_magnitude(repeated), rel=1e-4)


def test_without_the_search_for_copies_there_may_be_one():
    """The search is what finds them: the test above can fail."""
    H = from_spectrum([5, 5, 5, 3, 2, 2, 1, *BULK])
    result = eigsh(H, k=3, copies=False)
    assert result.values.tolist() == pytest.approx([5, 3, 2], rel=1e-4)


@pytest.mark.parametrize("spread", [1.0, 0.3])
def test_products_stay_below_those_of_scipy(spread):
    """At most 1.2 times the products of ARPACK for the same residual, copies searched and residuals checked."""
    H = from_spectrum([(10 / (1 + i)) ** spread * (-1) ** (i % 3) for i in range(30)] + BULK * 3)
    calls = []

    def product(x):
        calls.append(1)
        return H.matrix.numpy() @ x

    start = np.random.default_rng(0).standard_normal(H.shape[0])
    scipy_eigsh(LinearOperator(H.shape, product, dtype=np.float64), k=10, which="LM", tol=1e-3, v0=start)
    result = eigsh(H, k=10, tol=1e-3)
    assert result.converged
    assert result.products <= 1.2 * len(calls)


def test_a_warm_start_saves_products():
    first = from_spectrum(TOP + BULK)
    step = torch.randn(first.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    second = Dense(first.matrix + 1e-4 * (step + step.T))
    before = eigsh(first, k=8)
    cold, warm = eigsh(second, k=8), eigsh(second, k=8, start=before)
    assert warm.converged
    assert warm.products < cold.products
    assert warm.values.tolist() == pytest.approx(cold.values.tolist(), rel=1e-5)
    again = eigsh(first, k=8, start=before.vectors)
    assert again.products <= 8 + 6 + 1  # the vectors, one search for copies, one check


@pytest.mark.parametrize(
    ("eigenvalues", "k"),
    [([2.0] * 12, 5), ([0.0] * 12, 3), ([3, 2, 1] + [0] * 20, 6), ([1.0, -2.0, 3.0], 3), ([4.0], 1)],
    ids=str,
)
@pytest.mark.parametrize("block", [1, 2])
def test_breakdown_goes_on(eigenvalues, k, block):
    H = from_spectrum(eigenvalues)
    result = eigsh(H, k=k, block=block, basis=len(eigenvalues))
    assert result.converged
    check_pairs(H, result)
    expected = WANTED["LM"](eigenvalues, k)
    assert by_magnitude(result.values.tolist()) == pytest.approx(by_magnitude(expected), abs=1e-12)


def test_float32():
    H = from_spectrum(TOP + BULK)
    result = eigsh(Dense(H.matrix.float()), k=5)
    assert result.converged
    assert result.vectors.dtype == torch.float32
    assert result.values.tolist() == pytest.approx(WANTED["LM"](TOP, 5), rel=1e-5)


def test_a_budget_returns_the_best_so_far():
    H = from_spectrum(TOP + BULK)
    for products in (0, 1, 2, 5, 12, 15):
        result = eigsh(H, k=10, tol=1e-8, max_products=products)
        assert not result.converged
        assert result.stopped == "max_products"
        assert result.products <= products
        if len(result):
            check_pairs(H, result)
    assert result.values[0].item() == pytest.approx(10, rel=0.02)
    assert "not converged: max_products" in repr(result)


def test_a_residual_that_is_not_true_is_computed_again():
    """An operator that is only nearly linear, as one with rounding of its own."""
    H = from_spectrum(TOP + BULK)

    class Noisy(Dense):
        def apply(self, stack):
            return super().apply(stack) + 1e-3 * torch.sin(1e3 * stack)

    noisy = Noisy(H.matrix)
    result = eigsh(noisy, k=3, tol=1e-3)
    true = (noisy.apply(result.vectors.T) - result.values[:, None] * result.vectors.T).norm(dim=1)
    torch.testing.assert_close(result.residuals, true, rtol=1e-6, atol=0)


def test_killed_runs_end_with_the_same_digits(resumes_exactly):
    H = from_spectrum([5, 5, 3, 3, *BULK[:60]])
    resumes_exactly(lambda H, **budget: eigsh(H, k=4, basis=9, **budget), H)


class Interrupting(Operator):
    """Sends Ctrl-C to its own process at one of its products."""

    def __init__(self, a, at):
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric)
        self.a, self.at = a, at

    def apply(self, stack):
        self.at -= 1
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return self.a.apply(stack)


def test_an_interrupt_returns_what_there_is_and_the_run_goes_on(tmp_path):
    H = from_spectrum(TOP + BULK)
    whole = eigsh(H, k=5)
    path = tmp_path / "state"
    partial = eigsh(Interrupting(H, 9), k=5, checkpoint=path)
    assert partial.stopped == "interrupted"
    assert not partial.converged
    assert len(partial) == 5
    finished = eigsh(H, k=5, checkpoint=path)
    assert torch.equal(finished.vectors, whole.vectors)
    assert finished.converged
    assert finished.products == whole.products
    assert eigsh(H, k=5, checkpoint=path).products == whole.products
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_an_exception():
    H = from_spectrum(TOP + BULK)

    class Impatient(Interrupting):
        def apply(self, stack):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return self.a.apply(stack)

    with pytest.raises(KeyboardInterrupt):
        eigsh(Impatient(H, 1), k=5)


def test_sigkill_loses_nothing(tmp_path):
    """A real kill -9 in another process, in the middle of the run."""
    script = textwrap.dedent("""
        import os, signal, sys
        sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
        from spectra import from_spectrum
        from test_lanczos import BULK, TOP, Interrupting
        from curvlens.estimate import eigsh
        class Deadly(Interrupting):
            def apply(self, stack):
                self.at -= 1
                if self.at == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.a.apply(stack)
        eigsh(Deadly(from_spectrum(TOP + BULK), 12), k=5, checkpoint=sys.argv[2])
    """)
    path = tmp_path / "state"
    here = os.path.dirname(__file__)
    # as many threads as here: with another number, sums come in another order
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", script, here, str(path)], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    H = from_spectrum(TOP + BULK)
    finished, whole = eigsh(H, k=5, checkpoint=path), eigsh(H, k=5)
    assert torch.equal(finished.values, whole.values)
    assert torch.equal(finished.vectors, whole.vectors)
    assert finished.products == whole.products


def test_a_state_of_another_run_is_refused(tmp_path):
    H = from_spectrum(TOP + BULK)
    eigsh(H, k=2, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match="belongs to another run"):
        eigsh(H, k=3, checkpoint=tmp_path / "state")


def test_what_cannot_be_solved_is_refused():
    with pytest.raises(ValueError, match="expected a symmetric operator"):
        eigsh(Dense(torch.triu(torch.ones(4, 4))))
    with pytest.raises(ValueError, match="which to be one of LM, LA, SA, both"):
        eigsh(Dense(torch.eye(4)), which="SM")
    with pytest.raises(ValueError, match="expected k from 1 to 4"):
        eigsh(Dense(torch.eye(4)), k=5)
    with pytest.raises(ValueError, match="expected a basis of at least"):
        eigsh(Dense(torch.eye(40)), k=5, basis=5)
    with pytest.raises(ValueError, match=r"expected start vectors \[40, j\]"):
        eigsh(Dense(torch.eye(40)), k=5, start=torch.ones(3))
