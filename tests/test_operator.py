import pytest
import torch

from curvlens.blocks import Blocks
from curvlens.operator import Operator, Product, Restriction
from curvlens.structured import Dense

SHAPES = {"a": (2, 3), "b": (4,)}
N = 10


class Plain(Operator):
    """An operator that knows its products alone."""

    def __init__(self, matrix, blocks, symmetric=False):
        super().__init__(blocks, blocks, matrix.dtype, symmetric=symmetric)
        self.matrix = matrix

    def apply(self, stack):
        return stack @ self.matrix.T

    def _adjoint(self):
        return Plain(self.matrix.T, self.domain)


def matrix(symmetric=False):
    a = torch.randn(N, N, dtype=torch.float64)
    return a + a.T if symmetric else a


@pytest.fixture(params=["plain", "dense"])
def pair(request):
    a = matrix()
    blocks = Blocks.of(SHAPES)
    return (Plain(a, blocks) if request.param == "plain" else Dense(a, blocks)), a


def test_products(pair):
    A, a = pair
    v = torch.randn(N, 3, dtype=torch.float64)
    torch.testing.assert_close(A @ v, a @ v)
    torch.testing.assert_close(A @ v[:, 0], a @ v[:, 0])
    named = A @ {"a": torch.ones(2, 3, dtype=torch.float64)}
    torch.testing.assert_close(named["b"], a[6:, :6].sum(1))


def test_dense_diagonal_adjoint_and_scipy(pair):
    A, a = pair
    torch.testing.assert_close(A.dense(), a)
    torch.testing.assert_close(A.diagonal(), a.diagonal())
    torch.testing.assert_close(A.trace(), a.trace())
    torch.testing.assert_close(A.frobenius(), a.norm())
    torch.testing.assert_close(A.block("a", "b").frobenius(), a[:6, 6:].norm())
    torch.testing.assert_close(A.T.dense(), a.T)
    S = A.to_scipy()
    x = torch.randn(N, 2, dtype=torch.float64).numpy()
    torch.testing.assert_close(torch.from_numpy(S @ x), a @ torch.from_numpy(x))
    torch.testing.assert_close(torch.from_numpy(S.rmatvec(x[:, 0])), a.T @ torch.from_numpy(x[:, 0]))


def test_blocks_of_an_operator(pair):
    A, a = pair
    torch.testing.assert_close(A.block("a", "b").dense(), a[:6, 6:])
    torch.testing.assert_close(A.block("b").dense(), a[6:, 6:])
    torch.testing.assert_close(A.block("a", "b").T.dense(), a[:6, 6:].T)
    torch.testing.assert_close(A.block("*", "b").block("a", "b").dense(), a[:6, 6:])


def test_algebra(pair):
    A, a = pair
    b = matrix()
    B = Dense(b, Blocks.of(SHAPES))
    torch.testing.assert_close((A + 2 * B).dense(), a + 2 * b)
    torch.testing.assert_close((A - B / 4).T.dense(), (a - b / 4).T)
    torch.testing.assert_close((-A).block("a", "b").dense(), -a[:6, 6:])
    torch.testing.assert_close((A @ B).dense(), a @ b)
    torch.testing.assert_close((A @ B).T.dense(), (a @ b).T)
    torch.testing.assert_close((A @ B).block("b", "a").dense(), (a @ b)[6:, :6])
    assert isinstance(A @ B, Product)


def test_symmetry_is_kept_where_it_holds():
    blocks = Blocks.of(SHAPES)
    A, B = Plain(matrix(True), blocks, symmetric=True), Dense(matrix(True), blocks)
    assert B.symmetric
    assert A.T is A
    assert (A + B).symmetric
    assert (3 * A).symmetric
    assert A.block("a").symmetric
    assert not A.block("a", "b").symmetric
    assert isinstance(A.block("a"), Restriction)
    assert not (A @ B).symmetric


def test_dense_over_named_blocks():
    A = Dense.over(matrix(), SHAPES)
    assert A.domain.names == ("a", "b")
    torch.testing.assert_close(A.trace(), A.dense().trace())
    torch.testing.assert_close(A.frobenius(), A.dense().square().sum().sqrt())


def test_wrong_input_is_told(pair):
    A, _ = pair
    with pytest.raises(ValueError, match=r"expected a vector \[10\] or vectors \[10, K\], got \[3, 10\]"):
        A @ torch.zeros(3, N, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"expected torch.float64 on cpu.*got torch.float32"):
        A @ torch.zeros(N)
    with pytest.raises(TypeError, match="expected a tensor, a dictionary"):
        A @ [1.0] * N
    with pytest.raises(KeyError, match=r"got \['c'\]"):
        A @ {"c": torch.zeros(4, dtype=torch.float64)}
    with pytest.raises(KeyError, match=r"did you mean|known:"):
        A.block("c")
    with pytest.raises(ValueError, match="the same blocks in rows"):
        A + Dense(matrix())
    with pytest.raises(TypeError, match="one dtype and device"):
        A + Dense(matrix().float(), Blocks.of(SHAPES))
    with pytest.raises(ValueError, match="the same rows and columns for a diagonal"):
        Plain(matrix(), Blocks.of(SHAPES)).block("a", "b").diagonal()
    with pytest.raises(ValueError, match="the same rows and columns for a trace"):
        Plain(matrix(), Blocks.of(SHAPES)).block("a", "b").trace()


def test_a_bar_shows_on_a_terminal_when_work_takes_long(monkeypatch, capsys):
    from curvlens import progress

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    a = matrix()
    Plain(a, Blocks.of(SHAPES)).dense()
    assert capsys.readouterr().err == ""  # not a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    Plain(a, Blocks.of(SHAPES)).dense()
    assert "dense matrix of 10 x 10" in capsys.readouterr().err


def test_a_matrix_that_would_not_fit_is_refused():
    class Huge(Operator):
        def apply(self, stack):
            raise AssertionError("no product is tried")

    blocks = Blocks.of({"a": (10_000_000,)})
    with pytest.raises(MemoryError, match=r"10,000,000 x 10,000,000 takes .* GiB.*take a smaller block"):
        Huge(blocks, blocks, torch.float32).dense()
    with pytest.raises(NotImplementedError, match="Huge defines no adjoint"):
        Huge(blocks, blocks, torch.float32).T.apply(torch.zeros(1, 1))
