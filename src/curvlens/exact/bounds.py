"""Certified upper bounds of the spectral norm of each block of the Hessian of attention, beside the true norm.

Two kinds. `norms`: from the norms of weights, tokens and gradients alone, in the manner of paper B's Theorem 1 but
derived afresh, since that one takes `‖A‖₂ ≤ 1`, while a row-stochastic matrix reaches `√L`. `kronecker`: from the
factors of the sums over tokens, see `KroneckerSum.spectral_bound`; it needs the factors, and is tighter.

Derivation of `norms`. Let `ρ` be the largest norm of a token, `χ = ‖X‖₂`, `β = max ‖B_i‖₂`, `V = W_V W_O`,
`ω = max_i ‖V g_i‖`, `G` the gradients as rows, `s` the scale of the scores. Central moments of a distribution on the
ball of radius ρ obey `‖M1_i‖ ≤ ρ`, `‖M2_i‖₂ ≤ ρ²` (a variance is at most the mean square) and, as `|c·w| ≤ 2ρ‖w‖`,
`‖M3_i[w]‖₂ ≤ 2ρ³‖w‖`. A sum `Σ_i u_i u_iᵀ ⊗ C_i` is bounded by `max ‖C_i‖ ‖U‖₂²`, and a bilinear sum
`Σ_i (y_i)ᵀ C_i z_i` by `max ‖C_i‖ (Σ‖y_i‖²)^½ (Σ‖z_i‖²)^½`. With `‖Q‖₂ ≤ χ‖W_Q‖` for the queries:

    H_o: QQ  s² β χ² ρ⁴ ‖W_K‖² ‖V‖²     KK  s² β χ² ρ⁴ ‖W_Q‖² ‖V‖²     VV  β ‖M1‖₂² ‖W_O‖² ≤ β n ρ² ‖W_O‖²
         off the diagonal `√(bound_aa bound_bb)`, for a positive semidefinite matrix
    H_f: QQ  2 s² χ² ρ³ ω ‖W_K‖²        KK  2 s² χ² ρ³ ω ‖W_Q‖²        VV  0
         QK  2 s² χ² ρ³ ω ‖W_Q‖‖W_K‖ + s χ ρ² ‖G Vᵀ‖_F
         QV  s χ ρ² ‖W_K‖ ‖G W_Oᵀ‖₂   KV  s χ ρ² ‖W_Q‖ ‖G W_Oᵀ‖₂
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_hessian import AttentionResult
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.attention_map import Softmax
from curvlens.exact.block_bounds import BlockBounds, block_bounds
from curvlens.exact.jet import Layer
from curvlens.exact.result import Sequences, hessian
from curvlens.operator import Operator


class Bound(NamedTuple):
    """Upper bounds of the spectral norm of one block, beside the norm itself where it was asked for."""

    part: str  # "outer", "functional" or "total"
    row: str
    column: str
    kronecker: float
    norms: float | None  # None where this bound does not cover the layer
    true: float | None  # from the singular values of the matrix; None for a block that is too large

    @property
    def ratio(self) -> float | None:
        """The tighter bound over the true norm; 1 is exact."""
        if not self.true:
            return None
        return min(self.kronecker, self.norms if self.norms is not None else self.kronecker) / self.true


class Bounds(list[Bound]):
    """The bounds of every block; `print` shows them beside the true norms."""

    def __str__(self) -> str:
        width = max(len(f"{b.row}, {b.column}") for b in self)
        lines = [f"{'part':10}  {'block':{width}}  {'true':9}  {'Kronecker':18}  norms"]
        for b in self:
            true = "-" if b.true is None else f"{b.true:.3e}"
            cells = [_beside(b.kronecker, b.true), _beside(b.norms, b.true)]
            lines.append(
                f"{b.part:10}  {f'{b.row}, {b.column}':{width}}  {true:9}  {cells[0]:18}  {cells[1]}".rstrip()
            )
        return "\n".join(lines)


def _beside(bound: float | None, true: float | None) -> str:
    """A bound, and in brackets how many times the true norm it is."""
    if bound is None:
        return "-"
    return f"{bound:.3e} ({bound / true:.3g})" if true else f"{bound:.3e}"


@overload
def bounds(
    layer: SelfAttention, X: Sequences, Y: Sequences | None = None, *, largest: int = 4096, **loss: Any
) -> Bounds: ...


@overload
def bounds(
    layer: Layer, X: Sequences, Y: Sequences | None = None, *, largest: int = 4096, **loss: Any
) -> BlockBounds: ...


def bounds(
    layer: SelfAttention | Layer,
    X: Sequences,
    Y: Sequences | None = None,
    *,
    largest: int = 4096,
    **loss: Any,
) -> Bounds | BlockBounds:
    """Bounds of every block of both parts and of their sum, and of the whole (named "all"), see `Bound`.

    The true norm takes a singular value decomposition: it is given for blocks with at most `largest` rows and columns.
    For a Transformer block, a chain of layers or one of their sublayers, see `block_bounds`.
    """
    if isinstance(layer, SelfAttention) and layer.turns is not None:
        layer = AttentionLayer(layer)
    if isinstance(layer, Layer):
        sizes = [block.size for block in layer.blocks]
        return block_bounds(layer, X, Y, true=max(sizes) <= largest, **loss)
    R = hessian(layer, X, Y, **loss)
    assert isinstance(R, AttentionResult)
    by_norms = norm_bounds(R)
    found = Bounds()
    for part, H in (("outer", R.outer), ("functional", R.functional), ("total", R.total)):
        names = H.codomain.names
        table = torch.zeros(len(names), len(names), dtype=torch.float64)
        for i, row in enumerate(names):
            for j, column in enumerate(names[i:], start=i):
                by_norm = by_norms[part, row, column] if by_norms else None
                found.append(_bound(part, row, column, H.block(row, column), by_norm, largest))
                table[i, j] = table[j, i] = by_norm or 0.0
        whole = float(torch.linalg.matrix_norm(table, ord=2)) if by_norms else None
        found.append(_bound(part, "all", "all", H, whole, largest))
    return found


def unit_attention_bound(R: AttentionResult) -> float:
    """`β ‖X‖₂² ‖W_O‖₂²`, what the value block's bound becomes if `‖A‖₂ ≤ 1` is assumed, as paper B's proof does.

    Not an upper bound: where all tokens attend to one, `‖A‖₂ = √L`, and the true norm is above it.
    """
    head, B, norm = R.curvature.heads[0], R.loss.hessian, torch.linalg.matrix_norm
    beta = B.abs().max() if B.dim() == 1 else norm(B, ord=2).max()
    out = 1.0 if head.W_O is None else norm(head.W_O, ord=2) ** 2
    return float(beta * norm(head.x, ord=2) ** 2 * out)


def _bound(part: str, row: str, column: str, H: Operator, norms: float | None, largest: int) -> Bound:
    true = None
    if max(H.shape) <= largest:
        true = float(torch.linalg.matrix_norm(H.dense(), ord=2))
    return Bound(part, row, column, float(H.spectral_bound()), norms, true)  # type: ignore[attr-defined]


def norm_bounds(R: AttentionResult) -> dict[tuple[str, str, str], float] | None:
    """The bounds from norms, `(part, row, column)`, for one softmax head with query, key and value; None for others."""
    layer, heads = R.curvature.layer, R.curvature.heads
    plain = set(layer.weights) == {"query", "key", "value"} and layer.heads == 1 and not layer.biases
    if not plain or not isinstance(layer.activation, Softmax):
        return None
    head, norm = heads[0], torch.linalg.matrix_norm
    W_Q, W_K, W_V = (
        norm(layer.weights[kind].reshape(layer.d, -1), ord=2) for kind in ("query", "key", "value")
    )
    X, s, g, B = head.x, abs(layer.scale), R.loss.gradient, R.loss.hessian
    rho, chi = X.norm(dim=1).max(), norm(X, ord=2)
    beta = B.abs().max() if B.dim() == 1 else norm(B, ord=2).max()
    w = g @ head.W_V.T
    omega, gradients = w.norm(dim=1).max(), norm(g, ord=2)
    outer = {
        "query": s**2 * beta * chi**2 * rho**4 * W_K**2 * W_V**2,
        "key": s**2 * beta * chi**2 * rho**4 * W_Q**2 * W_V**2,
        "value": beta * len(X) * rho**2,
    }
    third = 2 * s**2 * chi**2 * rho**3 * omega
    zero = torch.zeros_like(rho)
    functional = {
        ("query", "query"): third * W_K**2,
        ("key", "key"): third * W_Q**2,
        ("value", "value"): zero,
        ("query", "key"): third * W_Q * W_K + s * chi * rho**2 * w.norm(),
        ("query", "value"): s * chi * rho**2 * W_K * gradients,
        ("key", "value"): s * chi * rho**2 * W_Q * gradients,
    }
    made: dict[tuple[str, str, str], float] = {}
    for (row, column), value in functional.items():
        product = (outer[row] * outer[column]).sqrt()
        made["outer", row, column] = float(product)
        made["functional", row, column] = float(value)
        made["total", row, column] = float(product + value)
    return made


def t_rank_bound(layer: SelfAttention) -> int:
    """Lemma D.2's bound on the rank of the T-outer Hessian, `d rk W_K + d rk W_Q − rk W_K rk W_Q` of one head.

    For weights of full rank: `2 d_K d_V − d_K²` if `d_K < d_V`, else `d_V²` (`d_V` the width of the tokens).
    """
    if set(layer.weights) < {"query", "key"} or layer.heads != 1 or layer.biases:
        raise ValueError("expected one head with query and key weights and no biases")
    d = layer.d
    q, k = (int(torch.linalg.matrix_rank(layer.weights[kind].reshape(d, -1))) for kind in ("query", "key"))
    return d * k + d * q - q * k
