from collections import Counter

import numpy as np
import pytest

from curvlens.scaling.law import HELD, NO_TREND, NOT_A_LAW, SCATTERED, UNDECIDED, fit

SIZES = [1, 2, 4, 8, 16]


def noisy(function, sizes, repeats, seed, scatter, heavy=False):
    generator = np.random.default_rng(seed)
    x = np.repeat(sizes, repeats).astype(float)
    noise = generator.standard_t(4, len(x)) / np.sqrt(2) if heavy else generator.standard_normal(len(x))
    return x, function(x) * np.exp(scatter * noise)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_interval_covers_a_planted_exponent(repeats, heavy):
    covered = held = predicted = 0
    seeds = 200
    for seed in range(seeds):
        x, y = noisy(lambda x: 3 * x**-0.7, SIZES, repeats, seed, 0.1, heavy)
        found = fit(x, y, seed=seed)
        covered += -0.7 in found.exponent
        held += found.verdict == HELD
        predicted += found.held_out.met
    # 95 % each, of 200: standard deviation 1.5 %
    assert 0.90 <= covered / seeds <= 0.995
    assert held / seeds >= 0.90
    assert predicted / seeds >= 0.90


@pytest.mark.parametrize(
    ("name", "function", "verdict"),
    [
        ("a logarithm", lambda x: 1 + np.log(x), NOT_A_LAW),
        ("an exponential", lambda x: np.exp(-x / 10), NOT_A_LAW),
        ("a law over a floor", lambda x: 0.3 + 1 / x, NOT_A_LAW),
        ("two laws", lambda x: x + 100 / x, NOT_A_LAW),
        ("means that stray", lambda x: np.where(np.log2(x) % 2 == 0, 1, 2) * x, NOT_A_LAW),
        ("a constant", np.ones_like, NO_TREND),
    ],
)
def test_what_is_no_law_is_called_so(name, function, verdict):
    found = Counter(fit(*noisy(function, [*SIZES, 32], 3, seed, 0.03)).verdict for seed in range(20))
    assert found[verdict] >= 15, found


def test_exact_data():
    found = fit(SIZES, [3 * x**0.5 for x in SIZES])
    assert found.exponent.value == pytest.approx(0.5, abs=1e-12)
    assert found.prefactor.value == pytest.approx(3, rel=1e-12)
    assert found.predict(100) == pytest.approx(30, rel=1e-10)
    assert found.verdict == HELD
    assert found.held_out.measured == pytest.approx(12)
    assert found.slopes == pytest.approx([0.5] * 4)
    assert fit(SIZES, [x + 100 / x for x in SIZES]).verdict == NOT_A_LAW


def test_statements():
    x, y = noisy(lambda x: x + 100 / x, [*SIZES, 32], 3, 0, 0.01)
    said = fit(x, y, "parameters", "trace").statement
    assert said.startswith("trace is not a power law of parameters: the slope changes by")
    few = fit([1, 2, 4], [1.0, 2.1, 3.9])
    assert few.verdict == UNDECIDED
    assert "3 sizes are too few to tell" in few.statement
    assert few.held_out is None
    assert "no trend" in fit(*noisy(np.ones_like, SIZES, 3, 1, 0.1)).statement


def test_an_exponent_that_the_scatter_leaves_open_is_no_law():
    """Where the interval of the exponent is wider than the exponent itself, even though it leaves out zero."""
    found = [fit(*noisy(lambda x: x**0.8, SIZES, 2, seed, 0.6)) for seed in range(40)]
    assert all(f.exponent.high - f.exponent.low <= f.exponent.value for f in found if f.holds)
    open_ = [f for f in found if f.verdict == SCATTERED]
    assert len(open_) > 10
    assert "the scatter leaves its exponent open" in open_[0].statement
    assert not open_[0].holds


def test_the_order_of_points_does_not_matter():
    x, y = noisy(lambda x: x**2, SIZES, 2, 0, 0.1)
    assert fit(x[::-1], y[::-1]).exponent.value == pytest.approx(fit(x, y).exponent.value, rel=1e-12)
    assert fit(x, y).to_dict()["exponent"] == fit(x, y).to_dict()["exponent"]


def test_wrong_input():
    with pytest.raises(ValueError, match="expected at least three distinct sizes, got 2"):
        fit([1, 2, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="expected positive finite values of trace, got -1"):
        fit([1, 2, 3], [1, 2, -1], y="trace")
    with pytest.raises(ValueError, match="expected as many sizes as values"):
        fit([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="expected positive finite sizes"):
        fit([0, 2, 3], [1, 2, 3])
