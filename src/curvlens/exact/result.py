"""What every closed form takes and gives: tokens, a loss that acts token by token, and the two parts of the Hessian.

A layer takes part by a method `_hessian(tokens, loss) -> Result` (or `_hessian(tokens, loss, **options)`) and by
being callable: `layer(X)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from curvlens.operator import Operator

Sequences: TypeAlias = "Tensor | Sequence[Tensor]"
"""One sequence `[L, d]`, several of one length `[batch, L, d]`, or a list of `[L_b, d]`."""


class Tokens(NamedTuple):
    """The tokens of all sequences, one below the other."""

    stacked: Tensor  # [n, d]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, X: Sequences) -> Tokens:
        if not isinstance(X, Tensor):
            sequences = list(X)
            if not sequences or any(x.dim() != 2 for x in sequences):
                raise ValueError(
                    "expected a list of sequences [L_b, d], got shapes "
                    f"{[list(x.shape) for x in sequences]}; give each sequence as a matrix of tokens"
                )
            return cls(torch.cat(sequences), tuple(len(x) for x in sequences))
        if X.dim() == 2:
            return cls(X, (len(X),))
        if X.dim() == 3:
            return cls(X.reshape(-1, X.shape[-1]), (X.shape[1],) * X.shape[0])
        raise ValueError(
            f"expected X of shape [L, d], [batch, L, d] or a list of [L_b, d], got {list(X.shape)}"
        )

    def split(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The rows (the tokens themselves, if none are given) of each sequence."""
        return (self.stacked if rows is None else rows).split(self.lengths)

    def like(self, X: Sequences, rows: Tensor) -> Sequences:
        """The stacked rows in the form of `X`."""
        if not isinstance(X, Tensor):
            return list(rows.split(self.lengths))
        return rows if X.dim() == 2 else rows.reshape(*X.shape[:2], -1)


def numbers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as numbers: closed forms need no graph, and parameters of a model would record one."""
    return {name: weight.detach() for name, weight in weights.items()}


class TokenLoss(NamedTuple):
    """Value and derivatives of a loss that acts token by token on a layer's output `F` `[n, o]`."""

    value: Tensor | None  # 0-d; None where only derivatives were given
    gradient: Tensor  # [n, o]: g_i = dl/dF_i
    hessian: Tensor  # [n]: B_i = hessian[i] I, or [n, o, o]: B_i

    def curvature(self) -> Tensor:
        """`B_i` as matrices `[n, o, o]`."""
        if self.hessian.dim() == 3:
            return self.hessian
        identity = torch.eye(self.gradient.shape[-1], dtype=self.gradient.dtype, device=self.gradient.device)
        return self.hessian[:, None, None] * identity


LossAt: TypeAlias = Callable[[Tensor], TokenLoss]
"""From the outputs of all tokens `[n, o]` to the loss there."""


def squared_error(Y: Tensor, lengths: Sequence[int]) -> LossAt:
    """The mean over sequences of `‖F − Y‖² / (L d_V)`: `g = c (F − Y)`, `B = c I`, `c = 2 / (batch L d_V)`."""

    def at(F: Tensor) -> TokenLoss:
        _same_tokens(F, Y, F.shape)
        if len(set(lengths)) == 1:
            scale = F.new_full((len(F),), 2 / (len(F) * F.shape[1]))
        else:
            per_sequence = F.new_tensor([2 / (len(lengths) * L * F.shape[1]) for L in lengths])
            scale = per_sequence.repeat_interleave(torch.tensor(lengths, device=F.device))
        residual = F - Y
        gradient = scale[:, None] * residual
        return TokenLoss((gradient * residual).sum() / 2, gradient, scale)

    return at


def cross_entropy(Y: Tensor, ignore: int = -100) -> LossAt:
    """Mean over the scored tokens (those whose class is not `ignore`): `g = (p − e_y)/n`, `B = (diag p − p pᵀ)/n`."""

    def at(F: Tensor) -> TokenLoss:
        _same_tokens(F, Y, F.shape[:1])
        scored = Y.ne(ignore)
        count = int(scored.sum())
        if count == 0:
            raise ValueError(f"expected at least one scored token, got only the ignored class {ignore}")
        if int(Y[scored].min()) < 0 or int(Y[scored].max()) >= F.shape[1]:
            raise ValueError(
                f"expected classes from 0 to {F.shape[1] - 1}, the width of the output, or {ignore}, got "
                f"{int(Y[scored].min())} to {int(Y[scored].max())}"
            )
        weight = scored.to(F.dtype)[:, None] / count
        logs = F.log_softmax(-1)
        p = logs.exp()
        target = torch.zeros_like(F).scatter_(1, Y.clamp(min=0)[:, None], 1.0)
        value = -(weight * target * logs).sum()
        hessian = weight[..., None] * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])
        return TokenLoss(value, weight * (p - target), hessian)

    return at


