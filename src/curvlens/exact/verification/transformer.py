"""Paper B: LayerNorm, feed-forward, whole blocks, and bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import curvlens.exact as exact
from curvlens.exact.activations import activation
from curvlens.exact.bounds import unit_attention_bound
from curvlens.exact.literal import kron
from curvlens.exact.verification import autodiff
from curvlens.exact.verification.attention import dense
from curvlens.exact.verification.autodiff import Weights
from curvlens.exact.verification.claims import Bound, Check, Equal, Law, claim
from curvlens.exact.verification.growth import SIGMA, slope
from curvlens.exact.verification.problems import Draw, attention, attentions, eye

Placement = Literal["pre", "post", "none"]


# -- Theorem 1


@claim(
    "B",
    "Theorem 1",
    "bounds of ‖H‖₂ of self-attention",
    "derived afresh: print takes ‖A‖₂ ≤ 1, which reaches √L; its O(‖X‖⁴) of the value block is Θ(‖X‖²)",
)
def theorem_1(draw: Draw) -> Iterator[Check]:
    for p in attentions(draw):
        for scale in (0.1, 1.0, 10.0):
            # at the same attention map, where autodiff keeps its digits
            W, X = {**p.W, "query": p.W["query"] / scale**2}, scale * p.X
            layer = exact.SelfAttention(*W.values())
            for kind in ("norms", "kronecker"):

                def bound() -> Tensor:
                    found = exact.bounds(layer, X, p.Y, largest=0)
                    return floats([getattr(b, kind) for b in found])

                def true() -> Tensor:
                    return spectral_norms(partial(autodiff.attention, X=X), W, p.loss)

                yield Bound(f"{p.case}, tokens x {scale}, by {kind}", bound, true)
    yield from unit_bound_is_exceeded()
    p = attention(draw, "", 4, 3, 2, 3)

    def fitted() -> float:
        parts = [exact.hessian(p.layer(), s * p.X, p.Y).total for s in SIGMA]
        return slope([H.block("value").dense().norm() for H in parts])

    yield Law("value block ~ ‖X‖²", 2, fitted)


def spectral_norms(f: autodiff.Function, W: Weights, loss: autodiff.Loss) -> Tensor:
    """Of every block of the three parts and of each whole, in the order of `exact.bounds`."""
    norms, names = [], list(W)
    outer, functional = autodiff.outer(f, W, loss), autodiff.functional(f, W, loss)
    total = autodiff.total(f, W, loss)
    for H in (outer, functional, total):
        norms += [norm(H[a, b]) for i, a in enumerate(names) for b in names[i:]]
        norms.append(norm(autodiff.matrix(H, names)))
    return torch.stack(norms)


def floats(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def norm(H: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(H, ord=2)


def unit_bound_is_exceeded() -> Iterator[Check]:
    """All nine tokens attend to the first, so `‖A‖₂ = 3`, and the value block is nine times what `‖A‖₂ ≤ 1` allows."""
    X = torch.zeros(9, 2, dtype=torch.float64)
    X[:, 1], X[0, 0] = 1, 1e3
    W = {"query": torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64), "key": eye(2), "value": eye(2)}
    layer, Y = exact.SelfAttention(*W.values()), torch.zeros_like(X)
    f, loss = partial(autodiff.attention, X=X), partial(autodiff.mse, Y=Y)

    def value_norm() -> Tensor:
        return norm(autodiff.outer(f, W, loss)["value", "value"])[None]

    def printed() -> Tensor:
        R = exact.hessian(layer, X, Y)
        return floats([unit_attention_bound(R)])  # type: ignore[arg-type]

    def ours() -> Tensor:
        found = exact.bounds(layer, X, Y, largest=0)
        return floats([b.norms for b in found if (b.part, b.row) == ("outer", "value")])

    yield Bound("all attend to one", ours, value_norm)
    yield Bound("all attend to one: what ‖A‖₂ ≤ 1 gives is below the truth", value_norm, printed)


# -- norms


@claim("B", "Theorem 2", "the Jacobian of LayerNorm")
def theorem_2(draw: Draw) -> Iterator[Check]:
    for L, d in ((1, 3), (3, 4), (4, 3)):
        X, gamma, beta = 2 * draw(L, d), draw(d), draw(d)
        yield Equal(
            f"L = {L}, d = {d}, as printed (no ε)",
            lambda: printed_layer_norm(X)[0],
            lambda: autodiff.first(lambda x: autodiff.norm(x, 1.0, 0.0, 0.0), X),
        )
        for case, layer, f in norms(gamma, beta):
            yield Equal(
                f"L = {L}, d = {d}, {case}",
                lambda: torch.block_diag(*layer.row_jacobians(X)),
                lambda: autodiff.first(f, X),
            )
            yield Equal(
                f"L = {L}, d = {d}, {case}, by products",
                lambda: layer.jacobian(X).block("output", "input").dense(),
                lambda: autodiff.first(f, X),
            )


@claim("B", "Theorem 3", "the Hessian of LayerNorm")
def theorem_3(draw: Draw) -> Iterator[Check]:
    def twice(f: autodiff.Loss, X: Tensor) -> Tensor:
        return autodiff.second(lambda x: f(x.view_as(X)).flatten(), X.flatten())

    for L, d in ((1, 3), (3, 4), (4, 3)):
        X, gamma, beta, g = 2 * draw(L, d), draw(d), draw(d), draw(L, d)
        yield Equal(
            f"L = {L}, d = {d}, as printed (no ε)",
            lambda: printed_layer_norm(X)[1],
            lambda: twice(lambda x: autodiff.norm(x, 1.0, 0.0, 0.0), X),
        )
        for case, layer, f in norms(gamma, beta):

            def by_rows() -> Tensor:
                L, d = X.shape
                H = X.new_zeros(L, d, L, d, L, d)
                for i, rows in enumerate(layer.row_hessians(X)):
                    H[i, :, i, :, i] = rows
                return H.reshape(L * d, L * d, L * d)

            yield Equal(f"L = {L}, d = {d}, {case}", by_rows, lambda: twice(f, X))

            def plain(W: Weights, layer=layer, case=case) -> Tensor:  # type: ignore[no-untyped-def]
                bias = W.get("bias", 0.0)
                return autodiff.norm(W["input"], W["weight"], bias, layer.eps, case != "RMSNorm")

            yield Equal(
                f"L = {L}, d = {d}, {case}, by weight, bias and input",
                lambda: dense(layer.second(X, g)),
                lambda: autodiff.curvature(plain, {**layer.weights, "input": X}, g),
                joint=True,
            )


def norms(gamma: Tensor, beta: Tensor):  # type: ignore[no-untyped-def]
    yield "ε and weight", exact.LayerNorm(gamma, beta, 1e-2), lambda x: autodiff.norm(x, gamma, beta, 1e-2)
    yield (
        "RMSNorm",
        exact.RMSNorm(gamma, 1e-2),
        lambda x: autodiff.norm(x, gamma, 0.0, 1e-2, centred=False),
    )


def printed_layer_norm(X: Tensor) -> tuple[Tensor, Tensor]:
    """Theorems 2 and 3 in the paper's matrices of size `(L d)²`: the Jacobian, and the Hessian `[L d, L d, L d]`.

    `LN = P M`, `P = diag(1/σ)`, `M = X − mean`, `G = ∂M/∂X = I − (I ⊗ 11ᵀ)/d`, `J = (P ⊗ I) G + (I ⊗ Mᵀ) ∂P/∂X`;
    `G` is constant, so the Hessian is `∂P` against `G`, twice, and `∂²P` against `M`.
    """
    (L, d), M = X.shape, X - X.mean(-1, keepdim=True)
    sigma, centring = M.square().mean(-1).sqrt(), eye(d) - 1 / d
    G = eye(L * d) - kron(eye(L), torch.ones(d, d, dtype=X.dtype)) / d
    dP, ddP = X.new_zeros(L, L, L, d), X.new_zeros(L, L, L, d, L, d)
    for i, (m, s) in enumerate(zip(M, sigma, strict=True)):
        dP[i, i, i] = -m / (d * s**3)
        ddP[i, i, i, :, i] = 3 * torch.outer(m, m) / (d**2 * s**5) - centring / (d * s**3)
    times_M = kron(eye(L), M.T)
    J = kron(torch.diag(1 / sigma), eye(d)) @ G + times_M @ dP.view(L * L, L * d)
    crossed = torch.einsum("ijc,jab->iabc", dP.view(L, L, L * d), G.view(L, d, L * d))
    crossed = crossed.reshape(L * d, L * d, L * d)
    return J, crossed + crossed.mT + torch.einsum("mn,nbc->mbc", times_M, ddP.view(L * L, L * d, L * d))


# -- feed-forward


@claim("B", "Lemma 1", "derivatives of ReLU almost everywhere, and of GELU and SiLU")
def lemma_1(draw: Draw) -> Iterator[Check]:
    h = 3 * draw(50)
    for name, plain in autodiff.ACTIVATIONS.items():

        def closed() -> dict[str, Tensor]:
            sigma = activation(name)
            return {"first": sigma.first(h), "second": sigma.second(h)}

        def derived() -> dict[str, Tensor]:
            slope = torch.func.vmap(torch.func.grad(plain))
            return {"first": slope(h), "second": torch.func.jvp(slope, (h,), (torch.ones_like(h),))[1]}

        yield Equal(name, closed, derived)


@claim("B", "Section 3", "the feed-forward Hessian; ReLU leaves no diagonal in H_f")
def feed_forward(draw: Draw) -> Iterator[Check]:
    for name, gated in (("relu", False), ("gelu", False), ("silu", True)):
        for L, d, m, e in ((1, 2, 3, 2), (4, 3, 5, 2), (3, 2, 2, 4)):
            W = {"up": draw(d, m), "gate": draw(d, m), "down": draw(m, e)}
            W = W if gated else {"up": W["up"], "down": W["down"]}
            X, Y = draw(L, d), draw(L, e)
            layer = exact.FeedForward(W["up"], W["down"], W.get("gate"), activation=name)
            f = partial(autodiff.feed_forward, X=X, activation=name)
            case = f"{name}, {L} x {d} x {m} x {e}"
            loss = partial(autodiff.mse, Y=Y)
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


# -- whole blocks

EPS = 1e-5
KINDS: list[tuple[Placement, int, str]] = [
    ("post", 1, "relu"),
    ("post", 2, "gelu"),
    ("pre", 1, "relu"),
    ("pre", 2, "gelu"),
    ("none", 2, "gelu"),
]


def made_block(draw: Draw, placement: Placement, heads: int, name: str, d: int = 3):  # type: ignore[no-untyped-def]
    """A block with its definition as a function of its weights and input."""
    k, v, m = draw.integer(1, 2), draw.integer(1, 2), draw.integer(2, 4)
    attn = exact.SelfAttention(
        draw(d, heads * k), draw(d, heads * k), draw(d, heads * v), W_O=draw(heads * v, d), heads=heads
    )
    mlp = exact.FeedForward(draw(d, m), draw(m, d), activation=name)
    if placement == "none":
        layer = exact.TransformerBlock(attn, mlp, norm="none")
    else:
        norm1, norm2 = (exact.LayerNorm(draw(d), draw(d), EPS) for _ in range(2))
        layer = exact.TransformerBlock(attn, mlp, norm1, norm2, placement)
    f = partial(autodiff.block, placement=placement, count=heads, activation=name, eps=EPS)
    return layer, f


def blocks(draw: Draw):  # type: ignore[no-untyped-def]
    for placement, heads, name in KINDS:
        layer, f = made_block(draw, placement, heads, name)
        L = draw.integer(2, 3)
        yield f"{placement}, {heads} heads, {name}", layer, f, draw(L, 3), draw(L, 3)
    layer, f = made_block(draw, "pre", 2, "gelu")
    yield "L = 1", layer, f, draw(1, 3), draw(1, 3)


@claim("B", "Theorem 4", "derivatives of a Transformer block by all weights")
def theorem_4(draw: Draw) -> Iterator[Check]:
    for case, layer, f, X, _ in blocks(draw):

        def closed() -> dict[str, Tensor]:
            J = layer.jacobian(X)
            return {name: J.block("output", name).dense() for name in layer.weights}

        yield Equal(
            case,
            closed,
            lambda: autodiff.jacobian(partial(f, X=X), layer.weights),
            joint=True,
        )


@claim("B", "Theorem 5", "second derivatives of a block by all pairs of weights")
def theorem_5(draw: Draw) -> Iterator[Check]:
    for case, layer, f, X, g in blocks(draw):
        yield Equal(
            f"{case}, Σ g ∂²Z",
            lambda: dense(layer.second(X, g).block(layer.blocks, layer.blocks)),
            lambda: autodiff.curvature(partial(f, X=X), layer.weights, g),
            joint=True,
        )
        yield Equal(
            f"{case}, Hessian of the square loss",
            lambda: dense(exact.hessian(layer, X, g).total),
            lambda: autodiff.total(partial(f, X=X), layer.weights, partial(autodiff.mse, Y=g)),
            joint=True,
        )
        if case.startswith("post"):
            yield Equal(
                f"{case}, as printed",
                lambda: printed_block(layer, X, g),
                lambda: autodiff.curvature(partial(f, X=X), layer.weights, g),
                joint=True,
            )


def printed_block(layer: exact.TransformerBlock, X: Tensor, g: Tensor) -> autodiff.Blocks:
    """`(J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j` for the weights below the last norm, contracted with `g`.

    `S` is the sum before that norm, `B_i = ∂S/∂W_i`, `ξ_ij = ∂B_i/∂W_j`; `J_Z`, `H_Z` belong to the norm at `S`.
    """
    below, last = exact.Chain(layer.layers[:-1]), layer.layers[-1][1]
    assert isinstance(last, exact.LayerNorm)
    S, B = below(X), below.jacobian(X)
    assert isinstance(S, Tensor)
    J_Z = torch.block_diag(*last.row_jacobians(S))
    H_Z = torch.block_diag(*torch.einsum("iabc,ia->ibc", last.row_hessians(S), g))
    xi = below.second(X, (J_Z.T @ g.flatten()).view_as(g))
    by = {name: B.block("output", name).dense() for name in below.weights}
    return {(a, b): xi.block(a, b).dense() + by[a].T @ H_Z @ by[b] for a in by for b in by}


@claim("B", "Section 5", "curvature passed down and created, sublayer by sublayer")
def section_5(draw: Draw) -> Iterator[Check]:
    """At every sublayer's input `∂²ℓ/∂x² = Jᵀ Γ J + Σ g ∂²f`: trace, norm and extreme eigenvalues of all three."""
    for case, layer, f, X, Y in blocks(draw):

        def closed() -> dict[str, Tensor]:
            sublayers = exact.propagation(layer, (X, Y)).sublayers
            parts = ("total", "passed", "created")
            return {
                f"{s.name} {part}": floats(astuple(getattr(s, part))) for s in sublayers for part in parts
            }

        def derived() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            steps, x = autodiff.steps(layer.weights, **f.keywords), X
            for i, (name, step) in enumerate(steps.items()):
                here, above = list(steps.values())[i:], list(steps.values())[i + 1 :]
                z, J = step(x), autodiff.first(step, x)
                g = torch.func.grad(loss_above(above, Y))(z)
                found[f"{name} total"] = extent(curvature(loss_above(here, Y), x))
                found[f"{name} passed"] = extent(J.T @ curvature(loss_above(above, Y), z) @ J)
                found[f"{name} created"] = extent(curvature(lambda x: (g * step(x)).sum(), x))
                x = z
            return found

        yield Equal(case, closed, derived)


