"""Paper A, sections 2 to 4 and appendices B, D and E: the Hessian of self-attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.literal import commutation, kron
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.autodiff import Blocks, Weights
from curvlens.exact.verification.claims import Check, Equal, claim
from curvlens.exact.verification.problems import Attention, Draw, attention, attentions, eye, one_hot
from curvlens.operator import Operator


def dense(H: Operator) -> Blocks:
    """Every block of an operator, cut from its matrix."""
    matrix, rows, columns = H.dense(), H.codomain.ranges, H.domain.ranges
    return {(a, b): matrix[rows[a], columns[b]] for a in rows for b in columns}


def blockwise(H: Operator) -> Blocks:
    """The same, each block asked for by itself."""
    return {(a, b): H.block(a, b).dense() for a in H.codomain.names for b in H.domain.names}


def outer(p: Attention) -> Blocks:
    return autodiff.outer(p.plain, p.W, p.loss)


def functional(p: Attention) -> Blocks:
    return autodiff.functional(p.plain, p.W, p.loss)


@claim("A", "Equation 1", "self-attention, F = a(T) X W_V")
def layer(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):
        yield Equal(p.case, lambda: p.layer()(p.X), lambda: p.plain(p.W))


@claim("A", "Equation 2", "H = H_o + H_f, for square loss and cross-entropy")
def gauss_newton(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):
        yield Equal(
            f"{p.case}, square loss",
            lambda: dense(exact.hessian(p.layer(), p.X, p.Y).total),
            lambda: autodiff.total(p.plain, p.W, p.loss),
            joint=True,
        )
        classes = draw.classes(*p.Y.shape)
        yield Equal(
            f"{p.case}, cross-entropy",
            lambda: dense(exact.hessian(p.layer(), p.X, classes, loss="cross-entropy").total),
            lambda: autodiff.total(p.plain, p.W, partial(autodiff.cross_entropy, classes=classes)),
            joint=True,
        )


@claim("A", "Equation 3", "blocks mirror each other, H(a, b) = H(b, a)ᵀ")
def mirrored(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):

        def transposed() -> Blocks:
            H = autodiff.total(p.plain, p.W, p.loss)
            return {(a, b): H[b, a].T for a, b in H}

        yield Equal(
            p.case, lambda: blockwise(exact.hessian(p.layer(), p.X, p.Y).total), transposed, joint=True
        )


@claim("A", "Equation 4", "derivatives of the square loss by F")
def square_loss(draw: Draw) -> Iterator[Check]:
    p = attention(draw, "", 4, 3, 2, 3)

    def closed() -> dict[str, Tensor]:
        at = exact.hessian(p.layer(), p.X, p.Y).loss
        return {"gradient": at.gradient, "hessian": torch.block_diag(*at.curvature())}

    def derived() -> dict[str, Tensor]:
        F = p.plain(p.W)
        by_vec = lambda f: p.loss(f.view_as(F))  # noqa: E731
        return {"gradient": torch.func.grad(p.loss)(F), "hessian": autodiff.second(by_vec, F.flatten())}

    yield Equal("L = 4, d_V = 3", closed, derived)


@claim("A", "Section 2", "linear MLPs: Kronecker diagonal, hollow functional part")
def linear_mlp(draw: Draw) -> Iterator[Check]:
    for sizes in ((3, 2), (2, 4, 3), (3, 2, 3, 2)):
        W = {f"W{i}": draw(a, b) for i, (a, b) in enumerate(pairwise(sizes), 1)}
        X, Y = draw(5, sizes[0]), draw(5, sizes[-1])

        def plain(W: Weights, X: Tensor = X) -> Tensor:
            for w in W.values():
                X = X @ w
            return X

        loss, mlp = partial(autodiff.mse, Y=Y), exact.LinearMLP(list(W.values()))
        depth = f"depth {len(W)}"

        def printed() -> Blocks:
            """`W^{i+1}ᵀ … W^{i+1} ⊗ W^{i−1} … Σ …`, whose matrices are ours transposed, and so is `vec W`."""
            found, matrices = {}, list(W.values())
            for i, (name, w) in enumerate(W.items()):
                below, above = X, eye(w.shape[1])
                for lower in matrices[:i]:
                    below = below @ lower
                for upper in matrices[i + 1 :]:
                    above = above @ upper
                block = 2 / Y.numel() * kron(above @ above.T, below.T @ below)
                K = commutation(*w.shape)
                found[name, name] = K.T @ block @ K
            return found

        yield Equal(f"{depth}, as printed", printed, lambda: autodiff.outer(plain, W, loss))
        yield Equal(
            f"{depth}, H_o",
            lambda: dense(exact.hessian(mlp, X, Y).outer),
            lambda: autodiff.outer(plain, W, loss),
        )
        yield Equal(
            f"{depth}, H_f",
            lambda: dense(exact.hessian(mlp, X, Y).functional),
            lambda: autodiff.functional(plain, W, loss),
            joint=True,
        )


@claim(
    "A",
    "Theorem 3.1",
    "the outer-product Hessian of self-attention",
    "with the key blocks, omitted in print; its proof writes T_1 for M_1",
)
def theorem_31(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):
        yield Equal(
            f"{p.case}, as printed",
            lambda: literal.theorem_31(p.layer(), p.X, p.Y),
            lambda: outer(p),
            p.edge,
        )
    for p in attentions(draw):
        yield Equal(
            p.case, lambda: blockwise(exact.hessian(p.layer(), p.X, p.Y).outer), lambda: outer(p), p.edge
        )


@claim(
    "A", "Theorem 3.2", "the functional Hessian of self-attention", "with the key blocks, omitted in print"
)
def theorem_32(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw, square=True):
        yield Equal(
            f"{p.case}, as printed",
            lambda: literal.theorem_32(p.layer(), p.X, p.Y),
            lambda: functional(p),
            joint=True,  # the value block is zero
        )
    for p in attentions(draw):
        yield Equal(
            p.case,
            lambda: blockwise(exact.hessian(p.layer(), p.X, p.Y).functional),
            lambda: functional(p),
            joint=True,
        )


@claim("A", "Equation 21", "the second derivative of F by query and key")
def equation_21(draw: Draw) -> Iterator[Check]:
    """Contracted with any gradient at the output, not a loss's own."""
    for p in attentions(draw):
        g = draw(*p.Y.shape)
        yield Equal(
            p.case,
            lambda: dense(exact.hessian(p.layer(), p.X, g=g).functional),
            lambda: autodiff.curvature(p.plain, p.W, g),
            joint=True,
        )


