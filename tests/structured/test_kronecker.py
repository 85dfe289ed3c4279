import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvlens.blocks import Block, Blocks
from curvlens.structured import Full, KroneckerSum, LowRank
from curvlens.structured.terms import Term
from tests.structured.contract import check_operator, close

sizes = st.integers(1, 4)


def stack(n, m, p, rank, generator):
    if rank == 0:
        return Full(torch.randn(n, m, p, generator=generator, dtype=torch.float64))
    left = torch.randn(n, m, rank, generator=generator, dtype=torch.float64)
    return LowRank(left, torch.randn(n, p, rank, generator=generator, dtype=torch.float64))


def matrix(term):
    """The definition, entry by entry."""
    rule = "nmp,nrq->mrqp" if term.crossed else "nmp,nrq->mrpq"
    t = torch.einsum(rule, term.a.full(), term.b.full())
    return t.reshape(t.shape[0] * t.shape[1], -1)


def random_term(n, m, r, x, y, crossed, ranks, generator):
    """A term with rows (m, r) and columns (x, y)."""
    p, q = (y, x) if crossed else (x, y)
    return Term(stack(n, m, p, ranks[0], generator), stack(n, r, q, ranks[1], generator), crossed)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(sizes, sizes, sizes, sizes),
    counts=st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.tuples(st.integers(0, 2), st.integers(0, 2))),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 10**6),
)
def test_any_sum_of_terms_keeps_the_contract(shape, counts, seed):
    g = torch.Generator().manual_seed(seed)
    terms = [random_term(n, *shape, crossed, ranks, g) for n, crossed, ranks in counts]
    H = KroneckerSum.of(terms)
    # norms of sums whose parts cancel lose up to two digits before the entries are taken instead
    check_operator(H, sum(matrix(t) for t in terms), tolerance=1e-11)


@pytest.mark.parametrize("crossed", [False, True])
def test_square_symmetric_case_has_diagonal_and_trace(crossed):
    g = torch.Generator().manual_seed(1)
    H = KroneckerSum.of([random_term(4, 3, 2, 3, 2, crossed, (0, 1), g)])
    check_operator(H, matrix(H.terms[0]))
    assert H.codomain == H.domain


def test_entries_are_slices_of_the_matrix():
    g = torch.Generator().manual_seed(2)
    for crossed in (False, True):
        H = KroneckerSum.of([random_term(4, 3, 2, 4, 3, crossed, (1, 0), g)])
        rows, columns = torch.tensor([0, 5, 3, 3]), torch.tensor([11, 0, 7])
        close(H.entries(rows, columns), H.dense()[rows][:, columns])


def test_inner_products_of_all_kinds():
    g = torch.Generator().manual_seed(3)
    for ranks in [(a, b) for a in (0, 1) for b in (0, 1)]:
        for other in [(a, b) for a in (0, 1) for b in (0, 1)]:
            for kinds in [(False, True), (True, False), (True, True), (False, False)]:
                H = KroneckerSum.of([random_term(4, 2, 3, 4, 5, kinds[0], ranks, g)])
                G = KroneckerSum.of([random_term(3, 2, 3, 4, 5, kinds[1], other, g)])
                expected = (H.dense() * G.dense()).sum()
                close(
                    H.inner(G), expected, 1e-12 * float(H.dense().norm() * G.dense().norm() / expected.abs())
                )


def test_terms_that_share_a_factor_are_joined():
    g = torch.Generator().manual_seed(4)
    x = LowRank(torch.randn(5, 3, generator=g).double(), torch.randn(5, 3, generator=g).double())
    first, second = (KroneckerSum(x, stack(5, 2, 2, 0, g)) for _ in range(2))
    total = first + second
    assert len(total.terms) == 1
    close(total.dense(), first.dense() + second.dense())
    assert isinstance(2 * total, KroneckerSum)
    close((2 * total).dense(), 2 * total.dense())


def test_a_norm_that_cancels_keeps_its_digits():
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(4, 3, 3, generator=g).double(), torch.randn(4, 2, 2, generator=g).double()
    nearly = b * (1 + 1e-9 * torch.randn(4, 1, 1, generator=g).double())
    H = KroneckerSum.of([Term(Full(a), Full(b), False), Term(Full(-a), Full(nearly), False)])
    close(H.frobenius(), H.dense().norm(), 1e-6)
    assert float(H.frobenius()) > 0


