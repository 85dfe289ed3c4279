"""Paper A, section 4 and appendix D: linear attention, one query-key matrix, temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.attention_hessian import AttentionResult
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.literal import commutation, kron, vec
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.attention import dense
from curvlens.exact.verification.autodiff import Blocks, Weights
from curvlens.exact.verification.claims import Bound, Check, Equal, claim
from curvlens.exact.verification.problems import Attention, Draw, attention, attentions, eye

QK = ["query", "key"]


def linear_attention(W: Weights, X: Tensor) -> Tensor:
    return autodiff.scores(W, X) @ X @ W["value"]


@claim("A", "Remark 4.1", "the Hessian of linear self-attention")
def remark_41(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):
        f = partial(linear_attention, X=p.X)
        yield Equal(
            f"{p.case}, H_o as printed",
            lambda: printed_linear(p)[0],
            lambda: autodiff.outer(f, p.W, p.loss),
            p.edge,
        )
        yield Equal(
            f"{p.case}, H_f as printed",
            lambda: printed_linear(p)[1],
            lambda: autodiff.functional(f, p.W, p.loss),
            joint=True,
        )
    for p in attentions(draw):
        f, layer = partial(linear_attention, X=p.X), p.layer(activation="linear")
        yield Equal(
            f"{p.case}, H_o",
            lambda: dense(exact.hessian(layer, p.X, p.Y).outer),
            lambda: autodiff.outer(f, p.W, p.loss),
            p.edge,
        )
        yield Equal(
            f"{p.case}, H_f",
            lambda: dense(exact.hessian(layer, p.X, p.Y).functional),
            lambda: autodiff.functional(f, p.W, p.loss),
            joint=True,
        )


def printed_linear(p: Attention) -> tuple[Blocks, Blocks]:
    """Remark 4.1 to the letter; `Σ = XᵀX / L`."""
    (L, d), X, (W_Q, W_K, W_V) = p.X.shape, p.X, p.W.values()
    k, S = W_Q.shape[1], p.X.T @ p.X / L
    c, inner = 2 * L**2 / (d * k), W_K.T @ S @ W_V
    scores = S @ W_K @ W_Q.T @ S
    H_o = {
        ("value", "value"): c * kron(scores @ W_Q @ W_K.T @ S, eye(d)),
        ("query", "query"): c * kron(S, inner @ inner.T),
        ("value", "query"): c * kron(scores, inner.T),
        ("query", "key"): c * kron(S @ W_Q, inner @ (S @ W_V).T) @ commutation(d, k),
    }
    delta, f, shuffle = vec(linear_attention(p.W, X) - p.Y)[None], 2 / (d * k**0.5), literal.shuffle(d, X)
    score = kron(delta @ kron(X, W_V.T @ S), eye(d)) @ shuffle
    H_f = {
        ("value", "query"): f * kron(delta, eye(d * d)) @ kron(eye(L), shuffle) @ kron(X, S @ W_K),
        ("query", "key"): f * kron(score, eye(k)),
        **{(name, name): torch.zeros(w.numel(), w.numel(), dtype=X.dtype) for name, w in p.W.items()},
    }
    return H_o, H_f


@claim("A", "Section 4.1", "without softmax diagonal blocks are positive semidefinite")
def semidefinite(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):
        f, layer = partial(linear_attention, X=p.X), p.layer(activation="linear")

        def eigenvalues() -> dict[str, Tensor]:
            H = exact.hessian(layer, p.X, p.Y).total
            return {name: torch.linalg.eigvalsh(H.block(name).dense()) for name in p.W}

        def sizes() -> dict[str, Tensor]:
            H = autodiff.total(f, p.W, p.loss)
            return {name: torch.linalg.svdvals(H[name, name]).flip(0) for name in p.W}

        yield Equal(f"{p.case}, eigenvalues are singular values", eigenvalues, sizes, p.edge)


@claim("A", "Section 4.1, depth", "D linear layers: H_o ~ σ^(2·3^D), diagonal of H_f ~ σ^(3^D)")
def depth(draw: Draw) -> Iterator[Check]:
    """Homogeneous to the last digit, so the closed form at `2 X` is autodiff's at `X` times a power of two."""
    for D in (1, 2, 3):
        W = {f"{i}.{name}": 0.7 * draw(2, 2) for i in range(D) for name in ("query", "key", "value")}
        X, g = draw(3, 2), draw(3, 2)

        def layer_of(i: int, W: Weights = W) -> AttentionLayer:
            weights = (W[f"{i}.{name}"] for name in ("query", "key", "value"))
            return AttentionLayer(exact.SelfAttention(*weights, activation="linear"))

        chain = exact.Chain([(str(i), layer_of(i)) for i in range(D)])

        def plain(W: Weights, X: Tensor = X, D: int = D) -> Tensor:
            for i in range(D):
                X = linear_attention({n: W[f"{i}.{n}"] for n in ("query", "key", "value")}, X)
            return X

        def diagonal(H: Blocks, factor: float = 1.0) -> Blocks:
            return {(a, b): factor * block for (a, b), block in H.items() if a == b}

        yield Equal(
            f"D = {D}, H_o",
            lambda: diagonal(dense(exact.hessian(chain, 2 * X, g=g, B=1.0).outer)),
            lambda: diagonal(autodiff.outer(plain, W, lambda F: F.square().sum() / 2), 2.0 ** (2 * 3**D)),
        )
        yield Equal(
            f"D = {D}, H_f",
            lambda: diagonal(dense(exact.hessian(chain, 2 * X, g=g).functional)),
            lambda: diagonal(autodiff.curvature(plain, W, g), 2.0 ** (3**D)),
            joint=True,  # the last layer's are zero
        )


