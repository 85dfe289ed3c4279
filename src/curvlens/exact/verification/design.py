"""Paper A, section 4 and appendices D and E: linear attention, one query-key matrix, temperature, heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.literal import commutation, kron, vec
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.appendix import eye
from curvlens.exact.verification.attention import dense
from curvlens.exact.verification.autodiff import Blocks, Weights
from curvlens.exact.verification.claims import Bound, Check, Equal, claim
from curvlens.exact.verification.problems import Attention, Draw, attention, attentions

QK = ["query", "key"]


def linear_attention(W: Weights, X: Tensor) -> Tensor:
    return autodiff.scores(W, X) @ X @ W["value"]


@claim("A", "Remark 4.1", "the Hessian of linear self-attention")
def remark_41(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):
        f = partial(linear_attention, X=p.X)
        yield Equal(
            f"{p.case}, H_o as printed",
            lambda p=p: printed_linear(p)[0],
            lambda p=p, f=f: autodiff.outer(f, p.W, p.loss),
            p.edge,
        )
        yield Equal(
            f"{p.case}, H_f as printed",
            lambda p=p: printed_linear(p)[1],
            lambda p=p, f=f: autodiff.functional(f, p.W, p.loss),
            joint=True,
        )
    for p in attentions(draw):
        f, layer = partial(linear_attention, X=p.X), p.layer(activation="linear")
        yield Equal(
            f"{p.case}, H_o",
            lambda p=p, layer=layer: dense(exact.hessian(layer, p.X, p.Y).outer),
            lambda p=p, f=f: autodiff.outer(f, p.W, p.loss),
            p.edge,
        )
        yield Equal(
            f"{p.case}, H_f",
            lambda p=p, layer=layer: dense(exact.hessian(layer, p.X, p.Y).functional),
            lambda p=p, f=f: autodiff.functional(f, p.W, p.loss),
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

        def eigenvalues(p: Attention = p, layer: exact.SelfAttention = layer) -> dict[str, Tensor]:
            H = exact.hessian(layer, p.X, p.Y).total
            return {name: torch.linalg.eigvalsh(H.block(name).dense()) for name in p.W}

        def sizes(p: Attention = p, f: autodiff.Function = f) -> dict[str, Tensor]:
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
            lambda m=chain, X=X, g=g: diagonal(dense(exact.hessian(m, 2 * X, g=g, B=1.0).outer)),
            lambda f=plain, W=W, D=D: diagonal(
                autodiff.outer(f, W, lambda F: F.square().sum() / 2), 2.0 ** (2 * 3**D)
            ),
        )
        yield Equal(
            f"D = {D}, H_f",
            lambda m=chain, X=X, g=g: diagonal(dense(exact.hessian(m, 2 * X, g=g).functional)),
            lambda f=plain, W=W, D=D, g=g: diagonal(autodiff.curvature(f, W, g), 2.0 ** (3**D)),
            joint=True,  # the last layer's are zero
        )


@claim("A", "Lemma 4.1", "the Hessian with one query-key matrix", "print drops the factor 2/(L d_V)")
def lemma_41(draw: Draw) -> Iterator[Check]:
    for p in single(draw, square=True):
        f = partial(single_matrix, X=p.X)
        yield Equal(
            f"{p.case}, as printed, times 2/(L d_V)",
            lambda p=p: {("query_key", "query_key"): 2 / p.Y.numel() * U(attention_of(p), p)},
            lambda p=p, f=f: autodiff.total(f, p.W, p.loss),
            p.edge,
        )
    for p in single(draw):
        f = partial(single_matrix, X=p.X)
        layer = exact.SelfAttention(W_QK=p.W["query_key"], W_V=p.W["value"])
        yield Equal(
            p.case,
            lambda p=p, layer=layer: dense(exact.hessian(layer, p.X, p.Y).total),
            lambda p=p, f=f: autodiff.total(f, p.W, p.loss),
            p.edge,
        )


@claim("A", "Equation 22", "the Jacobian by one query-key matrix")
def equation_22(draw: Draw) -> Iterator[Check]:
    for p in single(draw):
        f = partial(single_matrix, X=p.X)

        def printed(p: Attention = p) -> dict[str, Tensor]:
            slope = kron(eye(len(p.X)), p.W["value"].T @ p.X.T) @ literal.softmax_first(attention_of(p))
            return {"query_key": slope @ kron(p.X, p.X)}

        yield Equal(p.case, printed, lambda p=p, f=f: autodiff.jacobian(f, p.W), p.edge)


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
            lambda p=p: printed_d1(p)[0],
            lambda p=p: at_scores(p)[0],
            p.edge,
        )
        yield Equal(
            f"{p.case}, T-functional as printed, corrected",
            lambda p=p: printed_d1(p)[1],
            lambda p=p: at_scores(p)[1],
            joint=True,
        )
    for p in attentions(draw):
        yield Equal(
            f"{p.case}, T-outer",
            lambda p=p: dense(exact.hessian(p.layer(), p.X, p.Y).t_outer),
            lambda p=p: at_scores(p)[0],
            p.edge,
        )
        yield Equal(
            f"{p.case}, T-functional",
            lambda p=p: dense(exact.hessian(p.layer(), p.X, p.Y).t_functional),
            lambda p=p: at_scores(p)[1],
            joint=True,
        )

        def together(p: Attention = p) -> Blocks:
            R = exact.hessian(p.layer(), p.X, p.Y)
            outer, functional = dense(R.t_outer), dense(R.t_functional)
            return {key: outer[key] + functional[key] for key in outer}

        yield Equal(
            f"{p.case}, their sum", together, lambda p=p: autodiff.total(p.plain, p.W, p.loss), joint=True
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
        layer = p.layer(temperature=t)
        yield Equal(
            f"t = {t}, T-outer",
            lambda p=p, layer=layer: dense(exact.hessian(layer, p.X, p.Y).t_outer),
            lambda p=p, t=t: at_scores(p, t)[0],
        )
        yield Equal(
            f"t = {t}, T-functional",
            lambda p=p, layer=layer: dense(exact.hessian(layer, p.X, p.Y).t_functional),
            lambda p=p, t=t: at_scores(p, t)[1],
            joint=True,
        )

        def scaled(p: Attention = colder, t: float = t) -> dict[str, Tensor]:
            outer, functional = at_scores(p)
            return {"T-outer": outer["query", "query"] / t**2, "T-functional": functional["query", "key"] / t}

        def closed(p: Attention = p, layer: exact.SelfAttention = layer) -> dict[str, Tensor]:
            R = exact.hessian(layer, p.X, p.Y)
            return {
                "T-outer": R.t_outer.block("query").dense(),
                "T-functional": R.t_functional.block("query", "key").dense(),
            }

        yield Equal(f"t = {t}, powers of t", closed, scaled)


@claim("A", "Appendix D", "eigenvalues of the T-functional Hessian: ± pairs, d_K times")
def pairs(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):

        def from_B(p: Attention = p) -> Tensor:
            k = p.W["query"].shape[1]
            block = exact.hessian(p.layer(), p.X, p.Y).t_functional.block("query", "key").dense()
            singular = torch.linalg.svdvals(block[::k, ::k].contiguous())
            return torch.cat([singular, -singular]).repeat_interleave(k).sort().values

        yield Equal(p.case, from_B, lambda p=p: torch.linalg.eigvalsh(autodiff.matrix(at_scores(p)[1], QK)))


@claim("A", "Lemma D.1", "the rank of stacked Kronecker products")
def lemma_d1(draw: Draw) -> Iterator[Check]:
    for m, n, p, q, r, s in ((3, 4, 2, 5, 2, 2), (4, 3, 3, 3, 3, 1), (2, 2, 4, 3, 1, 3)):
        A, B = draw(m, r) @ draw(r, n), draw(p, s) @ draw(s, q)

        def formula(A: Tensor = A, B: Tensor = B) -> Tensor:
            a, b = torch.linalg.matrix_rank(A), torch.linalg.matrix_rank(B)
            return (B.shape[1] * a + A.shape[1] * b - a * b).double()

        def counted(A: Tensor = A, B: Tensor = B) -> Tensor:
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
            lambda p=p: torch.tensor(float(exact.t_rank_bound(p.layer()))),
            lambda p=p: rank(autodiff.matrix(at_scores(p)[0], QK)),
        )


def rank(H: Tensor) -> Tensor:
    """The number of singular values above rounding, 1e-12 of the largest."""
    return torch.linalg.matrix_rank(H, rtol=1e-12, hermitian=True).float()


def several_heads(W: Weights, X: Tensor) -> Tensor:
    """`Σ_h A^h X W_V^h`, with `W_V^h W_O^h` where there is an output matrix."""
    F = 0
    for h in range(len(W["query"])):
        head = {name: w[h] for name, w in W.items()}
        mixed = autodiff.attention(head, X)
        F = F + (mixed @ head["out"] if "out" in head else mixed)
    return F  # type: ignore[return-value]


def heads(draw: Draw, out: bool) -> Iterator[tuple[str, Weights, Tensor, Tensor]]:
    for H, L, d, k, v in ((2, 4, 3, 2, 3), (3, 3, 2, 1, 2)):
        W = {"query": draw(H, d, k), "key": draw(H, d, k), "value": draw(H, d, v)}
        if out:
            W["out"] = draw(H, v, d)
        yield f"{H} heads", W, draw(L, d), draw(L, d if out else v)


def heads_layer(W: Weights) -> exact.SelfAttention:
    return exact.SelfAttention(W["query"], W["key"], W["value"], W_O=W.get("out"))


@claim("A", "Remark E.1", "Jacobians of several heads")
def remark_e1(draw: Draw) -> Iterator[Check]:
    for case, W, X, _ in heads(draw, out=False):

        def printed(W: Weights = W, X: Tensor = X) -> dict[str, Tensor]:
            by_query, by_value = [], []
            for W_Q, W_K, W_V in zip(*W.values(), strict=True):
                A = autodiff.softmax(autodiff.scores({"query": W_Q, "key": W_K}, X))
                slope = kron(eye(len(X)), W_V.T @ X.T) @ literal.softmax_first(A)
                by_query.append(slope @ kron(X, X @ W_K) / math.sqrt(W_K.shape[1]))
                by_value.append(kron(A @ X, eye(W_V.shape[1])))
            return {"query": torch.cat(by_query, 1), "value": torch.cat(by_value, 1)}

        yield Equal(case, printed, lambda W=W, X=X: autodiff.jacobian(partial(several_heads, X=X), W))


@claim("A", "Appendix E", "the Hessian of heads; no functional part between heads")
def appendix_e(draw: Draw) -> Iterator[Check]:
    for case, W, X, Y in heads(draw, out=False):
        f, loss, layer = partial(several_heads, X=X), partial(autodiff.mse, Y=Y), heads_layer(W)
        yield Equal(
            f"{case}, H_o",
            lambda a=layer, X=X, Y=Y: dense(exact.hessian(a, X, Y).outer),
            lambda f=f, W=W, e=loss: autodiff.outer(f, W, e),
        )
        yield Equal(
            f"{case}, H_f",
            lambda a=layer, X=X, Y=Y: dense(exact.hessian(a, X, Y).functional),
            lambda f=f, W=W, e=loss: autodiff.functional(f, W, e),
            joint=True,
        )

        def between(f: autodiff.Function = f, W: Weights = W, e: autodiff.Loss = loss) -> Tensor:
            H, count = autodiff.functional(f, W, e), len(W["query"])
            query, key = (W[name][0].numel() for name in QK)
            return H["query", "key"].view(count, query, count, key).transpose(1, 2)

        def hollow(between: object = between, count: int = len(W["query"])) -> Tensor:
            H = between()  # type: ignore[operator]
            return H * torch.eye(count, dtype=H.dtype)[:, :, None, None]

        yield Equal(f"{case}, zero between heads", hollow, between)


@claim("A", "Equation 24", "low-rank values, W_V = W_O W_U, hollow as a linear MLP")
def equation_24(draw: Draw) -> Iterator[Check]:
    for case, W, X, Y in heads(draw, out=True):
        f, loss, layer = partial(several_heads, X=X), partial(autodiff.mse, Y=Y), heads_layer(W)
        yield Equal(
            f"{case}, H_o",
            lambda a=layer, X=X, Y=Y: dense(exact.hessian(a, X, Y).outer),
            lambda f=f, W=W, e=loss: autodiff.outer(f, W, e),
        )
        yield Equal(
            f"{case}, H_f",
            lambda a=layer, X=X, Y=Y: dense(exact.hessian(a, X, Y).functional),
            lambda f=f, W=W, e=loss: autodiff.functional(f, W, e),
            joint=True,
        )
