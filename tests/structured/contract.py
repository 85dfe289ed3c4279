"""What every operator owes: `check_operator(H)` compares all it says of itself with its own dense matrix."""

import torch

# A sum of products over tokens is added in another order than the matrix product: a few hundred roundings.
TOLERANCE = 1e-12


def close(x, y, tolerance=TOLERANCE):
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    assert x.shape == y.shape, (x.shape, y.shape)
    size = max(float(y.abs().max()), 1e-300) if y.numel() else 1.0
    error = float((x - y).abs().max()) if y.numel() else 0.0
    assert error <= tolerance * size, f"relative error {error / size:.1e}"


def check_operator(H, matrix=None, tolerance=TOLERANCE, seed=0):
    """`matrix`: an independent value of the dense matrix; without it, the operator's own products are taken."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = H.shape
    products = H.apply(torch.eye(columns, dtype=H.dtype)).T
    matrix = products if matrix is None else matrix
    size = float(matrix.abs().max()) * columns
    V = torch.randn(3, columns, dtype=H.dtype, generator=generator)
    U = torch.randn(2, rows, dtype=H.dtype, generator=generator)
    close(products, matrix, tolerance)
    close(H.dense(), matrix, tolerance)
    close(H.apply(2 * V[:1] - 3 * V[1:2]), 2 * H.apply(V[:1]) - 3 * H.apply(V[1:2]), tolerance * 10)
    close(H.apply(V[:0]), V.new_zeros(0, rows))
    left, right = U @ (H @ V.T), (H.T @ U.T).T @ V.T
    assert float((left - right).abs().max()) <= tolerance * max(size, 1e-300) * 10
    close(H.T.dense(), matrix.T, tolerance)
    assert H.T.T.shape == H.shape
    if H.symmetric:
        close(matrix, matrix.T, tolerance)
    _check_blocks(H, matrix, tolerance)
    if rows == columns and H.codomain == H.domain:
        close(H.diagonal(), matrix.diagonal(), tolerance * 10)
        if hasattr(H, "trace"):
            scale = float(matrix.diagonal().abs().sum())
            assert abs(float(H.trace() - matrix.trace())) <= tolerance * 10 * max(scale, 1e-300)
    if hasattr(H, "frobenius"):
        close(H.frobenius(), matrix.norm(), tolerance * 10)
    if hasattr(H, "spectral_bound"):
        true = torch.linalg.matrix_norm(matrix, ord=2)
        assert float(H.spectral_bound()) >= float(true) * (1 - 1e-12)


def _check_blocks(H, matrix, tolerance):
    for row in H.codomain.heads():
        for column in H.domain.heads():
            i = H.codomain.positions(type(H.codomain)([row]))
            j = H.domain.positions(type(H.domain)([column]))
            part = H.block(row.name, column.name)
            assert part.shape == (len(i), len(j))
            expected = matrix[i][:, j]
            scale = float(matrix.abs().max())
            assert float((part.dense() - expected).abs().max()) <= tolerance * max(scale, 1e-300)
            if hasattr(part, "frobenius"):
                assert abs(float(part.frobenius() - expected.norm())) <= tolerance * 100 * max(scale, 1e-300)
