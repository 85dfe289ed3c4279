import pytest
import torch

import curvlens.exact as exact


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(x, y):
    assert float((x - y).abs().max()) <= 1e-13 * max(float(y.abs().max()), 1e-300)


def test_moments_by_their_definition():
    A, X = randn(4, 4).softmax(-1), randn(4, 3, seed=1)
    m = exact.moments(A, X)
    centred = X[None] - (A @ X)[:, None]
    close(m.first, A @ X)
    close(m.second, torch.einsum("ij,ija,ijb->iab", A, centred, centred))
    close(m.third, torch.einsum("ij,ija,ijb,ijc->iabc", A, centred, centred, centred))
    w = randn(4, 3, seed=2)
    close(m.contracted(w), torch.einsum("iabc,ia->ibc", m.third, w))


def test_rows_that_attend_to_one_token_have_no_central_moments():
    A = torch.eye(4, dtype=torch.float64)[[2, 2, 0, 1]]
    m = exact.moments(A, randn(4, 3))
    assert float(m.second.abs().max()) == 0
    assert float(m.third.abs().max()) == 0


def test_central_moments_do_not_see_a_shift_and_keep_digits_near_one_hot():
    X = randn(3, 2)
    e = 1e-9
    A = torch.tensor([[1 - e, e, 0]] * 3, dtype=torch.float64)
    # two tokens with weights 1 - e and e: variance e (1 - e) (x - y)(x - y)ᵀ, of order e. Both sides are
    # centred, so the rounding of the one small difference (1e-16 against e) enters squared, and all digits stay.
    step = X[1] - X[0]
    expected = e * (1 - e) * torch.outer(step, step)
    found = exact.moments(A, X).second[0]
    assert float((found - expected).abs().max()) < 1e-13 * float(expected.abs().max())
    B = randn(3, 3).softmax(-1)
    apart = exact.moments(B, X + 4).third - exact.moments(B, X).third
    assert float(apart.abs().max()) < 1e-13 * 4**3


def test_messages():
    with pytest.raises(ValueError, match="expected rows that are distributions"):
        exact.moments(2 * torch.eye(3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="expected an attention map"):
        exact.moments(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(MemoryError, match="contracted"):
        _ = exact.moments(torch.eye(50), torch.ones(50, 20_000)).third
