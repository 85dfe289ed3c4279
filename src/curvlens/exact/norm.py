"""LayerNorm and RMSNorm, exactly, `ε` included, at `O(d)` a row.

    n = r C x,    r = (mean((C x)²) + ε)^{-1/2},    z = γ ∘ n + β,

with `C = I − 11ᵀ/d` for LayerNorm and `C = I` for RMSNorm. Rows are independent, and

    ∂n/∂x = r (C − n nᵀ/d),
    ∂²n_a/∂x_b∂x_c = −(r²/d) (C_ab n_c + C_ac n_b + C_bc n_a − 3 n_a n_b n_c / d).

At `ε = 0` these are Theorems 2 and 3 of "Closing the Curvature Gap" (arXiv 2510.16927), which write
LayerNorm as `P(X) M(X)` with matrices of size `(L d)²`. The output is linear in `γ` and `β`, so the only
other second derivatives are the mixed ones of `γ` and `x`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvlens.exact.jet import Back, Bend, Jet, Layer, Tangent
from curvlens.exact.result import LossAt, Result, Tokens, numbers
from curvlens.exact.tokenwise import zero
from curvlens.structured import BlockOperator, Dense


class _Norm(Layer):
    centred: bool

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        if weight.dim() != 1 or (bias is not None and bias.shape != weight.shape):
            raise ValueError(
                f"expected weight [d] and bias [d] or None, got {list(weight.shape)} and "
                f"{None if bias is None else list(bias.shape)}"
            )
        if not eps >= 0:
            raise ValueError(f"expected eps of zero or more, got {eps}")
        self.weights = numbers({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        self.eps = eps

    def at(self, tokens: Tokens) -> NormJet:
        return NormJet(self, tokens.stacked)

    def _hessian(self, tokens: Tokens, loss: LossAt, with_input: bool = False) -> Result:
        """`H_o(γ, γ) = Σ_i diag(n_i) B_i diag(n_i)`, `H_o(γ, β) = Σ_i diag(n_i) B_i`, `H_o(β, β) = Σ_i B_i`, `H_f = 0`.

        With the block "input", which both parts have, products of the jet instead.
        """
        if with_input:
            return super()._hessian(tokens, loss, with_input)
        jet = self.at(tokens)
        at = loss(jet.output)
        slopes = {"weight": jet.n, "bias": torch.ones_like(jet.n)}

        def cell(row: str, column: str) -> Dense:
            if at.hessian.dim() == 1:
                matrix = torch.diag(torch.einsum("n,na,na->a", at.hessian, slopes[row], slopes[column]))
            else:
                matrix = torch.einsum("na,nab,nb->ab", slopes[row], at.hessian, slopes[column])
            return Dense(matrix, self.blocks.select(row), self.blocks.select(column))

        n = jet.n
        outer = BlockOperator(cell, self.blocks, symmetric=True, dtype=n.dtype, device=n.device)
        return Result(outer, zero(self.blocks, n), at)

    def row_jacobians(self, X: Tensor) -> Tensor:
        """`∂z_i/∂x_i = r diag(γ) (C − n nᵀ/d)` of each row: `[*rows, d, d]`; other rows give zero."""
        jet = NormJet(self, X)
        n, r, d = jet.n, jet.r, X.shape[-1]
        J = r[..., None] * (self.centring(X) - n[..., :, None] * n[..., None, :] / d)
        return self.weights["weight"][:, None] * J

    def row_hessians(self, X: Tensor) -> Tensor:
        """`∂²z_ia/∂x_ib∂x_ic` of each row, all of it: `[*rows, a, b, c]`."""
        jet = NormJet(self, X)
        n, r, d = jet.n, jet.r, X.shape[-1]
        C = self.centring(X)
        Cn = torch.einsum("ab,...c->...abc", C, n)
        nnn = torch.einsum("...a,...b,...c->...abc", n, n, n)
        H = Cn + Cn.transpose(-1, -2) + Cn.transpose(-1, -3) - 3 / d * nnn
        return -(r[..., None, None] ** 2) / d * self.weights["weight"][:, None, None] * H

    def centring(self, X: Tensor) -> Tensor:
        """The matrix `C`."""
        d = X.shape[-1]
        eye = torch.eye(d, dtype=X.dtype, device=X.device)
        return eye - 1 / d if self.centred else eye


class LayerNorm(_Norm):
    """`γ ∘ (x − mean x) / sqrt(var x + ε) + β`, over the last dimension."""

    centred = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5):
        super().__init__(weight, bias, eps)


class RMSNorm(_Norm):
    """`γ ∘ x / sqrt(mean x² + ε)`, over the last dimension."""

    centred = False

    def __init__(self, weight: Tensor, eps: float = 1e-6):
        super().__init__(weight, None, eps)


class NormJet(Jet):
    """The derivatives of a norm: `O(d)` time and memory a row, no matrix."""

    def __init__(self, layer: _Norm, X: Tensor):
        self.gamma, beta = layer.weights["weight"], layer.weights.get("bias")
        self.has_bias, self.centred, self.d = beta is not None, layer.centred, X.shape[-1]
        if self.d != len(self.gamma):
            raise ValueError(f"expected an input of width {len(self.gamma)}, as weight is, got {self.d}")
        m = self.C(X)
        square = (m * m).mean(-1, keepdim=True) + layer.eps
        if (square == 0).any():
            raise ValueError(
                "expected rows that are not constant, or eps > 0: the norm has no derivative here"
            )
        self.r = square.rsqrt()
        self.n = self.r * m
        self.output = self.gamma * self.n if beta is None else self.gamma * self.n + beta

    def C(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def J(self, x: Tensor) -> Tensor:
        """`∂n/∂x` applied to `x`; symmetric."""
        return self.r * (self.C(x) - self.n * _dot(self.n, x) / self.d)

    def push(self, tangent: Tangent) -> Tensor:
        return self._output(self.J(tangent["input"]), tangent)

    def _output(self, n: Tensor, tangent: Tangent) -> Tensor:
        """The tangent of the output, from that of `n`."""
        moved = self.gamma * n + _rows(tangent["weight"]) * self.n
        return moved + _rows(tangent["bias"]) if self.has_bias else moved

    def pull(self, g: Tensor) -> Tangent:
        gradient = {"input": self.J(self.gamma * g), "weight": (g * self.n).sum(1)}
        if self.has_bias:
            gradient["bias"] = g.sum(1)
        return gradient

    def along(self, g: Tensor) -> Bend:
        u = self.gamma * g
        Cu, un = self.C(u), _dot(u, self.n)
        scale = -self.r * self.r / self.d

        def bend(tangent: Tangent) -> tuple[Tensor, Back]:
            x, n = tangent["input"], self.J(tangent["input"])

            def back(turn: Tensor) -> Tangent:
                nx = _dot(self.n, x)
                created = scale * (Cu * nx + self.n * (_dot(Cu, x) - 3 / self.d * un * nx) + un * self.C(x))
                # J is linear: what comes from above and what the moved weight adds go through it together
                input = self.J(self.gamma * turn + _rows(tangent["weight"]) * g) + created
                moved = {"input": input, "weight": (turn * self.n + g * n).sum(1)}
                return {**moved, "bias": turn.sum(1)} if self.has_bias else moved

            return self._output(n, tangent), back

        return bend


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _rows(vector: Tensor) -> Tensor:
    """A stack of weights `[K, d]`, to be spread over the rows `[K, n, d]`."""
    return vector[:, None, :]