@claim("A", "Lemma 4.1", "the Hessian with one query-key matrix", "print drops the factor 2/(L d_V)")
def lemma_41(draw: Draw) -> Iterator[Check]:
    for p in single(draw, square=True):
        f = partial(single_matrix, X=p.X)
        yield Equal(
            f"{p.case}, as printed, times 2/(L d_V)",
            lambda: {("query_key", "query_key"): 2 / p.Y.numel() * U(attention_of(p), p)},
            lambda: autodiff.total(f, p.W, p.loss),
            p.edge,
        )
    for p in single(draw):
        f = partial(single_matrix, X=p.X)
        layer = exact.SelfAttention(W_QK=p.W["query_key"], W_V=p.W["value"])
        yield Equal(
            p.case,
            lambda: dense(exact.hessian(layer, p.X, p.Y).total),
            lambda: autodiff.total(f, p.W, p.loss),
            p.edge,
        )


@claim("A", "Equation 22", "the Jacobian by one query-key matrix")
def equation_22(draw: Draw) -> Iterator[Check]:
    for p in single(draw):
        f = partial(single_matrix, X=p.X)

        def printed() -> dict[str, Tensor]:
            slope = kron(eye(len(p.X)), p.W["value"].T @ p.X.T) @ literal.softmax_first(attention_of(p))
            return {"query_key": slope @ kron(p.X, p.X)}

        yield Equal(p.case, printed, lambda: autodiff.jacobian(f, p.W), p.edge)


def single_matrix(W: Weights, X: Tensor) -> Tensor:
    """`softmax(X W_QK Xᵀ) X W_V`."""
    return autodiff.softmax(X @ W["query_key"] @ X.T) @ X @ W["value"]


def single(draw: Draw, square: bool = False) -> Iterator[Attention]:
    """The same problems with `W_Q W_Kᵀ` as one matrix."""
    for p in attentions(draw, square):
        W = {"query_key": p.W["query"] @ p.W["key"].T, "value": p.W["value"]}
        yield Attention(p.case, W, p.X, p.Y, p.edge)


def attention_of(p: Attention) -> Tensor:
    """The attention map of a problem with one matrix or two."""
    T = p.X @ p.W["query_key"] @ p.X.T if "query_key" in p.W else autodiff.scores(p.W, p.X)
    return T.softmax(-1)


def U(A: Tensor, p: Attention) -> Tensor:
    """Lemma 4.1's matrix as printed: `Z1ᵀ (I ⊗ W_V W_Vᵀ) Z1 + (δᵀ (I ⊗ W_Vᵀ) ⊗ I) Z2`."""
    W_V, I_L, first = p.W["value"], eye(len(p.X)), literal.Z1(A, p.X)
    delta = vec(A @ p.X @ W_V - p.Y)[None]
    second = kron(delta @ kron(I_L, W_V.T), eye(len(W_V) ** 2)) @ literal.Z2(A, p.X)
    return first.T @ kron(I_L, W_V @ W_V.T) @ first + second


def at_scores(p: Attention, temperature: float = 1.0) -> tuple[Blocks, Blocks]:
    """The Gauss-Newton split of the query-key part at the scores `T`, by autodiff: T-outer and T-functional."""
    W = {name: p.W[name] for name in QK}
    T = lambda W: autodiff.scores(W, p.X) / temperature  # noqa: E731
    above = lambda T: p.loss(autodiff.softmax(T) @ p.X @ p.W["value"])  # noqa: E731
    return autodiff.outer(T, W, above), autodiff.functional(T, W, above)


def split(p: Attention, temperature: float = 1.0) -> AttentionResult:
    """The same in closed form, among other parts."""
    R = exact.hessian(p.layer(temperature=temperature), p.X, p.Y)
    assert isinstance(R, AttentionResult)
    return R


@claim(
    "A",
    "Remark D.1",
    "the query-key part as T-outer and T-functional Hessian",
    "print drops 2/(L d_V) and orders V as (K, Q)",
)
def remark_d1(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):
        yield Equal(
            f"{p.case}, T-outer as printed, corrected",
            lambda: printed_d1(p)[0],
            lambda: at_scores(p)[0],
            p.edge,
        )
        yield Equal(
            f"{p.case}, T-functional as printed, corrected",
            lambda: printed_d1(p)[1],
            lambda: at_scores(p)[1],
            joint=True,
        )
    for p in attentions(draw):
        yield Equal(
            f"{p.case}, T-outer",
            lambda: dense(split(p).t_outer),
            lambda: at_scores(p)[0],
            p.edge,
        )
        yield Equal(
            f"{p.case}, T-functional",
            lambda: dense(split(p).t_functional),
            lambda: at_scores(p)[1],
            joint=True,
        )

        def together() -> Blocks:
            R = split(p)
            outer, functional = dense(R.t_outer), dense(R.t_functional)
            return {key: outer[key] + functional[key] for key in outer}

        yield Equal(
            f"{p.case}, their sum", together, lambda: autodiff.total(p.plain, p.W, p.loss), joint=True
        )