@claim("A", "Definition 3.1", "attention moments")
def definition_31(draw: Draw) -> Iterator[Check]:
    for case, factor in (("random", 1.0), ("uniform", 0.0), ("large logits", 10.0)):
        A, X, w = autodiff.softmax(factor * draw(4, 4)), draw(4, 3), draw(4, 3)

        def closed() -> dict[str, Tensor]:
            m = exact.moments(A, X)
            return {"M1": m.first, "M2": m.second, "M3": m.third, "M3[w]": m.contracted(w)}

        def summed() -> dict[str, Tensor]:
            c = X[None] - (A @ X)[:, None]
            return {
                "M1": torch.einsum("ij,ja->ia", A, X),
                "M2": torch.einsum("ij,ija,ijb->iab", A, c, c),
                "M3": torch.einsum("ij,ija,ijb,ijc->iabc", A, c, c, c),
                "M3[w]": torch.einsum("ij,ija,ijb,ijc,ia->ibc", A, c, c, c, w),
            }

        yield Equal(case, closed, summed)


@claim("A", "Section 3.2", "one-hot attention leaves no query-key curvature")
def vanishing(draw: Draw) -> Iterator[Check]:
    p = one_hot(draw)

    def total() -> Blocks:
        return autodiff.total(p.plain, p.W, p.loss)

    def only_value() -> Blocks:
        H = dense(exact.hessian(p.layer(), p.X, p.Y).total)
        return {key: block if key == ("value", "value") else 0 * block for key, block in H.items()}

    yield Equal("closed form", lambda: dense(exact.hessian(p.layer(), p.X, p.Y).total), total, joint=True)
    yield Equal("all blocks but the value's are zero", only_value, total, joint=True)


@claim("A", "Section 3.3", "how blocks depend on the weights")
def on_weights(draw: Draw) -> Iterator[Check]:
    """At one attention map and one gradient: `W_Q/c`, `c W_K` and `e W_V` change the blocks by powers of c and e."""
    p, c, e = attention(draw, "", 4, 3, 2, 3), 2.0, 3.0
    g = draw(*p.Y.shape)
    changed = Attention(
        "", {"query": p.W["query"] / c, "key": c * p.W["key"], "value": e * p.W["value"]}, p.X, p.Y
    )
    keys, values = {"query": 1, "key": -1, "value": 0}, {"query": 1, "key": 1, "value": 0}
    linear = {("value", "value"): 0, ("query", "value"): 0, ("key", "value"): 0}

    def predicted(part: str) -> Blocks:
        square = lambda F: F.square().sum() / 2  # noqa: E731
        if part == "outer":
            H = autodiff.outer(p.plain, p.W, square)
            powers = {key: values[key[0]] + values[key[1]] for key in H}
        else:
            H = autodiff.curvature(p.plain, p.W, g)
            powers = {(a, b): linear.get((a, b), linear.get((b, a), 1)) for a, b in H}
        return {(a, b): c ** (keys[a] + keys[b]) * e ** powers[a, b] * H[a, b] for a, b in H}

    yield Equal(
        "H_o",
        lambda: dense(exact.hessian(changed.layer(), p.X, g=g, B=1.0).outer),
        lambda: predicted("outer"),
    )
    yield Equal(
        "H_f",
        lambda: dense(exact.hessian(changed.layer(), p.X, g=g, B=1.0).functional),
        lambda: predicted("functional"),
        joint=True,
    )


@claim("A", "Footnote 3", "the theorems hold for the last of many layers")
def last_layer(draw: Draw) -> Iterator[Check]:
    below, p = attention(draw, "", 4, 2, 3, 3), attention(draw, "", 4, 3, 2, 3)
    whole = lambda W: autodiff.attention(W, below.plain(below.W))  # noqa: E731

    def closed(part: str) -> Blocks:
        return dense(getattr(exact.hessian(p.layer(), below.layer()(below.X), p.Y), part))

    yield Equal("H_o", lambda: closed("outer"), lambda: autodiff.outer(whole, p.W, p.loss))
    yield Equal(
        "H_f", lambda: closed("functional"), lambda: autodiff.functional(whole, p.W, p.loss), joint=True
    )
