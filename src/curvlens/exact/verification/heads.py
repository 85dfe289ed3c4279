"""Paper A, appendix E: several heads, and low-rank values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.literal import kron
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.attention import dense
from curvlens.exact.verification.autodiff import Weights
from curvlens.exact.verification.claims import Check, Equal, claim
from curvlens.exact.verification.problems import Draw, eye


def several_heads(W: Weights, X: Tensor) -> Tensor:
    """`Σ_h A^h X W_V^h`, with `W_V^h W_O^h` where there is an output matrix."""
    parts = []
    for h in range(len(W["query"])):
        head = {name: w[h] for name, w in W.items()}
        mixed = autodiff.attention(head, X)
        parts.append(mixed @ head["out"] if "out" in head else mixed)
    return torch.stack(parts).sum(0)


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

        def printed() -> dict[str, Tensor]:
            by_query, by_value = [], []
            for W_Q, W_K, W_V in zip(*W.values(), strict=True):
                A = autodiff.softmax(autodiff.scores({"query": W_Q, "key": W_K}, X))
                slope = kron(eye(len(X)), W_V.T @ X.T) @ literal.softmax_first(A)
                by_query.append(slope @ kron(X, X @ W_K) / math.sqrt(W_K.shape[1]))
                by_value.append(kron(A @ X, eye(W_V.shape[1])))
            return {"query": torch.cat(by_query, 1), "value": torch.cat(by_value, 1)}

        yield Equal(case, printed, lambda: autodiff.jacobian(partial(several_heads, X=X), W))


@claim("A", "Appendix E", "the Hessian of heads; no functional part between heads")
def appendix_e(draw: Draw) -> Iterator[Check]:
    for case, W, X, Y in heads(draw, out=False):
        f, loss, layer = partial(several_heads, X=X), partial(autodiff.mse, Y=Y), heads_layer(W)
        yield Equal(
            f"{case}, H_o",
            lambda: dense(exact.hessian(layer, X, Y).outer),
            lambda: autodiff.outer(f, W, loss),
        )
        yield Equal(
            f"{case}, H_f",
            lambda: dense(exact.hessian(layer, X, Y).functional),
            lambda: autodiff.functional(f, W, loss),
            joint=True,
        )

        count, query, key = len(W["query"]), W["query"][0].numel(), W["key"][0].numel()

        def between() -> Tensor:
            """`[head, head, query, key]`."""
            H = autodiff.functional(f, W, loss)["query", "key"]
            return H.view(count, query, count, key).transpose(1, 2)

        def hollow() -> Tensor:
            H = exact.hessian(layer, X, Y).functional
            found = X.new_zeros(count, count, query, key)
            for h in range(count):
                found[h, h] = H.block(f"query.head.{h}", f"key.head.{h}").dense()
            return found

        yield Equal(f"{case}, zero between heads", hollow, between)


@claim("A", "Equation 24", "low-rank values, W_V = W_O W_U, hollow as a linear MLP")
def equation_24(draw: Draw) -> Iterator[Check]:
    for case, W, X, Y in heads(draw, out=True):
        f, loss, layer = partial(several_heads, X=X), partial(autodiff.mse, Y=Y), heads_layer(W)
        yield Equal(
            f"{case}, H_o",
            lambda: dense(exact.hessian(layer, X, Y).outer),
            lambda: autodiff.outer(f, W, loss),
        )
        yield Equal(
            f"{case}, H_f",
            lambda: dense(exact.hessian(layer, X, Y).functional),
            lambda: autodiff.functional(f, W, loss),
            joint=True,
        )
