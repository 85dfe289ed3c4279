import pytest
import torch

from curvlens.blocks import Block, Blocks
from curvlens.structured import BlockOperator, Dense, Diagonal, KroneckerSum
from tests.structured.contract import check_operator, close


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BLOCKS = Blocks(
    [
        Block("query", (3, 4), heads=(2, 1)),
        Block("bias", (4,), heads=(2, 0)),
        Block("out", (4, 2), heads=(2, 0)),
        Block("norm", (3,)),
        Block("stack", (2, 3, 2), heads=(2, 0)),
    ]
)


def grid(symmetric):
    cells = {}
    heads = BLOCKS.heads()
    for i, row in enumerate(heads):
        for j, column in enumerate(heads):
            if (i + j) % 5 == 4 or (symmetric and j < i):
                continue
            A = randn(row.size, column.size, seed=100 * i + j)
            cells[row.name, column.name] = Dense(
                A + A.T if symmetric and i == j else A, Blocks([row]), Blocks([column])
            )
    return BlockOperator(cells, BLOCKS, symmetric=symmetric)


def assembled(H):
    """The matrix from its cells by the positions of their blocks."""
    matrix = torch.zeros(H.shape, dtype=torch.float64)
    for row in H.codomain.heads():
        for column in H.domain.heads():
            cell = H.cell(row.name, column.name)
            if cell is not None:
                i, j = H.codomain.positions(Blocks([row])), H.domain.positions(Blocks([column]))
                matrix[i[:, None], j] = cell.dense()
    return matrix


@pytest.mark.parametrize("symmetric", [False, True])
def test_grid_over_heads_keeps_the_contract(symmetric):
    H = grid(symmetric)
    assert H.symmetric == symmetric
    check_operator(H, assembled(H))
    check_operator(H.T, assembled(H).T)


def test_sums_and_multiples_stay_grids():
    H, G = grid(True), grid(False)
    for made, expected in [
        (H + G, assembled(H) + assembled(G)),
        (3 * H, 3 * assembled(H)),
        (H - H, 0 * assembled(H)),
    ]:
        assert isinstance(made, BlockOperator)
        check_operator(made, expected)
    assert (3 * H).symmetric
    assert not (H + G).symmetric


def test_blocks_of_a_grid_are_grids_or_their_cells():
    H = grid(True)
    assert isinstance(H.block("query.head.0", "norm"), Dense)
    part = H.block("query", "bias")
    assert isinstance(part, BlockOperator)
    assert part.block("query.head.1", "bias.head.0").shape == (6, 2)
    close(
        H.block_norms(),
        torch.stack([torch.stack([H.block(r.name, c.name).dense().norm() for c in BLOCKS]) for r in BLOCKS]),
    )


def test_kronecker_cells_in_any_place():
    blocks = Blocks([Block("query", (3, 4), heads=(2, 1)), Block("out", (4, 2), heads=(2, 0))])
    cells = {}
    for i in range(2):
        for j in range(2):
            cells[f"query.head.{i}", f"out.head.{j}"] = KroneckerSum(
                randn(5, 3, 2, seed=i), randn(5, 2, 2, seed=j), crossed=True
            )
    H = BlockOperator(cells, blocks, symmetric=True)
    check_operator(H, assembled(H))
    check_operator(H.block("query", "out"))


def test_spectra_that_the_structure_gives():
    blocks = Blocks.of({"query": (3, 2), "key": (4, 2)})
    B, I = randn(3, 4), torch.eye(2, dtype=torch.float64)
    H = BlockOperator({("query", "key"): KroneckerSum(B, I)}, blocks, symmetric=True)
    close(H.eigenvalues(), torch.linalg.eigvalsh(H.dense()))
    A, C = randn(3, 3), randn(4, 4)
    D = BlockOperator(
        {("query", "query"): KroneckerSum(A @ A.T, I), ("key", "key"): KroneckerSum(C + C.T, I)},
        blocks,
        symmetric=True,
    )
    close(D.eigenvalues(), torch.linalg.eigvalsh(D.dense()))
    with pytest.raises(ValueError, match="share no rows or columns"):
        (H + D).eigenvalues()


def test_dense_and_diagonal_operators():
    A = randn(7, 7)
    check_operator(Dense.over(A + A.T, {"a": (2, 2), "b": (3,)}), A + A.T)
    check_operator(Diagonal(A[0], Blocks.of({"a": (2, 2), "b": (3,)})), A[0].diag())
    close(Diagonal(A[0]).eigenvalues(), torch.linalg.eigvalsh(A[0].diag()))
    close(Dense(A + A.T).eigenvalues(), torch.linalg.eigvalsh(A + A.T))


def test_messages():
    blocks = Blocks.of({"a": (2,), "b": (3,)})
    with pytest.raises(ValueError, match=r"cell \('a', 'b'\): expected shape \(2, 3\), got \(3, 2\)"):
        BlockOperator({("a", "b"): Dense(randn(3, 2))}, blocks)
    with pytest.raises(KeyError, match="expected cells named by"):
        BlockOperator({("a", "c"): Dense(randn(2, 3))}, blocks)
    with pytest.raises(ValueError, match="expected a dtype"):
        BlockOperator({}, blocks)


def test_eigenvalues_of_cells_that_share_nothing():
    """Matrices and diagonals on the diagonal, pairs off it; cells that meet are refused."""
    A = randn(3, 3)
    A = A + A.T
    blocks = Blocks.of({"a": (3,), "b": (2,), "c": (2,), "d": (3,)})
    a, b, c, d = (Blocks([block]) for block in blocks)
    cells = {
        ("a", "a"): Dense(A, a),
        ("b", "b"): Diagonal(torch.tensor([5.0, -7.0], dtype=torch.float64), b),
        ("c", "d"): Dense(randn(2, 3, seed=1), c, d),
    }
    H = BlockOperator(cells, blocks, symmetric=True)
    close(H.eigenvalues(), torch.linalg.eigvalsh(H.dense()))
    met = BlockOperator({**cells, ("a", "c"): Dense(randn(3, 2), a, c)}, blocks, symmetric=True)
    with pytest.raises(ValueError, match="share no rows or columns"):
        met.eigenvalues()
