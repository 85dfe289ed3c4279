"""Paper A, equation 5 and Table 1: how blocks grow with the scale σ of the tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import curvlens.exact as exact
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.verification.claims import Check, Law, claim
from curvlens.exact.verification.problems import Draw, attention

# small tokens, where the lowest order of each block rules; higher ones add σ² of it
SIGMA = torch.logspace(-4, -3, 3, dtype=torch.float64)


def slope(norms: list[torch.Tensor]) -> float:
    """Of log norm against log σ, by least squares."""
    x, y = SIGMA.log(), torch.stack(norms).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


@claim(
    "A",
    "Equation 5",
    "exponents of σ in every block, softmax attention",
    "at a fixed gradient; the caption of figure 3 calls H_o functional",
)
def equation_5(draw: Draw) -> Iterator[Check]:
    yield from exponents(draw, "softmax")
    # query and key: σ⁵ + σ³, each in a part of its own
    p = attention(draw, "", 4, 3, 2, 3)
    g = draw(*p.Y.shape)
    for part, exponent in (("t_outer", 5), ("t_functional", 3)):

        def fitted() -> float:
            parts = [getattr(exact.hessian(p.layer(), s * p.X, g=g), part) for s in SIGMA]
            return slope([H.block("query", "key").frobenius() for H in parts])

        yield Law(f"functional (query, key), {part}", exponent, fitted)


@claim("A", "Table 1", "linear attention: H_o ~ Σ_XX³, H_f ~ Ω_XY Σ_XX")
def table_1(draw: Draw) -> Iterator[Check]:
    yield from exponents(draw, "linear")


def exponents(draw: Draw, activation: str) -> Iterator[Check]:
    for L, d, k, v in ((4, 3, 2, 4), (5, 2, 3, 2)):
        p = attention(draw, f"L = {L}, d_K = {k}", L, d, k, v)
        layer = p.layer(activation=activation)
        for part, blocks in exact.predicted_exponents(layer).items():
            for (row, column), exponent in blocks.items():

                def fitted() -> float:
                    laws = exact.growth(layer, p.X, p.Y, scales=SIGMA, fixed_gradient=True)
                    key = (part, row, column)
                    return next(law.fitted for law in laws if (law.part, law.row, law.column) == key)

                yield Law(f"{p.case}, {part} ({row}, {column})", min(exponent), fitted)


@claim("A", "Section 3.1", "∂F/∂W_V ~ σ, ∂F/∂W_Q and ∂F/∂W_K ~ σ³")
def section_31(draw: Draw) -> Iterator[Check]:
    p = attention(draw, "", 4, 3, 2, 3)
    for name, exponent in (("value", 1), ("query", 3), ("key", 3)):

        def fitted() -> float:
            jacobians = [AttentionLayer(p.layer()).jacobian(s * p.X) for s in SIGMA]
            return slope([J.block("output", name).dense().norm() for J in jacobians])

        yield Law(name, exponent, fitted)


@claim("A", "Figure 8", "linear MLPs of any depth: diagonal blocks ~ σ²")
def figure_8(draw: Draw) -> Iterator[Check]:
    for D in (1, 2, 3):
        mlp = exact.LinearMLP([draw(3, 3) for _ in range(D)])
        X, Y = draw(5, 3), draw(5, 3)
        for name in mlp.weights:

            def fitted() -> float:
                parts = [exact.hessian(mlp, s * X, Y).total.block(name) for s in SIGMA]
                return slope([H.dense().norm() for H in parts])

            yield Law(f"D = {D}, {name}", 2, fitted)
