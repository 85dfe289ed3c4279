"""Paper A, appendices A to C: matrix calculus, Jacobians, derivatives of softmax, moments."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvlens.exact import literal
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.literal import commutation, khatri_rao, kron, rows_of, vec
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.claims import Check, Equal, claim
from curvlens.exact.verification.problems import Draw, attentions, eye, large


def column(x: Tensor) -> Tensor:
    return vec(x)[:, None]


@claim("A", "Definition A.1", "the Kronecker product")
def kronecker_product(draw: Draw) -> Iterator[Check]:
    A, B = draw(2, 3), draw(4, 5)
    yield Equal(
        "blocks a_ij B",
        lambda: kron(A, B),
        lambda: torch.cat([torch.cat([a * B for a in row], 1) for row in A]),
    )
    X = draw(3, 5)
    yield Equal("(A ⊗ B) vec X = vec(A X Bᵀ)", lambda: kron(A, B) @ vec(X), lambda: vec(A @ X @ B.T))


@claim("A", "Definition A.2", "the Khatri-Rao product of block matrices")
def khatri_rao_product(draw: Draw) -> Iterator[Check]:
    A, B = ([[draw(*shape) for _ in range(3)] for _ in range(2)] for shape in ((2, 3), (4, 2)))

    def entries() -> Tensor:
        """Rows (block row, i, k), columns (block column, j, l)."""
        a, b = (torch.stack([torch.stack(row) for row in grid]) for grid in (A, B))
        return torch.einsum("rcij,rckl->rikcjl", a, b).reshape(16, 18)

    yield Equal("2 x 3 blocks", lambda: khatri_rao(A, B), entries)


@claim("A", "Equations 6-14", "rules of Kronecker products", "equation 13 prints the last vec I as vec A")
def rules(draw: Draw) -> Iterator[Check]:
    A, B, B2, C, D, E = draw(2, 3), draw(4, 5), draw(4, 5), draw(3, 2), draw(5, 3), draw(5, 2)
    a, b = draw(3, 1), draw(4, 1)
    yield Equal("6", lambda: kron(A, B + B2), lambda: kron(A, B) + kron(A, B2))
    yield Equal("7", lambda: kron(3 * A, B), lambda: 3 * kron(A, B))
    yield Equal("8", lambda: kron(kron(A, B), C), lambda: kron(A, kron(B, C)))
    yield Equal("9", lambda: kron(A, B) @ kron(C, D), lambda: kron(A @ C, B @ D))
    yield Equal("10", lambda: kron(A, B).T, lambda: kron(A.T, B.T))
    yield Equal("11", lambda: kron(a.T, b), lambda: b @ a.T)
    yield Equal("11, exchanged", lambda: kron(b, a.T), lambda: b @ a.T)
    yield Equal("12", lambda: B @ kron(a.T, E), lambda: kron(a.T, B @ E))
    yield Equal("13", lambda: kron(A, eye(3)) @ vec(eye(3)), lambda: vec(A))
    several, F, G = draw(4, 2, 3), draw(4, 5), draw(3, 2)
    yield Equal(
        "14",
        lambda: torch.block_diag(*several) @ kron(F, G),
        lambda: torch.cat([kron(row[None], one @ G) for row, one in zip(F, several, strict=True)]),
    )


@claim("A", "Equations 15-18", "derivatives of matrix functions")
def matrix_derivatives(draw: Draw) -> Iterator[Check]:
    A, B, X = draw(2, 3), draw(4, 5), draw(3, 4)
    yield Equal("15", lambda: kron(A, B.T), lambda: autodiff.first(lambda x: A @ x @ B, X))
    n, q, p, r = 3, 4, 2, 5
    Y, layout = draw(p, r), kron(eye(n), commutation(q, p), eye(r))
    yield Equal(
        "16",
        lambda: layout @ kron(eye(n * q), column(Y)),
        lambda: autodiff.first(lambda x: torch.kron(x, Y), X),
    )
    yield Equal(
        "17",
        lambda: layout @ kron(column(X), eye(p * r)),
        lambda: autodiff.first(lambda y: torch.kron(X, y), Y),
    )
    yield Equal("18", lambda: commutation(n, q), lambda: autodiff.first(lambda x: x.T, X))


@claim("A", "Lemma B.1", "Jacobians of self-attention", "with that by the key weights, omitted in print")
def jacobians(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):

        def printed() -> dict[str, Tensor]:
            W, X, layer = p.W, p.X, p.layer()
            A = literal.attention(layer, X)
            slope = kron(eye(len(X)), W["value"].T @ X.T) @ literal.softmax_first(A)
            by_query = slope @ kron(X, X @ W["key"]) / math.sqrt(W["query"].shape[1])
            return {"value": kron(A @ X, eye(len(W["value"]))), "query": by_query}

        yield Equal(f"{p.case}, as printed", printed, lambda: autodiff.jacobian(p.plain, p.W), p.edge)
    for p in attentions(draw):

        def closed() -> dict[str, Tensor]:
            J = AttentionLayer(p.layer()).jacobian(p.X)
            return {name: J.block("output", name).dense() for name in p.W}

        yield Equal(p.case, closed, lambda: autodiff.jacobian(p.plain, p.W), p.edge)


@claim("A", "Lemma B.2", "commutation matrices and equation 20")
def commutation_matrices(draw: Draw) -> Iterator[Check]:
    for m, n in ((2, 3), (3, 3), (4, 1)):
        W = draw(m, n)
        yield Equal(f"K vec W = vec Wᵀ, {m} x {n}", lambda: commutation(*W.shape) @ vec(W), lambda: vec(W.T))
        yield Equal(
            f"equation 20, {m} x {n}",
            lambda: kron(eye(m), commutation(m, n)) @ kron(column(eye(m)), eye(n)),
            lambda: kron(commutation(n, m), eye(m)) @ kron(eye(n), column(eye(m))),
        )


@claim(
    "A",
    "Lemma B.3",
    "(I ⊗ K)(vec A ⊗ A) = (A ⊗ A ⊗ I) S",
    "its K_{m,n} is K(n, m) in the notation of Lemma B.2, as in all printed formulas",
)
def shuffled(draw: Draw) -> Iterator[Check]:
    for m, n in ((2, 3), (3, 2), (3, 3)):
        A = draw(m, n)
        yield Equal(
            f"{m} x {n}",
            lambda: kron(A, A, eye(n)) @ literal.shuffle(n, A),
            # K_{m,n} takes vec W, W n x m, to vec Wᵀ: Lemma B.2 turns its indices round, K_{m,n} = K(n, m)
            lambda: kron(eye(m), commutation(n, m)) @ kron(column(A), A),
        )


def softmax_maps(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    """Scores of 1 to 4 tokens, uniform and nearly one-hot ones too."""
    for L in (1, 2, 3, 4):
        yield f"L = {L}", draw(L, L)
    yield "uniform", torch.zeros(3, 3, dtype=torch.float64)
    yield "large logits", large(draw(3, 3))


def rows_softmax(L: int):  # type: ignore[no-untyped-def]
    return lambda t: autodiff.softmax(t.view(L, L)).flatten()


@claim("A", "Equation 19", "the Jacobian of row-wise softmax")
def softmax_jacobian(draw: Draw) -> Iterator[Check]:
    for case, T in softmax_maps(draw):
        yield Equal(
            case,
            lambda: literal.softmax_first(T.softmax(-1)),
            lambda: autodiff.first(autodiff.softmax, T),
            joint=len(T) == 1,
        )


@claim("A", "Lemma C.1", "the second derivative of row-wise softmax")
def softmax_second(draw: Draw) -> Iterator[Check]:
    for case, T in softmax_maps(draw):
        yield Equal(
            case,
            lambda: literal.softmax_second(T.softmax(-1)),
            lambda: autodiff.second(rows_softmax(len(T)), T.flatten()).reshape(len(T) ** 4, -1),
        )
    T = draw(3, 3)

    def khatri_rao_form() -> Tensor:
        A, unit = T.softmax(-1), eye(3)
        columns = []
        for i, a in enumerate(A):
            entries = [[literal.softmax_second_entry(a, j)] for j in range(3)]
            columns.append(khatri_rao([[unit[i][:, None]]] * 3, entries))
        return torch.block_diag(*columns)

    yield Equal(
        "equation 23",
        khatri_rao_form,
        lambda: autodiff.second(rows_softmax(3), T.flatten()).reshape(81, 9),
    )


@claim("A", "Remark C.1", "the same for two tokens, entry by entry")
def softmax_of_two(draw: Draw) -> Iterator[Check]:
    T = draw(2, 2)

    def printed() -> Tensor:
        H = torch.zeros(16, 4, dtype=torch.float64)
        for i, a in enumerate(T.softmax(-1)):
            b, off = 1 - 2 * a, -a[0] * a[1]
            by_first = [(a[0] - a[0] ** 2) * b[0], off * b[0], off * b[0], off * b[1]]
            by_second = [off * b[0], off * b[1], off * b[1], (a[1] - a[1] ** 2) * b[1]]
            for j, entries in enumerate((by_first, by_second)):
                H.view(2, 2, 2, 2, 2, 2)[i, j, i, :, i, :] = torch.stack(entries).view(2, 2)
        return H

    yield Equal("as printed", printed, lambda: autodiff.second(rows_softmax(2), T.flatten()).reshape(16, 4))


@claim(
    "A",
    "Remark 3.1",
    "Z1 = X * M2, Z2 = (I ⊗ K ⊗ I)(X * Xᵀ * M3)",
    "its proof ends with M3 where Z2 is meant",
)
def moments_in_Z(draw: Draw) -> Iterator[Check]:
    cases = [(f"L = {L}, d = {d}", draw(L, L), draw(L, d)) for L, d in ((1, 2), (3, 2), (4, 3))]
    cases += [("large logits", large(draw(3, 3)), draw(3, 2)), ("uniform", 0 * draw(3, 3), draw(3, 2))]
    for case, T, X in cases:
        L, d = X.shape

        def closed() -> dict[str, Tensor]:
            A = T.softmax(-1)
            squares = [[kron(x[None], x[:, None])] for x in X]
            third = khatri_rao(squares, rows_of(literal.M3(A, X), d * d))
            first = khatri_rao(rows_of(X), rows_of(literal.M2(A, X), d))
            return {"Z1": first, "Z2": kron(eye(L), commutation(d, d), eye(d)) @ third}

        def derived() -> dict[str, Tensor]:
            by_scores = autodiff.first(autodiff.softmax, T)
            twice = autodiff.second(rows_softmax(L), T.flatten()).reshape(L**4, -1)
            right = kron(X, X)
            first = kron(eye(L), X.T) @ by_scores @ right
            return {"Z1": first, "Z2": kron(eye(L), X.T, X.T, X.T) @ twice @ right}

        yield Equal(case, closed, derived, joint=L == 1)