def test_norm_by_tokens_and_by_entries_agree():
    g = torch.Generator().manual_seed(6)
    few = KroneckerSum.of([random_term(3, 8, 8, 8, 8, False, (0, 0), g)])
    many = KroneckerSum.of([random_term(40, 2, 2, 2, 2, True, (0, 1), g)])
    for H in (few, many):
        close(H.frobenius(), H.dense().norm())
        close(H._frobenius_by_entries(), H.dense().norm())


def test_heads_of_a_block_are_again_kronecker_sums():
    g = torch.Generator().manual_seed(7)
    rows = Blocks([Block("query", (3, 4), heads=(2, 1))])
    columns = Blocks([Block("out", (6, 2), heads=(3, 0))])
    H = KroneckerSum(stack(5, 3, 2, 0, g), stack(5, 4, 6, 0, g), True, rows, columns)
    assert isinstance(H.block("query.head.1", "out.head.2"), KroneckerSum)
    check_operator(H)


def test_single_products_know_their_spectra():
    g = torch.Generator().manual_seed(8)
    a, b = torch.randn(3, 3, generator=g).double(), torch.randn(2, 2, generator=g).double()
    H = KroneckerSum(a + a.T, b @ b.T)
    close(H.eigenvalues(), torch.linalg.eigvalsh(H.dense()))
    close(H.singular_values(), torch.linalg.svdvals(H.dense()))
    close(
        KroneckerSum(a, b, crossed=True).singular_values(), torch.linalg.svdvals(KroneckerSum(a, b).dense())
    )


def test_value_block_spectrum_is_that_of_the_first_moment():
    g = torch.Generator().manual_seed(9)
    M1 = torch.randn(5, 3, generator=g).double()
    H = KroneckerSum(M1.T @ M1, torch.eye(4, dtype=torch.float64))
    expected = torch.linalg.eigvalsh(M1.T @ M1).repeat_interleave(4)
    close(H.eigenvalues(), expected)


def test_messages():
    a, b = torch.ones(2, 2, 2), torch.ones(3, 2, 2)
    with pytest.raises(ValueError, match="expected as many matrices in both factors, got 2 and 3"):
        KroneckerSum(a, b)
    with pytest.raises(
        ValueError, match="expected a single Kronecker product for exact eigenvalues, got a sum of 2"
    ):
        KroneckerSum(a, a).eigenvalues()
    huge = KroneckerSum(
        (torch.ones(1, 4000), torch.ones(1, 4000)), (torch.ones(1, 4000), torch.ones(1, 4000))
    )
    with pytest.raises(MemoryError, match=r"takes .* GiB.*block"):
        huge.dense()
    # nothing of the matrix's size is needed for these
    close(huge.frobenius(), torch.tensor(4000.0**2), 1e-5)
    assert huge.apply(torch.ones(1, 16_000_000)).shape == (1, 16_000_000)


def test_spectral_bound_of_factors_near_underflow():
    """Moments of nearly one-hot attention: a quotient of norms overflows, the bound must not."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 2, 2, generator=g, dtype=torch.float64) for _ in range(2))
    sizes = torch.tensor([1.0, 1e-310, 1e-200], dtype=torch.float64)[:, None, None]
    for x, y in ((sizes * a, b), (a, sizes * b), (1e-310 * a, b), (0 * a, b)):
        H = KroneckerSum.of([Term(Full(x), Full(y), False)])
        bound, norm = float(H.spectral_bound()), float(torch.linalg.matrix_norm(H.dense(), ord=2))
        # 1e-14: rounding of the norms; 1e-320: numbers below 1e-308 have few digits
        assert norm <= bound * (1 + 1e-14) + 1e-320
        assert bound <= 10 * norm + 1e-320


def test_large_matrices_get_their_memory_elsewhere(monkeypatch):
    """The same matrix, in memory of huge pages and past the question of how much is free."""
    g = torch.Generator().manual_seed(5)
    H = KroneckerSum.of([random_term(3, 2, 3, 4, 2, False, (1, 0), g)])
    expected = H.dense()
    monkeypatch.setattr("curvlens.operator.ROOM", 0)
    assert torch.equal(H.dense(), expected)
    monkeypatch.setattr("curvlens.operator.free_memory", lambda device: 100)
    with pytest.raises(MemoryError, match=r"6 x 8 takes .* take a smaller block"):
        H.dense()