def given(
    Y: Tensor | None,
    g: Tensor | Callable[..., Tensor] | Sequences,
    B: Tensor | Callable[..., Tensor] | float | Sequences | None,
) -> LossAt:
    """Derivatives given as arrays (in the form of the output) or as functions of `(F [n, o], Y)`.

    `B` may be one number or `[n]` (multiples of the identity), one matrix `[o, o]`, or one a token; without it,
    the loss is taken as linear in the output and the outer-product part is zero.
    """

    def at(F: Tensor) -> TokenLoss:
        gradient = g(F, Y) if callable(g) else Tokens.of(g).stacked
        _same_tokens(F, gradient, F.shape)
        hessian = B(F, Y) if callable(B) else (0.0 if B is None else B)
        if not isinstance(hessian, (Tensor, int, float)):
            hessian = torch.cat(list(hessian))  # one stack [L_b, o, o] a sequence
        hessian = torch.as_tensor(hessian, dtype=F.dtype, device=F.device)
        n, o = F.shape
        if hessian.dim() == 0:
            hessian = hessian.expand(n)
        elif hessian.shape == (o, o) and hessian.shape != (n,):
            hessian = hessian.expand(n, o, o)
        elif hessian.dim() == 4:
            hessian = hessian.flatten(0, 1)
        if hessian.shape not in ((n,), (n, o, o)):
            raise ValueError(
                f"expected B as a number, [{n}], [{o}, {o}] or [{n}, {o}, {o}], got {list(hessian.shape)}"
            )
        return TokenLoss(None, gradient, hessian)

    return at


@dataclass(frozen=True)
class Result:
    """The Hessian of a loss in its two parts: `total = outer + functional` (paper A, equation 2)."""

    outer: Operator
    functional: Operator
    loss: TokenLoss

    @cached_property
    def total(self) -> Operator:
        return self.outer + self.functional

    @property
    def blocks(self) -> Any:
        return self.outer.codomain


class Layer(Protocol):
    """What `hessian` asks of a layer."""

    def __call__(self, X: Any) -> Any: ...

    def _hessian(self, tokens: Tokens, loss: LossAt, *arguments: Any, **options: Any) -> Result: ...


def hessian(
    layer: Layer,
    X: Sequences,
    Y: Sequences | None = None,
    *,
    loss: str = "mse",
    g: Any = None,
    B: Any = None,
    **options: Any,
) -> Result:
    """The exact Hessian of `loss(layer(X), Y)` in all parameters of the layer, split at the layer's output.

    `loss` is `"mse"` (`‖F − Y‖²/(L d_V)`, averaged over sequences) or `"cross-entropy"` (mean over scored tokens;
    `Y` holds classes, −100 is not scored); or give the derivatives `g` and `B` of any token-wise loss, see `given`.

    >>> import torch, curvlens.exact as exact
    >>> W = torch.eye(3, dtype=torch.float64)
    >>> R = exact.hessian(exact.SelfAttention(W, W, W), W, 0 * W)
    >>> R.total.block("query", "key").frobenius().item() > 0
    True
    """
    tokens = Tokens.of(X)
    if not len(tokens.stacked):
        raise ValueError(f"expected at least one token, got sequences of lengths {list(tokens.lengths)}")
    tokens = tokens._replace(stacked=tokens.stacked.detach())
    return layer._hessian(tokens, loss_at(tokens, Y, loss, g, B), **options)


def loss_at(tokens: Tokens, Y: Sequences | None, loss: str = "mse", g: Any = None, B: Any = None) -> LossAt:
    """The loss that `hessian` names by these arguments."""
    targets = None if Y is None else _targets(Y)
    if g is not None:
        return given(targets, g, B)
    if B is not None:
        raise ValueError("expected g together with B: the functional part needs the gradient")
    if loss not in ("mse", "cross-entropy"):
        raise ValueError(f"expected loss 'mse' or 'cross-entropy', or g= and B=, got {loss!r}")
    if targets is None:
        raise ValueError(f"expected targets Y for the loss {loss!r}, got none; or give g= and B=")
    return squared_error(targets, tokens.lengths) if loss == "mse" else cross_entropy(targets)


def _targets(Y: Sequences) -> Tensor:
    if not isinstance(Y, Tensor):
        return torch.cat(list(Y))
    if Y.is_floating_point():
        return Tokens.of(Y).stacked
    return Y.reshape(-1)


def _same_tokens(F: Tensor, other: Tensor, shape: Sequence[int]) -> None:
    if tuple(other.shape) != tuple(shape):
        raise ValueError(
            f"expected targets or gradients for the tokens of the output {list(F.shape)}, so {list(shape)}, "
            f"got {list(other.shape)}"
        )
