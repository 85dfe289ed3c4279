import torch

from curvlens.estimate import vectors


def test_long_float32_sums_keep_their_digits():
    """torch sums 4 million squares in float32 to 2e-4; pieces of 16,384 to its rounding, 6e-8, times a few."""
    a = torch.randn(2, (1 << 22) + 3)
    exact = a.double() @ a.double().T
    norms = exact.diagonal().sqrt()
    assert ((vectors.gram(a, a) - exact).abs() < 1e-6 * exact.diagonal().max()).all()
    torch.testing.assert_close(vectors.norm(a), norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(vectors.dot(a, a), exact.diagonal(), rtol=1e-6, atol=0)


def test_short_vectors_and_none():
    a = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(vectors.gram(a, a[:2]), a @ a[:2].T, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(vectors.norm(a), a.norm(dim=1), rtol=1e-14, atol=0)
    assert vectors.dot(a[:0], a[:0]).shape == (0,)
    assert vectors.gram(a[:0], a).shape == (0, 3)