def loss_above(steps: list[autodiff.Loss], Y: Tensor) -> autodiff.Loss:
    """The square loss as a function of the input of these steps."""

    def loss(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return autodiff.mse(x, Y)

    return loss


def curvature(loss: autodiff.Loss, x: Tensor) -> Tensor:
    return autodiff.second(lambda v: loss(v.view_as(x)), x.flatten())


def extent(H: Tensor) -> Tensor:
    """As `exact.propagation` tells it."""
    values = torch.linalg.eigvalsh(H)
    return torch.stack([H.trace(), H.norm(), values[0], values[-1]])


@claim(
    "B",
    "Theorem 6",
    "bounds of ‖H‖₂ of every pair of weights of a block",
    "derived afresh, as Theorem 1",
)
def theorem_6(draw: Draw) -> Iterator[Check]:
    for case, layer, f, X, Y in blocks(draw):
        for scale in (0.3, 1.0, 3.0):

            def bound() -> Tensor:
                found = exact.block_bounds(layer, scale * X, Y, true=False)
                tables = torch.stack([found.outer, found.functional, found.total])
                return torch.cat([tables.flatten(), found.whole[None]])

            def true() -> Tensor:
                at, loss = partial(f, X=scale * X), partial(autodiff.mse, Y=Y)
                parts = [
                    p(at, layer.weights, loss) for p in (autodiff.outer, autodiff.functional, autodiff.total)
                ]
                whole = autodiff.matrix(parts[-1], list(layer.weights))
                return torch.stack([norm(block) for H in parts for block in H.values()] + [norm(whole)])

            yield Bound(f"{case}, tokens x {scale}", bound, true)