def printed_d1(p: Attention) -> tuple[Blocks, Blocks]:
    """Remark D.1 to the letter but for the factor `2/(L d_V)` and the order of `V`, here (Q, K)."""
    (d, k), c = p.W["query"].shape, 2 / p.Y.numel()
    A, L = attention_of(p), len(p.X)
    V = {"query": kron(eye(d), p.W["key"]), "key": kron(p.W["query"], eye(d)) @ commutation(d, k)}
    middle = c / k * U(A, p)
    delta = vec(A @ p.X @ p.W["value"] - p.Y)
    wide = literal.duplicated(delta, d) @ kron(eye(L), p.W["value"].T, eye(d))
    B = c / math.sqrt(k) * wide @ kron(literal.Z1(A, p.X), eye(d)) @ literal.shuffle(d, p.X)
    zero = torch.zeros(d * k, d * k, dtype=p.X.dtype)
    score = kron(B, eye(k))
    H_f = {("query", "key"): score, ("key", "query"): score.T, ("query", "query"): zero, ("key", "key"): zero}
    return {(a, b): V[a].T @ middle @ V[b] for a in QK for b in QK}, H_f


@claim("A", "Section 4.3", "temperature: T-outer ~ 1/t², T-functional ~ 1/t")
def temperature(draw: Draw) -> Iterator[Check]:
    """Beside the same scores at `t = 1` (queries divided by `t`), for the blocks that no query weight enters."""
    for t in (0.5, 3.0):
        p = attention(draw, "", 4, 3, 2, 3)
        colder = Attention("", {**p.W, "query": p.W["query"] / t}, p.X, p.Y)
        yield Equal(
            f"t = {t}, T-outer",
            lambda: dense(split(p, t).t_outer),
            lambda: at_scores(p, t)[0],
        )
        yield Equal(
            f"t = {t}, T-functional",
            lambda: dense(split(p, t).t_functional),
            lambda: at_scores(p, t)[1],
            joint=True,
        )

        def scaled() -> dict[str, Tensor]:
            outer, functional = at_scores(colder)
            return {"T-outer": outer["query", "query"] / t**2, "T-functional": functional["query", "key"] / t}

        def closed() -> dict[str, Tensor]:
            R = split(p, t)
            return {
                "T-outer": R.t_outer.block("query").dense(),
                "T-functional": R.t_functional.block("query", "key").dense(),
            }

        yield Equal(f"t = {t}, powers of t", closed, scaled)


@claim("A", "Appendix D", "eigenvalues of the T-functional Hessian: ± pairs, d_K times")
def pairs(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):

        def from_B() -> Tensor:
            k = p.W["query"].shape[1]
            block = split(p).t_functional.block("query", "key").dense()
            singular = torch.linalg.svdvals(block[::k, ::k].contiguous())
            return torch.cat([singular, -singular]).repeat_interleave(k).sort().values

        yield Equal(p.case, from_B, lambda: torch.linalg.eigvalsh(autodiff.matrix(at_scores(p)[1], QK)))


@claim("A", "Lemma D.1", "the rank of stacked Kronecker products")
def lemma_d1(draw: Draw) -> Iterator[Check]:
    for m, n, p, q, r, s in ((3, 4, 2, 5, 2, 2), (4, 3, 3, 3, 3, 1), (2, 2, 4, 3, 1, 3)):
        A, B = draw(m, r) @ draw(r, n), draw(p, s) @ draw(s, q)

        def formula() -> Tensor:
            a, b = torch.linalg.matrix_rank(A), torch.linalg.matrix_rank(B)
            return (B.shape[1] * a + A.shape[1] * b - a * b).double()

        def counted() -> Tensor:
            stacked = torch.cat([kron(eye(B.shape[1]), A), kron(B, eye(A.shape[1]))])
            return torch.linalg.matrix_rank(stacked).double()

        yield Equal(f"{m} x {n} of rank {r}, {p} x {q} of rank {s}", formula, counted)


@claim("A", "Lemma D.2", "the rank of the T-outer Hessian")
def lemma_d2(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):
        if p.edge:
            continue  # near one-hot or with one token, singular values fade instead of ending
        yield Bound(
            p.case,
            lambda: torch.tensor(float(exact.t_rank_bound(p.layer()))),
            lambda: rank(autodiff.matrix(at_scores(p)[0], QK)),
        )


def rank(H: Tensor) -> Tensor:
    """The number of singular values above rounding, 1e-12 of the largest."""
    return torch.linalg.matrix_rank(H, rtol=1e-12, hermitian=True).float()
