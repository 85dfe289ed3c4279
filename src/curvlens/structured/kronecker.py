"""KroneckerSum: sums over tokens of Kronecker products, plain and crossed, of which no matrix is ever formed.

`KS(a, b) = Σ_i a_i ⊗ b_i` has the entry `Σ_i a_i[m, p] b_i[r, q]` at row `(m, r)` and column `(p, q)`; the crossed
`KS×(a, b)` has it at row `(m, r)` and column `(q, p)`: a Kronecker product followed by a commutation. Every block
of the Hessian of attention, of a feed-forward layer or of a linear network is a sum of a few of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.operator import Operator
from curvlens.structured.inner import inner, inner_cost
from curvlens.structured.stacks import CHUNK, Stack, is_rank_one, stack_of
from curvlens.structured.terms import Term, add_product, joined, part_of, product, write_terms

ALL = slice(None)
SLAB = 2**18  # numbers in a slab of a matrix that is being written: 2 MiB in float64
MIRRORED = 8  # rows that a mirror's run of memory has at least: a line of the cache in float64


class KroneckerSum(Operator):
    """A sum of Kronecker sums over tokens, from the matrices of its columns `[p, q]` to those of its rows `[m, r]`.

    `a` and `b` are stacks `[n, m, p]` and `[n, r, q]`, single matrices, or pairs `(u [n, m], v [n, p])` that stand
    for the products `u_i v_iᵀ`. Sums of two are again one: `KroneckerSum(a, b) + KroneckerSum(c, d, crossed=True)`.

    With n tokens and matrices of size d: a product costs `O(n d²)` if one factor has rank one and `O(n d³)` otherwise,
    a norm `O(n² d²)`, the dense matrix `O(n d⁴)`.
    """

    def __init__(
        self,
        a: Stack | Tensor | tuple[Tensor, Tensor],
        b: Stack | Tensor | tuple[Tensor, Tensor],
        crossed: bool = False,
        codomain: Blocks | None = None,
        domain: Blocks | None = None,
    ):
        first, second = stack_of(a), stack_of(b)
        if first.n != second.n:
            raise ValueError(
                f"expected as many matrices in both factors, got {first.n} and {second.n}; sum the factor that "
                "goes with a constant one first"
            )
        self._set((Term(first, second, crossed),), codomain, domain)

    def _set(self, terms: tuple[Term, ...], codomain: Blocks | None, domain: Blocks | None) -> None:
        rows, columns = terms[0].rows, terms[0].columns
        codomain = codomain or Blocks.of({"rows": rows})
        domain = domain or (codomain if rows == columns else Blocks.of({"columns": columns}))
        if codomain.size != rows[0] * rows[1] or domain.size != columns[0] * columns[1]:
            raise ValueError(
                f"expected blocks of {rows} and {columns} entries for these factors, got {codomain} and {domain}"
            )
        super().__init__(codomain, domain, terms[0].a.dtype, terms[0].a.device)
        self.terms, self.rows, self.columns = terms, rows, columns

    @classmethod
    def of(
        cls, terms: list[Term], codomain: Blocks | None = None, domain: Blocks | None = None
    ) -> KroneckerSum:
        """The sum of terms; those that share a factor are joined."""
        operator = cls.__new__(cls)
        operator._set(tuple(joined(terms) if len(terms) > 1 else terms), codomain, domain)
        return operator

    def over(self, codomain: Blocks, domain: Blocks) -> KroneckerSum:
        """The same sum between other blocks of the same sizes."""
        operator = KroneckerSum.__new__(KroneckerSum)
        operator._set(self.terms, codomain, domain)
        return operator

    # -- as an operator

    def apply(self, stack: Tensor) -> Tensor:
        V = stack.unflatten(-1, self.columns)
        out = stack.new_zeros(len(stack), *self.rows)
        for term in self.terms:
            add_product(out, term, V)
        return out.flatten(1)

    def _adjoint(self) -> KroneckerSum:
        return KroneckerSum.of([term.T for term in self.terms], self.domain, self.codomain)

    def __add__(self, other: Operator) -> Operator:
        if isinstance(other, KroneckerSum) and (self.rows, self.columns) == (other.rows, other.columns):
            return KroneckerSum.of([*self.terms, *other.terms], self.codomain, self.domain)
        return super().__add__(other)

    def __mul__(self, factor: float) -> Operator:
        if isinstance(factor, (int, float)):
            scaled = [Term(t.a.scaled(factor), t.b, t.crossed) for t in self.terms]
            return KroneckerSum.of(scaled, self.codomain, self.domain)
        return super().__mul__(factor)

    __rmul__ = __mul__

    def __sub__(self, other: Operator) -> Operator:
        return self + (-1) * other if isinstance(other, Operator) else NotImplemented

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        if len(rows) == len(columns) == len(self.codomain) == len(self.domain) == 1:
            r, c = _ranges(self.codomain, rows, self.rows), _ranges(self.domain, columns, self.columns)
            if r is not None and c is not None:
                terms = [part_of(term, r, c) for term in self.terms]
                return KroneckerSum.of(terms, rows, columns)
        return super()._block(rows, columns)

    # -- the matrix and its parts

    def dense(self) -> Tensor:
        matrix = self._empty()
        self.write(matrix.view(*self.rows, *self.columns))
        return matrix

    def write(self, out: Tensor, mirror: Tensor | None = None) -> None:
        """Write the matrix into `out` `[m, r, x, y]`, and its transpose into `mirror` `[x, y, m, r]`; any views.

        The rows are taken in slabs that stay in the cache between the products, their place, and their mirror:
        beyond that, only the memory's speed counts. A slab is a range of the rows' one index, of the side that a
        factor of rank one leaves whole.
        """
        m, r, x, y = out.shape
        over_r = is_rank_one(self.terms[0].a)
        whole, across = (r, m) if over_r else (m, r)
        step = min(whole, max(MIRRORED if over_r else 1, SLAB // (across * x * y)))
        buffer = torch.empty(step * across * x * y, dtype=self.dtype, device=self.device)
        turned = None if mirror is None else torch.empty_like(buffer)
        for start in range(0, whole, step):
            where = slice(start, min(whole, start + step))
            rows = (ALL, where) if over_r else (where, ALL)
            place = out[rows]
            parts = [term if step == whole else part_of(term, rows, (ALL, ALL)) for term in self.terms]
            if mirror is None and len(parts) == 1:
                place.copy_(product(parts[0]))
                continue
            slab = buffer[: place.numel()].view(place.shape)
            write_terms(slab, parts)
            place.copy_(slab)
            if mirror is not None and turned is not None:
                columns = turned[: slab.numel()].view(x * y, -1)
                columns.copy_(slab.view(-1, x * y).T)  # fast, which a turn of four dimensions is not
                mirror[:, :, rows[0], rows[1]].copy_(columns.view(x, y, *place.shape[:2]))

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Any slice of the matrix: the rows and columns with the given numbers, `[len(rows), len(columns)]`."""
        m, r = (x[:, None] for x in _unravel(rows, self.rows))
        x, y = _unravel(columns, self.columns)
        out = torch.zeros(len(rows), len(columns), dtype=self.dtype, device=self.device)
        for term in self.terms:
            p, q = (y, x) if term.crossed else (x, y)
            step = max(1, CHUNK // max(1, out.numel()))
            for start in range(0, term.a.n, step):
                where = slice(start, start + step)
                out += (term.a.tokens(where).entries(m, p) * term.b.tokens(where).entries(r, q)).sum(0)
        return out

    def diagonal(self) -> Tensor:
        if self.rows != self.columns:
            raise ValueError(f"expected the same rows and columns for a diagonal, got shape {self.shape}")
        out = torch.zeros(self.rows, dtype=self.dtype, device=self.device)
        for term in self.terms:
            if term.crossed:  # entry ((m, r), (m, r)) is Σ_i a_i[m, r] b_i[r, m]
                out += torch.einsum("nmr,nrm->mr", term.a.full(), term.b.full())
            else:
                out += term.a.diagonals().T @ term.b.diagonals()
        return out.flatten()

    def trace(self) -> Tensor:
        """`Σ_i tr a_i tr b_i`, crossed `Σ_i tr(a_i b_i)`."""
        return self.diagonal().sum()

    # -- norms

    def inner(self, other: KroneckerSum) -> Tensor:
        """The sum of the products of all entries of the two matrices, from Gram matrices over tokens."""
        total, _ = _inner(self, other)
        return total

    def frobenius(self) -> Tensor:
        """`‖H‖_F`, exact: `Σ_ij ⟨a_i, a_j⟩⟨b_i, b_j⟩` over tokens, or from the entries where that is cheaper.

        The entries are made a slab at a time, so neither way takes the memory of the matrix.
        A sum of Gram products loses the digits that cancel in it: where most of it cancels, the entries are taken.
        """
        rows, columns = self.shape
        by_entries = sum(term.a.n for term in self.terms) * rows * columns
        by_tokens = sum(inner_cost(s, t) for i, s in enumerate(self.terms) for t in self.terms[i:])
        if by_tokens < by_entries:
            square, size = _inner(self, self)
            if not size.isfinite():
                return self._frobenius_scaled()
            if square > 1e-4 * size or size == 0:
                return square.clamp(min=0).sqrt()
        return self._frobenius_by_entries()

    def _frobenius_scaled(self) -> Tensor:
        """The norm where squares of the factors overflow; not finite only if entries are not."""
        sizes = [term.a.full().abs().max() * term.b.full().abs().max() for term in self.terms]
        size = float(torch.stack(sizes).max())
        if not 2 < size < float("inf"):
            return self._frobenius_by_entries()
        scaled = self * (1 / size)
        assert isinstance(scaled, KroneckerSum)
        return size * scaled.frobenius()

    def _frobenius_by_entries(self) -> Tensor:
        (m, r), columns = self.rows, self.shape[1]
        square = torch.zeros((), dtype=self.dtype, device=self.device)
        step = max(1, CHUNK // (r * columns))
        for start in range(0, m, step):
            rows = slice(start, min(m, start + step))
            slab = torch.empty(rows.stop - start, r, *self.columns, dtype=self.dtype, device=self.device)
            KroneckerSum.of([part_of(term, (rows, ALL), (ALL, ALL)) for term in self.terms]).write(slab)
            square += slab.square().sum()
        if square.isnan():
            raise ValueError(
                f"expected finite entries, got NaN of {self}: what its factors are made of, or their "
                f"products, overflow {self.dtype}; scale the tokens or weights down"
            )
        return square.sqrt()

    def spectral_bound(self) -> Tensor:
        """An upper bound of the spectral norm, the smallest of four for each sum over tokens.

        A commutation does not change the norm, so both kinds have those of `Σ_i a_i ⊗ b_i`:
        `Σ_i ‖a_i‖‖b_i‖`; `‖Σ a_i a_iᵀ‖^½ ‖Σ b_iᵀ b_i‖^½` and the same with `aᵀ`, `bᵀ`, after balancing the norms of
        `a_i` and `b_i`; and for positive semidefinite factors `‖Σ ‖b_i‖ a_i‖` and `‖Σ ‖a_i‖ b_i‖`, since
        `a_i ⊗ b_i ⪯ ‖b_i‖ a_i ⊗ I`.
        """
        return torch.stack([_spectral_bound(term.a.full(), term.b.full()) for term in self.terms]).sum()

    # -- spectra that the structure gives

    def singular_values(self) -> Tensor:
        """All singular values, descending, of a single Kronecker product: `σ_i(a) σ_j(b)`."""
        term = self._single("singular values")
        a, b = (torch.linalg.svdvals(x.full()[0]) for x in (term.a, term.b))
        values = torch.outer(a, b).flatten()
        zeros = values.new_zeros(min(self.shape) - len(values))
        return torch.cat([values, zeros]).sort(descending=True).values

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending, of a single symmetric Kronecker product: `λ_i(a) λ_j(b)`."""
        term = self._single("eigenvalues")
        a, b = term.a.full()[0], term.b.full()[0]
        for x in (a, b):
            if x.shape[0] != x.shape[1] or not _symmetric(x):
                raise ValueError(f"expected symmetric factors, got one of shape {list(x.shape)}; {_SPECTRA}")
        if term.crossed:
            raise ValueError(f"expected a plain Kronecker product, got a crossed one; {_SPECTRA}")
        values = [torch.linalg.eigvalsh((x + x.T) / 2) for x in (a, b)]
        return torch.outer(*values).flatten().sort().values

    def _single(self, what: str) -> Term:
        if len(self.terms) != 1 or self.terms[0].a.n != 1:
            count = sum(term.a.n for term in self.terms)
            raise ValueError(
                f"expected a single Kronecker product for exact {what}, got a sum of {count}; {_SPECTRA}"
            )
        return self.terms[0]


_SPECTRA = "take torch.linalg.eigvalsh(H.dense()) for a small matrix, curvlens.eigsh(H) for a few pairs of a large one"


def _ranges(whole: Blocks, part: Blocks, shape: tuple[int, int]) -> tuple[slice, slice] | None:
    """The rows and columns that a block or one of its heads takes of a matrix; None if it is no such range."""
    if part.names == whole.names:
        return ALL, ALL
    block = whole[0]
    heads = {head.name: i for i, head in enumerate(block.split_heads())}
    if block.heads is None or block.shape != shape or part[0].name not in heads:
        return None
    count, dim = block.heads
    width, head = shape[dim] // count, heads[part[0].name]
    span = slice(head * width, (head + 1) * width)
    return (span, ALL) if dim == 0 else (ALL, span)


def _unravel(index: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return index // shape[1], index % shape[1]


def _inner(x: KroneckerSum, y: KroneckerSum) -> tuple[Tensor, Tensor]:
    """The inner product, and the sum of the absolute values of its parts."""
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    size = torch.zeros((), dtype=x.dtype, device=x.device)
    for i, s in enumerate(x.terms):
        for j, t in enumerate(y.terms):
            if x is y and j < i:
                continue
            value, magnitude = inner(s, t)
            weight = 2 if x is y and j > i else 1
            total += weight * value
            size += weight * magnitude
    return total, size


def _spectral_bound(a: Tensor, b: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm
    size_a, size_b = norm(a, ord=2), norm(b, ord=2)
    bounds = [(size_a * size_b).sum()]
    keep = (size_a > 0) & (size_b > 0)
    # a quotient of roots: nearly one-hot attention has moments near 1e-310, whose reciprocals overflow
    balance = (size_b[keep].sqrt() / size_a[keep].sqrt())[:, None, None]
    x, y = a[keep] * balance, b[keep] / balance

    def mixed(x: Tensor, y: Tensor) -> Tensor:
        rows = torch.einsum("nmp,nkp->mk", x, x)
        columns = torch.einsum("nrq,nrk->qk", y, y)
        return norm(rows, ord=2).sqrt() * norm(columns, ord=2).sqrt()

    bounds += [mixed(x, y), mixed(x.mT, y.mT)]
    if _semidefinite(a) and _semidefinite(b):
        bounds += [norm(torch.einsum("n,nmp->mp", size_b, a), ord=2)]
        bounds += [norm(torch.einsum("n,nrq->rq", size_a, b), ord=2)]
    return torch.stack(bounds).min()


def _symmetric(x: Tensor) -> bool:
    """Up to the rounding of sums of about as many products as there are rows."""
    slack = 16 * x.shape[-1] * torch.finfo(x.dtype).eps
    return bool((x - x.mT).abs().max() <= slack * x.abs().max())


def _semidefinite(x: Tensor) -> bool:
    """Whether every matrix is positive semidefinite, up to the rounding of its own eigenvalues."""
    if x.shape[1] != x.shape[2] or not _symmetric(x):
        return False
    values = torch.linalg.eigvalsh(x)
    slack = 4 * x.shape[1] * torch.finfo(x.dtype).eps
    return bool((values[:, 0] >= -slack * values.abs().amax(1)).all())
