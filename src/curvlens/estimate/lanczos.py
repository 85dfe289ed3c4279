"""Extreme eigenpairs of a symmetric operator from products: thick-restart block Lanczos.

The basis `V` (orthonormal rows) satisfies `H V^T = V^T T + F^T C`: `T = V H V^T` is projected, float64, and the
rows of `F`, orthogonal to the basis, are the directions not yet explored. A step moves rows of `F` into the basis
and puts what their images leave over in their place. Start vectors, blocks, restarts (Wu, Simon 2000), rows of
`F` that wait, and fresh random rows after a breakdown are all one case of this identity.

Lanczos from one vector sees one copy of a repeated eigenvalue. So after convergence a random vector starts a chain
of its own in the rest of the space, where a copy that was missed is the largest thing, and shows (`copies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.estimate import vectors
from curvlens.estimate.copies import BEYOND, Chain, longest
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import pm, table
from curvlens.estimate.run import Run, identity
from curvlens.operator import Operator, free_memory

WHICH = ("LM", "LA", "SA", "both")


@dataclass(frozen=True, repr=False)
class Eigenpairs:
    """Eigenvalues in the order asked for, unit eigenvectors as columns, and true residuals `||H v - λ v||`."""

    which: str
    values: Tensor  # [k], float64
    vectors: Tensor  # [P, k]
    residuals: Tensor  # [k], float64; an eigenvalue lies within a residual of each value
    tol: float
    products: int
    converged: bool
    stopped: str = ""

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        state = "converged" if self.converged else f"not converged: {self.stopped}"
        head = f"{len(self)} eigenpairs, {self.which}, residuals to {self.tol:g} ({self.products} products, {state})"
        pairs = zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        return (
            head
            + "\n"
            + table(
                [["", "eigenvalue", "residual"]]
                + [[str(i), f"{v:.6g}", f"{r:.1e}"] for i, (v, r) in enumerate(pairs)]
            )
        )


def eigsh(
    H: Operator,
    k: int = 10,
    which: str = "LM",
    tol: float = 1e-3,
    start: Tensor | Eigenpairs | None = None,
    seed: int = 0,
    block: int = 1,
    basis: int | None = None,
    copies: bool = True,
    **budget: Any,
) -> Eigenpairs:
    """The k extreme eigenpairs of a symmetric operator.

    `which`: "LM" largest by magnitude, "LA" largest, "SA" smallest, "both" half of them from each end. A pair is
    converged when its residual is at most `tol |λ|`. `start`: vectors `[P, j]` or earlier eigenpairs near the wanted
    ones. `block` vectors a step share the work of an engine, at more products in all. `basis` vectors are kept
    at most (default `max(4 k, 40)`), in the operator's dtype on its device. `copies=False` leaves out the search
    for further copies of eigenvalues. `budget`: `max_products`, `max_minutes`, `checkpoint`, `progress` (see `Run`).
    Cost: one product a step, and one in the end that checks the residuals of all pairs at once: where they are not
    true to a tenth of the tolerance, they are computed again from k products. Up to `4 basis` vector operations a
    product.
    """
    _check(H, k, which, tol)
    n = H.domain.size
    capacity = min(n, max(4 * k, 40) if basis is None else basis)
    if capacity < min(n, k + 2 * block):
        raise ValueError(f"expected a basis of at least k + 2 block = {k + 2 * block} vectors, got {basis}")
    settings = identity(H, k=k, which=which, seed=seed, block=block, basis=capacity, copies=copies)
    with Run("eigenpairs", settings, **budget) as run:
        space = Krylov(H, run, capacity, seed)
        search = Search(space, k, which, tol, block, copies)
        state = run.restore()
        if state is None:
            space.begin(block, _rows(start, H))
        else:
            space.load(state)
            search.load(state)
        while search.step():
            run.step(lambda: {**space.state(), **search.state()}, None, search.shown())
        return search.result()


def _check(H: Operator, k: int, which: str, tol: float) -> None:
    if not H.symmetric:
        raise ValueError(f"expected a symmetric operator for eigenpairs, got {H}; take H + H.T or H.T @ H")
    if which not in WHICH:
        raise ValueError(f"expected which to be one of {', '.join(WHICH)}, got {which!r}")
    if not tol > 0:
        raise ValueError(f"expected a positive tolerance, got {tol}")
    if not 1 <= k <= H.domain.size:
        raise ValueError(f"expected k from 1 to {H.domain.size}, got {k}")


def _rows(start: Tensor | Eigenpairs | None, H: Operator) -> Tensor | None:
    if start is None:
        return None
    columns = start.vectors if isinstance(start, Eigenpairs) else start
    columns = columns[:, None] if columns.dim() == 1 else columns
    if columns.shape[0] != H.domain.size:
        raise ValueError(f"expected start vectors [{H.domain.size}, j], got {list(columns.shape)}")
    return columns.T.to(H.device, H.dtype)


class Krylov:
    """The basis, what the operator is on it, and the directions that wait: `H V^T = V^T T + F^T C`."""

    def __init__(self, H: Operator, run: Run, capacity: int, seed: int):
        need, free = (capacity + 4) * H.domain.size * H.dtype.itemsize, free_memory(H.device)
        if need > free:
            raise MemoryError(
                f"a basis of {capacity} vectors takes {need / 2**30:,.1f} GiB and {free / 2**30:,.1f} GiB are free; "
                "give a smaller basis=, at least k + 2"
            )
        self.H, self.run, self.seed = H, run, seed
        self.epsilon = torch.finfo(H.dtype).eps
        self._basis = torch.empty(capacity, H.domain.size, dtype=H.dtype, device=H.device)
        self.size = 0
        self.projected = torch.zeros(0, 0, dtype=torch.float64)  # T
        self.pending = self._basis[:0].clone()  # F
        self.couplings = torch.zeros(0, 0, dtype=torch.float64)  # C
        self.chains: list[int] = []  # which chain each pending row continues; the latest is the highest
        self.drawn = 0  # random vectors so far

    @property
    def basis(self) -> Tensor:
        return self._basis[: self.size]

    @property
    def capacity(self) -> int:
        return len(self._basis)

    def begin(self, block: int, start: Tensor | None) -> None:
        for row in () if start is None else start:
            self._wait(row[None], 0)
        for _ in range(block if start is None else 0):
            self.add_random(0)

    def add_random(self, chain: int) -> None:
        """A random direction waits: it belongs to no residual, so its couplings are zero."""
        self._wait(probes_like(self.H, [self.drawn], self.seed, "gaussian"), chain)
        self.drawn += 1

    def _wait(self, row: Tensor, chain: int) -> None:
        row = row.clone()
        vectors.project_out(row, self.basis)
        self.pending = torch.cat([self.pending, row])
        self.couplings = torch.cat([self.couplings, torch.zeros(1, self.size, dtype=torch.float64)])
        self.chains.append(chain)

    def expand(self, rows: list[int]) -> int:
        """Move pending rows into the basis, at one product each; the number that were new directions."""
        fresh, _, kept = vectors.extend(self.basis, self.pending[rows], 10 * self.epsilon)
        stay = [i for i in range(len(self.pending)) if i not in rows]
        grown = [self.chains[rows[i]] for i in kept]
        pending, couplings = self.pending[stay], self.couplings[stay]
        self.chains = [self.chains[i] for i in stay]
        count = len(fresh)
        if count:
            images = self.run.apply(self.H, fresh)
            old = self.size
            self._basis[old : old + count] = fresh
            self.size += count
            entries = vectors.project_out(images, self.basis, passes=1)
            self._enlarge(entries, count)
            vectors.project_out(pending, fresh, passes=1)
            pending = torch.cat([pending, images])
            couplings = torch.nn.functional.pad(couplings, (0, count, 0, count))
            couplings[len(stay) :, old:] = torch.eye(count, dtype=torch.float64)
            self.chains += grown
        self.pending, self.couplings = pending, couplings
        return count

    def _enlarge(self, entries: Tensor, count: int) -> None:
        old = self.size - count
        grown = torch.zeros(self.size, self.size, dtype=torch.float64)
        grown[:old, :old] = self.projected
        grown[old:], grown[:, old:] = entries, entries.T
        grown[old:, old:] = (entries[:, old:] + entries[:, old:].T) / 2
        self.projected = grown

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values `[m]`, their coordinates (columns) and residual norms, without a product."""
        values, coordinates = torch.linalg.eigh(self.projected)
        mixed = self.couplings @ coordinates
        gram = vectors.gram(self.pending, self.pending)
        squares = (mixed * (gram @ mixed)).sum(0)
        return values, coordinates, squares.clamp(min=0).sqrt()

    def restart(self, coordinates: Tensor, values: Tensor) -> None:
        """Keep the given Ritz vectors alone; what waits stays."""
        vectors.combine_in_place(coordinates.T.contiguous(), self._basis[: self.size])
        self.size = len(values)
        self.projected = torch.diag(values)
        self.couplings = self.couplings @ coordinates

    def state(self) -> dict[str, Any]:
        return {
            "basis": self.basis.clone(),
            "projected": self.projected,
            "pending": self.pending,
            "couplings": self.couplings,
            "chains": self.chains,
            "drawn": self.drawn,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.size = len(state["basis"])
        self._basis[: self.size] = state["basis"]
        self.pending = state["pending"].to(self.H.device)
        self.projected, self.couplings = state["projected"], state["couplings"]
        self.chains, self.drawn = state["chains"], state["drawn"]


class Search:
    """Which directions to explore, when to restart, when to stop."""

    def __init__(self, space: Krylov, k: int, which: str, tol: float, block: int, copies: bool):
        self.space, self.k, self.which, self.tol = space, k, which, tol
        self.block, self.copies = block, copies
        self.size = space.H.domain.size
        self.chain: Chain | None = None  # the latest search for copies

    def step(self) -> bool:
        """Explore one block of directions; False at the end."""
        space, run = self.space, self.space.run
        values, coordinates, residuals = self.ritz = space.ritz()
        order = self.order(values)
        wanted = order[: self.k]
        open_ = [i for i in wanted if residuals[i] > self.threshold(values, i)]
        done = len(wanted) == self.k and not open_
        self.converging = self.k - len(open_)
        if space.size == self.size or (done and self._searched(values[wanted].tolist())):
            run.stopped = "tolerance"
            return False
        rows = self._search_rows() if done else self._residual_rows(open_ or wanted)
        rows = rows[: self.size - space.size]
        if not run.affordable(1, len(rows) + 1):  # the last product checks the residuals
            return False
        if space.size + self._room(done, len(rows)) > space.capacity:
            keep = order[: self._keep()]
            space.restart(coordinates[:, keep], values[keep])
            if self.chain is not None and self.chain.products:
                self.chain.coefficients = None
        space.expand(rows)
        if self.chain is not None:
            self.chain.surfaced |= not done
            self.chain.went_on(space.projected[-1, -1].item(), vectors.norm(space.pending[-1:]).sum().item())
        return True

    def _room(self, done: bool, rows: int) -> int:
        """Vectors to come without a restart: those of this step, or of the whole chain that it begins."""
        begins = done and self.chain is not None and not self.chain.products
        return longest(self.size) if begins else rows

    def order(self, values: Tensor) -> list[int]:
        """Ritz values from the most to the least wanted."""
        m = len(values)
        if self.which == "LM":
            return values.abs().argsort(descending=True, stable=True).tolist()
        ascending = list(range(m))  # as eigh returns them
        if self.which == "SA":
            return ascending
        if self.which == "LA":
            return ascending[::-1]
        return [m - 1 - i // 2 if i % 2 == 0 else i // 2 for i in range(m)]

    def threshold(self, values: Tensor, i: int) -> float:
        """`tol |λ|`; for a value at rounding of the largest, that of the rounding."""
        return self.tol * max(abs(values[i].item()), self._floor(values))

    def _floor(self, values: Tensor) -> float:
        """Below it a value is rounding of the largest."""
        return self.space.epsilon ** (2 / 3) * values.abs().max().item()

    def _keep(self) -> int:
        """Ritz vectors that survive a restart: the wanted, and half of the others."""
        return self.k + (self.space.capacity - self.k - self.block) // 2

    def _searched(self, found: list[float]) -> bool:
        """Whether a whole chain has brought nothing new to the wanted values; if not, see that one is under way."""
        chain = self.chain
        if not self.copies or (
            chain is not None
            and not chain.brought(found, self.tol, self._floor(self.ritz[0]))
            and chain.suffices(self._ends(found), self.size)
        ):
            return True
        if chain is None or chain.surfaced:
            self.chain = Chain(1 if chain is None else chain.number + 1, found)
            self.space.add_random(self.chain.number)
        return False

    def _ends(self, found: list[float]) -> list[tuple[float, bool]]:
        """Where a copy would count: beyond the least wanted value of each end, and whether that is the upper one."""
        if self.which == "LM":
            point = BEYOND * min(abs(value) for value in found)
            return [(point, True), (-point, False)]
        upper = found if self.which == "LA" else found[0::2] if self.which == "both" else []
        lower = found if self.which == "SA" else found[1::2] if self.which == "both" else []
        ends = [(min(upper), True)] if upper else []
        ends += [(max(lower), False)] if lower else []
        return [(x + (BEYOND - 1) * (abs(x) if up else -abs(x)), up) for x, up in ends]

    def _search_rows(self) -> list[int]:
        number = self.chain.number if self.chain else 0
        rows = [i for i, chain in enumerate(self.space.chains) if chain == number]
        return rows or self._new_direction()

    def _residual_rows(self, open_: list[int]) -> list[int]:
        """The pending rows that contribute most to the residuals of the wanted pairs that are open."""
        space = self.space
        if not space.size:
            return list(range(min(len(space.pending), space.capacity)))
        lengths = vectors.norm(space.pending)
        mixed = space.couplings @ self.ritz[1][:, open_]
        weights = lengths * mixed.norm(dim=1)
        negligible = 10 * space.epsilon * self.ritz[0].abs().max()
        rows = [i for i in weights.argsort(descending=True, stable=True).tolist() if weights[i] > negligible]
        return sorted(rows[: self.block]) or self._new_direction()

    def _new_direction(self) -> list[int]:
        """After a breakdown the basis is an invariant subspace: go on from a random vector."""
        self.space.add_random(self.chain.number if self.chain else 0)
        return [len(self.space.pending) - 1]

    def shown(self) -> str:
        values = self.ritz[0]
        if not len(values):
            return ""
        top = self.order(values)[0]
        return f"{self.converging}/{self.k}  λ {pm(values[top].item(), self.ritz[2][top].item())}"

    def state(self) -> dict[str, Any]:
        return {"chain": None if self.chain is None else vars(self.chain).copy()}

    def load(self, state: dict[str, Any]) -> None:
        self.chain = None if state["chain"] is None else Chain(**state["chain"])

    def result(self) -> Eigenpairs:
        space, run = self.space, self.space.run
        values, coordinates, residuals = self.ritz
        chosen = self.order(values)[: self.k]
        values, coordinates, residuals = values[chosen], coordinates[:, chosen], residuals[chosen]
        limits = torch.tensor([self.threshold(self.ritz[0], i) for i in chosen])
        rows = vectors.combine(coordinates.T, space.basis)
        if run.affordable(1) and len(rows):
            fault = self._fault(rows, values, coordinates)
            residuals = (residuals.square() + fault**2).sqrt()
            if fault > limits.min() / 10 and run.affordable(1, len(rows)):
                images = run.apply(space.H, rows)
                vectors.subtract(images, torch.diag(values), rows)
                residuals = vectors.norm(images)
        met = len(chosen) == self.k and bool((residuals <= limits).all())
        if run.stopped == "tolerance" and not met:
            run.stopped = "rounding"  # of the products: no basis brings the true residuals lower
        return Eigenpairs(
            self.which,
            values,
            rows.T,
            residuals,
            self.tol,
            run.products,
            run.stopped == "tolerance",
            run.stopped,
        )

    def _fault(self, rows: Tensor, values: Tensor, coordinates: Tensor) -> float:
        """How far the residuals `F^T C s_i` are from the true ones: by one product, with a sum of random signs.

        The square of the result is, on average over signs, the sum of the squared faults of all pairs.
        """
        space = self.space
        generator = torch.Generator().manual_seed(space.seed)
        signs = 2.0 * torch.randint(2, (len(rows),), generator=generator, dtype=torch.float64) - 1
        image = space.run.apply(space.H, vectors.combine(signs[None], rows))
        vectors.subtract(image, (signs * values)[None], rows)
        vectors.subtract(image, (space.couplings @ (coordinates @ signs))[None], space.pending)
        return vectors.norm(image).item()
