import math

import pytest
import torch
from scipy.stats import norm, t

from curvlens.estimate.result import BlockMap, Estimate, jackknife, mean_and_error, pm, student


def test_students_factor_makes_an_interval_of_one_sigma():
    for samples in (2, 5, 40):
        assert t.cdf(student(samples), samples - 1) == pytest.approx(norm.cdf(1), abs=1e-12)


def test_mean_and_error_of_incomplete_samples():
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, math.nan]], dtype=torch.float64)
    mean, error = mean_and_error(values)
    assert mean.tolist() == [3, 2]
    assert error[0].item() == pytest.approx(student(3) * 2 / 3**0.5)
    assert error[1] == math.inf


def test_the_jackknife_of_a_mean_is_the_mean():
    values = torch.randn(9, 2, dtype=torch.float64)
    for one, other in zip(jackknife(values, lambda x: x), mean_and_error(values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


def test_the_jackknife_of_a_square_has_no_bias():
    """`mean^2 - s^2/m`, the unbiased estimate of the square of a mean, exactly."""
    values = torch.randn(7, dtype=torch.float64)
    value, _ = jackknife(values, torch.square)
    assert value.item() == pytest.approx((values.mean() ** 2 - values.var() / 7).item(), rel=1e-12)


@pytest.mark.parametrize(("mean", "size"), [(0.0, 6), (0.3, 6), (3.0, 1)])
def test_the_error_of_a_curved_function_covers_the_truth(mean, size, calibrated):
    def one(seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(8, size, generator=generator, dtype=torch.float64) + mean
        value, error = jackknife(values, lambda x: x.square().sum(), curved=True)
        return Estimate("", value, error, 8, 0, True)

    calibrated(one, size * mean**2)


def test_numbers_are_shown_to_the_digits_they_have():
    assert pm(123.456, 0.5) == "123.46 ± 0.5"
    assert pm(-0.00123456, 1e-5) == "-0.0012346 ± 1e-05"
    assert pm(0.0, 0.1) == "0 ± 0.1"
    assert pm(math.nan, math.inf) == "nan ± ?"


def test_a_large_map_is_not_printed_whole():
    names = tuple(f"block{i}" for i in range(20))
    shown = repr(BlockMap("norms", names, names, torch.ones(20, 20), torch.ones(20, 20), 3, 60, True))
    assert "20 x 20 blocks" in shown
    assert len(shown.splitlines()) == 2
