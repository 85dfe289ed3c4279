"""Upper bounds of the spectral norm of every Hessian block of a whole Transformer block, beside the true norms.

In the spirit of Theorems 1 and 6 of "Closing the Curvature Gap" (arXiv 2510.16927), derived afresh. Each sublayer
bounds the spectral norms of its first derivatives and of `Σ_m g_m ∂²f_m`, by its own weights and what it finds at
the point; a chain puts them together by submultiplicativity. With `T_ka` the bound of how weight `a` moves the
input of sublayer `k`, `S_k` that of its second derivatives and `J_a` that of the output by `a`,

    ‖H_f(a, b)‖ ≤ Σ_k T_ka ‖S_k‖ T_kb,        ‖H_o(a, b)‖ ≤ ‖B‖ J_a J_b,

where a skip adds 1 to how its input moves its output. What the sublayers put in:

- softmax, row by row: `‖diag p − p pᵀ‖ ≤ ½`, and contracted with `e`, `p·e = 0`, its second derivative is the
  quadratic form `Σ_j p_j e_j (u_j − p·u)² ≤ ½ max|e| ‖u‖²`. Centring keys and values changes nothing.
- attention as a matrix: `‖A‖₂ ≤ sqrt(largest column sum)`, up to `√L`; not 1.
- norms: `‖∂n/∂x‖ ≤ r`, and `‖Σ_a u_a ∂²n_a‖ ≤ (2/√3) r² ‖C u‖/√d`: with `ρ = |n|/√d ≤ 1` and `C u` at an angle `t`
  to `n`, the largest eigenvalue is `ρ cos t (4 − 3ρ²)/2 + ρ sqrt((cos t (2 − 3ρ²)/2)² + sin² t)` in these units,
  at most `2/√3` by Cauchy and Schwarz.
- activations: the largest `|σ'|` and `|σ'' y|` that occur.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch
from itertools import product
from typing import Any

import torch
from torch import Tensor

from curvlens.exact.attention_jet import AttentionJet
from curvlens.exact.chain import ChainJet
from curvlens.exact.ffn import FeedForwardJet
from curvlens.exact.jet import Jet, Layer
from curvlens.exact.linear import Affine, LinearJet
from curvlens.exact.mlp import LinearMLPJet
from curvlens.exact.norm import NormJet
from curvlens.exact.result import Sequences, Tokens, loss_at

First = dict[str, float]  # of the output by a weight or "input"
Second = dict[tuple[str, str], float]  # of a pair, in both orders; what is left out is zero


@dataclass(frozen=True)
class BlockBounds:
    """Bounds of `‖H(a, b)‖₂` for every pair of weights: `[a, b]` in the order of `names`, with the true norms.

    `true` is None unless asked for.
    """

    names: tuple[str, ...]
    outer: Tensor
    functional: Tensor
    true: Tensor | None

    @property
    def total(self) -> Tensor:
        return self.outer + self.functional

    @property
    def whole(self) -> Tensor:
        """A bound of the norm of the whole Hessian: the norm of the matrix of bounds."""
        return torch.linalg.matrix_norm(self.total, ord=2)

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"{'block':{2 * width + 2}}  bound      true       bound/true"]
        for (i, a), (j, b) in product(enumerate(self.names), repeat=2):
            if j < i:
                continue
            line = f"{a:{width}}, {b:{width}}  {self.total[i, j].item():.3e}"
            if self.true is not None:
                true = self.true[i, j].item()
                ratio = f"{self.total[i, j].item() / true:.3g}" if true else "-"
                line += f"  {true:.3e}  {ratio}"
            lines.append(line)
        return "\n".join(lines)


def block_bounds(
    layer: Layer, X: Sequences, Y: Sequences | None, loss: str = "mse", true: bool = True, **given: Any
) -> BlockBounds:
    """The bounds of every pair of weights of a block or a chain, and with `true` the norms themselves.

    The bounds cost a forward and a backward pass and a few singular values a sublayer; the norms are of dense blocks.
    """
    tokens = Tokens.of(X)
    jet = layer.at(tokens)
    at = loss_at(tokens, Y, loss, **given)(jet.output)
    names = tuple(layer.weights)
    J, S = first(jet), second(jet, at.gradient)
    by = torch.tensor([J[name] for name in names], dtype=torch.float64)
    functional = torch.tensor([[S.get((a, b), 0.0) for b in names] for a in names], dtype=torch.float64)
    B = at.hessian.abs().max() if at.hessian.dim() == 1 else _norm(at.hessian).max()
    norms = None
    if true:
        H, blocks = layer._hessian(tokens, loss_at(tokens, Y, loss, **given)).total.dense(), layer.blocks
        rows = H.split([block.size for block in blocks])
        norms = torch.stack(
            [
                torch.stack([_norm(cell) for cell in row.split([block.size for block in blocks], 1)])
                for row in rows
            ]
        )
    return BlockBounds(names, B.item() * torch.outer(by, by), functional, norms)


@singledispatch
def first(jet: Jet) -> First:
    """Bounds of the spectral norm of the Jacobian by each weight and by "input"."""
    raise TypeError(f"expected a jet whose bounds are known, got {type(jet).__name__}")


@singledispatch
def second(jet: Jet, g: Tensor) -> Second:
    """Bounds of the spectral norm of every block of `Σ_m g_m ∂²f_m`."""
    raise TypeError(f"expected a jet whose bounds are known, got {type(jet).__name__}")


# -- the chain rule


@first.register
def _(jet: ChainJet) -> First:
    return _chain(jet, None)[0]


@second.register
def _(jet: ChainJet, g: Tensor) -> Second:
    return _chain(jet, g)[1]


def _chain(jet: ChainJet, g: Tensor | None) -> tuple[First, Second]:
    moved, found = {"input": 1.0}, _Pairs()  # moved: how each weight below moves the input of the next layer
    upstream = [None] * len(jet.jets) if g is None else jet.gradients(g)
    for inner, names, g_inner in zip(jet.jets, jet.names, upstream, strict=True):
        J = first(inner)
        if g_inner is not None:
            # a weight acts within this layer by its own name, or through its input
            acting = [(full, own, 1.0) for own, full in names.items()]
            acting += [(name, "input", size) for name, size in moved.items()]
            S = second(inner, g_inner)
            for (a, as_a, size_a), (b, as_b, size_b) in product(acting, repeat=2):
                found.add(a, b, size_a * S.get((as_a, as_b), 0.0) * size_b)
        moved = {name: size * J["input"] for name, size in moved.items()}
        moved.update({full: J[own] for own, full in names.items()})
    if jet.residual:
        moved["input"] += 1
    return moved, found


class _Pairs(dict[tuple[str, str], float]):
    def add(self, a: str, b: str, size: float) -> None:
        self[a, b] = self.get((a, b), 0.0) + size

    def both(self, a: str, b: str, size: float) -> None:
        self.add(a, b, size)
        if a != b:
            self.add(b, a, size)


# -- sublayers


@first.register
def _(jet: NormJet) -> First:
    sizes = {
        "input": (jet.r.max() * jet.gamma.abs().max()).item(),
        "weight": jet.n.norm(dim=0).max().item(),
    }
    return {**sizes, "bias": math.sqrt(len(jet.n))} if jet.has_bias else sizes


@second.register
def _(jet: NormJet, g: Tensor) -> Second:
    found = _Pairs()
    u = jet.C(jet.gamma * g).norm(dim=-1, keepdim=True)
    found.both("input", "input", (2 / math.sqrt(3 * jet.d) * jet.r**2 * u).max().item())
    found.both("weight", "input", (jet.r * g).norm(dim=0).max().item())
    return found


@first.register
def _(jet: LinearJet) -> First:
    found = {"input": _size(jet.affine.W)}
    _add_affine(found, jet.affine, "weight", 1.0)
    return found


@second.register
def _(jet: LinearJet, g: Tensor) -> Second:
    found = _Pairs()
    found.both("weight", "input", _size(g))
    return found


@first.register
def _(jet: LinearMLPJet) -> First:
    found = {name: _size(site.u) * _size(site.V) for name, site in jet.sites().items()}
    return {**found, "input": _size(jet.matrices[0] @ jet.between(0, len(jet.matrices)))}


@second.register
def _(jet: LinearMLPJet, g: Tensor) -> Second:
    found, sites = _Pairs(), list(jet.sites().items())
    to_prefix = torch.eye(len(jet.matrices[0]), dtype=g.dtype, device=g.device)
    for i, (a, at_a) in enumerate(sites):
        found.both(a, "input", _size(to_prefix) * _size(g @ at_a.V.mT))
        to_prefix = to_prefix @ jet.matrices[i]
        for j, (b, at_b) in enumerate(sites[i + 1 :], i + 1):
            found.both(a, b, _size(at_a.u.mT @ (g @ at_b.V.mT)) * _size(jet.between(i, j)))
    return found


@first.register
def _(jet: FeedForwardJet) -> First:
    out = _size(jet.down.W)
    slopes = {name: out * _largest(jet.first[name]) for name in jet.inner}
    return _affine_first(jet.inner, slopes, jet.down)


@second.register
def _(jet: FeedForwardJet, g: Tensor) -> Second:
    back = g @ jet.down.W.mT
    slopes = {name: _largest(first) for name, first in jet.first.items()}
    bends = _Pairs()
    for (a, b), values in jet.second.items():
        bends.both(a, b, _largest(values * back))
    upstream = {name: first * back for name, first in jet.first.items()}
    return _affine_second(jet.inner, slopes, bends, upstream, jet.down, g)


@first.register
def _(jet: AttentionJet) -> First:
    out = _size(jet.out.W) if jet.out else 1.0
    slopes = {name: out * size for name, size in _attention_slopes(jet).items()}
    found = _affine_first(jet.inner, slopes, jet.out)
    return {**found, "out.bias": math.sqrt(len(jet.output))} if jet.out_bias else found


@second.register
def _(jet: AttentionJet, g: Tensor) -> Second:
    do = jet.by.split(g @ jet.out.W.mT if jet.out else g)
    upstream, dA, dS = jet.gradients(do)
    s, q, k, y = jet.s, _norm(jet.q), _norm(_centred(jet.k, jet)), _norm(do)
    e = (dA - (jet.A * dA).sum(-1, keepdim=True)).where(jet.A > 0, 0).abs().amax((-1, -2)) / 2
    bends = _Pairs()
    of_heads = {
        ("query", "query"): s * s * k * k * e,
        ("key", "key"): s * s * q * q * e,
        ("query", "key"): s * s * k * q * e + s * _norm(dS),
        ("query", "value"): s / 2 * y * k,
        ("key", "value"): s / 2 * y * q,
    }
    for (a, b), sizes in of_heads.items():
        bends.both(a, b, sizes.max().item() * _shared(jet, a) * _shared(jet, b))
    return _affine_second(jet.inner, _attention_slopes(jet), bends, upstream, jet.out, g)


def _attention_slopes(jet: AttentionJet) -> First:
    """Bounds of `∂o/∂q`, `∂o/∂k`, `∂o/∂v`: the largest over sequences and heads, which do not mix here."""
    if not jet.rows.softmax:
        raise ValueError("expected softmax attention: bounds of other attention maps are not known")
    q, k, v = _norm(jet.q), _norm(_centred(jet.k, jet)), _norm(_centred(jet.v, jet))
    slopes = {
        "query": (jet.s / 2 * k * v).max().item(),
        "key": (jet.s / 2 * q * v).max().item(),
        "value": jet.A.sum(-2).max().sqrt().item(),
    }
    return {name: slope * _shared(jet, name) for name, slope in slopes.items()}


def _shared(jet: AttentionJet, name: str) -> float:
    """How a head repeated for `m` query heads is felt by them together, `√m` times as much; and what turns stretch."""
    repeated = math.sqrt(jet.by.heads / jet.groups[name])
    return repeated if jet.turns is None or name == "value" else repeated * _norm(jet.turns).max().item()


def _centred(x: Tensor, jet: AttentionJet) -> Tensor:
    """Keys or values less their mean over the sequence: a constant in a row of scores or values does not matter."""
    if jet.by.at is not None:  # padding lies at zero, and would not be moved along
        return x
    return x - x.mean(-2, keepdim=True)


# -- an inner function of affine maps of the input, and an affine map of its value: attention, feed-forward


def _affine_first(inner: dict[str, Affine], slopes: First, down: Affine | None) -> First:
    found = {"input": sum(slopes[name] * _size(affine.W) for name, affine in inner.items())}
    for name, affine in inner.items():
        _add_affine(found, affine, name, slopes[name])
    if down is not None:
        _add_affine(found, down, down.name, 1.0)
    return found


def _add_affine(found: First, affine: Affine, name: str, slope: float) -> None:
    found[name] = slope * _size(affine.x)
    if affine.has_bias:
        found[affine.bias] = slope * math.sqrt(len(affine.x))


def _affine_second(
    inner: dict[str, Affine],
    slopes: First,
    bends: Second,
    upstream: dict[str, Tensor],
    down: Affine | None,
    g: Tensor,
) -> Second:
    """From the bounds by the preactivations `h = x W + b` to those by `W`, `b` and `x`, and by the last map."""
    found = _Pairs()
    reach = []  # how each weight, or the input, moves each preactivation
    for name, affine in inner.items():
        reach.append((name, name, _size(affine.x)))
        reach.append(("input", name, _size(affine.W)))
        if affine.has_bias:
            reach.append((affine.bias, name, math.sqrt(len(affine.x))))
        found.both(name, "input", _size(upstream[name]))
    for (a, via_a, size_a), (b, via_b, size_b) in product(reach, repeat=2):
        found.add(a, b, size_a * bends.get((via_a, via_b), 0.0) * size_b)
    if down is not None:
        for a, via, size in reach:
            found.both(a, down.name, size * slopes[via] * _size(g))
    return found


def _norm(x: Tensor) -> Tensor:
    """Spectral norms of a stack of matrices."""
    return torch.linalg.matrix_norm(x, ord=2)


def _size(x: Tensor) -> float:
    return _norm(x).item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item()
