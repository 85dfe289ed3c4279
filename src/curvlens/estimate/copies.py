"""How sure a search for further copies of eigenvalues is.

Lanczos from one vector sees one copy of a repeated eigenvalue. A missed copy u is orthogonal to the whole basis V, so
it is an eigenvector of `(I - P) H (I - P)`, `P = V^T V`, to which a random unit vector w of the rest starts a chain of
its own. The chain's coefficients α, β define the polynomials orthonormal in the spectral measure of w:

    β_i p_i = (x - α_i) p_{i-1} - β_{i-1} p_{i-2},    p_0 = 1.

No mass at λ can exceed the Christoffel function `1 / sum p_i(λ)^2`, so neither can `(u^T w)^2`. As w is random,
`sqrt(n) u^T w` is a standard normal: so small a mass has the probability that `risk` gives. Beyond all zeros every
`p_i^2` grows, so what holds at a point holds for all copies beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MISS = 0.1  # the probability with which a copy may be missed
BEYOND = 1.25  # that of a copy so much larger than the smallest wanted eigenvalue


@dataclass
class Chain:
    """One search: what was known before it, and what it has shown."""

    number: int
    known: list[float]  # the wanted values when it began
    products: int = 0
    coefficients: list[tuple[float, float]] | None = field(
        default_factory=list
    )  # None after a restart within
    surfaced: bool = False  # whether it has changed the wanted values

    def went_on(self, alpha: float, beta: float) -> None:
        self.products += 1
        if self.coefficients is not None:
            self.coefficients.append((alpha, beta))

    def brought(self, found: list[float], tol: float, floor: float) -> bool:
        """Whether the wanted values are other ones than before; below the floor they are rounding."""
        pairs = zip(sorted(self.known), sorted(found), strict=True)
        self.surfaced |= any(abs(a - b) > tol * max(abs(b), floor) for a, b in pairs)
        return self.surfaced

    def suffices(self, ends: list[tuple[float, bool]], size: int) -> bool:
        """Whether copies beyond the ends, pairs of a point and "upper", are unlikely enough."""
        if self.products >= longest(size):
            return True
        chain = self.coefficients
        if not chain:
            return False
        return all(risk(chain, point, upper, size) <= MISS for point, upper in ends)


def risk(chain: list[tuple[float, float]], point: float, upper: bool, size: int) -> float:
    """The probability that an operator of n dimensions has an eigenvector beyond a point that the chain does not show.

    `chain`: α_1, β_1, α_2, β_2, …, one pair a product. One where a zero lies beyond the point: then something shows.
    """
    before, now, total, last = 0.0, 1.0, 1.0, 0.0
    for alpha, beta in chain:
        step = (
            (point - alpha) if upper else (alpha - point)
        )  # of -H at -point: positive until a zero is passed
        before, now = now, step * now - last * before
        if now <= 0:
            return 1.0
        if not beta or not math.isfinite(now / beta):
            return 0.0  # the chain spans all that w can reach
        now, last = now / beta, beta
        total += now * now
    return math.erf(math.sqrt(size / total / 2))


def longest(size: int) -> int:
    """Products after which a chain ends whatever it has shown.

    By Kuczynski and Wozniakowski (1992) j products find half of the largest eigenvalue of a semidefinite operator
    except with probability `1.648 sqrt(n) exp(-(2j - 1) sqrt(1/2))`.
    """
    return math.ceil(math.log(1.648 * math.sqrt(size) / MISS) / (2 * math.sqrt(0.5)) + 0.5)
