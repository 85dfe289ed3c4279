"""Losses: what is summed over the scored tokens (or samples) of a model's output.

A `Loss` gives the *sum*; the `Landscape` divides by the number of scored tokens of all its data. One's own
loss defines `value` and `count`, and may give the closed forms of its derivatives; without them they are
taken by automatic differentiation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position that is not scored, as everywhere in PyTorch


class Loss(ABC):
    """A sum of one term for each scored token, as a function of the model's output."""

    name = "loss"
    features = 1  # how many of the output's last dimensions belong to one token or sample

    @abstractmethod
    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over the scored tokens, differentiable in `output`."""

    @abstractmethod
    def count(self, target: Tensor) -> float:
        """The number of scored tokens."""

    def by_sample(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over the scored tokens of each sample of a batch, `[samples]`."""
        parts = zip(output.split(1), target.split(1), strict=True)
        return torch.stack([self.value(own, wanted) for own, wanted in parts])

    def check(self, output: Tensor, target: Tensor) -> None:  # noqa: B027 (there may be nothing to check)
        """Raise ValueError when output and target do not fit each other."""

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        """`g = ∂ℓ/∂F`, of the shape of the output."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(leaf, target), leaf)
        return gradient

    def hessian_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        """`B v` with `B = ∂²ℓ/∂F²` for a stack of vectors `[K, *output.shape]`."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(leaf, target), leaf, create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(vectors)
            products = [torch.autograd.grad(gradient, leaf, v, retain_graph=True)[0] for v in vectors]
        return torch.stack(products)

    def sample(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """Targets drawn from the distribution whose negative log-likelihood this loss is."""
        raise NotImplementedError(
            f"expected a loss that is a negative log-likelihood, got {self.name!r}, which defines no sample(); "
            'use kind="empirical"'
        )

    def fisher_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        """`g_i (g_iᵀ v_i)` for each token `i`, whose `features` last dimensions are its own."""
        gradient = self.gradient(output, target)
        own = tuple(range(-min(self.features, output.dim() - 1), 0))
        products = gradient * vectors
        return gradient * (products.sum(own, keepdim=True) if own else products)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CrossEntropy(Loss):
    """Cross-entropy of logits `[..., classes]` with labels `[...]`; the label -100 is not scored.

    `g_i = p_i − e_y`, `B_i = diag p_i − p_i p_iᵀ`. With `shift`, the logits at a position are scored
    against the label at the next one, as for causal language models.
    """

    def __init__(self, shift: bool = False):
        self.shift = shift
        self.name = "next-token" if shift else "cross-entropy"

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point():
            raise ValueError(
                f"{self.name}: expected integer labels, got {target.dtype}; use loss='mse' for regression"
            )
        if output.shape[:-1] != target.shape:
            raise ValueError(
                f"{self.name}: expected labels {list(output.shape[:-1])} for logits {list(output.shape)}, "
                f"got {list(target.shape)}"
            )
        labels = target[target != IGNORED]
        if labels.numel() and (labels.min() < 0 or labels.max() >= output.shape[-1]):
            raise ValueError(
                f"{self.name}: expected labels from 0 to {output.shape[-1] - 1} or {IGNORED}, "
                f"got {int(labels.min())} to {int(labels.max())}"
            )

    def count(self, target: Tensor) -> float:
        labels = target[..., 1:] if self.shift else target
        return int((labels != IGNORED).sum())

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        logits, labels = self._labelled(output, target)
        return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)

    def by_sample(self, output: Tensor, target: Tensor) -> Tensor:
        logits, labels = self._labelled(output, target)
        terms = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        return terms.view(len(target), -1).sum(1)

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        logits, labels = self._labelled(output, target)
        scored = (labels != IGNORED).nonzero()[:, 0]
        gradient = torch.softmax(logits, dim=-1)
        gradient[scored, labels[scored]] -= 1
        gradient[labels == IGNORED] = 0
        return gradient.view(output.shape)

    def hessian_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        logits, labels = self._labelled(output, target)
        p = torch.softmax(logits, dim=-1)
        p[labels == IGNORED] = 0
        products = p * vectors.reshape(len(vectors), *p.shape)
        products.addcmul_(p, products.sum(-1, keepdim=True), value=-1)
        return products.view(vectors.shape)

    def sample(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        logits, labels = self._labelled(output, target)
        scored = labels != IGNORED
        # one uniform number a scored token, in order: padding and batching change no draw
        uniform = torch.rand(int(scored.sum()), 1, generator=generator, dtype=torch.float64).to(output.device)
        below = torch.softmax(logits[scored].double(), dim=-1).cumsum(-1)
        drawn = labels.clone()
        drawn[scored] = torch.searchsorted(below, uniform)[:, 0].clamp(max=output.shape[-1] - 1)
        drawn = drawn.view(target.shape)
        return torch.cat([target[..., :1], drawn[..., :-1]], dim=-1) if self.shift else drawn

    def _labelled(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """All logits `[n, classes]`, without a copy, beside the label of each `[n]`, which may be none."""
        if self.shift:  # labels move, since logits are many
            target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], IGNORED)], dim=-1)
        return output.reshape(-1, output.shape[-1]), target.reshape(-1)


class MSE(Loss):
    """Mean squared error: for each token the mean over its `d` entries of `(F − Y)²`.

    Averaged over tokens this is the papers' `‖F − Y‖² / (L d_V)`: `g_i = 2 (F_i − Y_i) / d`, `B_i = 2 I / d`.
    An output of one dimension is one number a sample. A target of NaN is not allowed.
    """

    name = "mse"

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.shape != output.shape and (target.dim() != 1 or output.shape != (*target.shape, 1)):
            raise ValueError(
                f"mse: expected targets {list(output.shape)} like the output, got {list(target.shape)}"
            )

    def count(self, target: Tensor) -> float:
        return target.numel() if target.dim() < 2 else target.numel() // target.shape[-1]

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.view(output.shape)).square().sum() / self._width(output, target)

    def by_sample(self, output: Tensor, target: Tensor) -> Tensor:
        squares = (output - target.view(output.shape)).square()
        return squares.reshape(len(squares), -1).sum(1) / self._width(output, target)

    def gradient(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.view(output.shape)) * (2 / self._width(output, target))

    def hessian_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        return vectors * (2 / self._width(output, target))

    def sample(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """Gaussian around the output; its negative log-likelihood has `B_i = 2 I / d`, so variance `d / 2`."""
        uniform = torch.rand(output.shape, generator=generator, dtype=torch.float64)
        noise = (2**0.5 * torch.erfinv(2 * uniform - 1)).to(output)
        return (output + noise * (self._width(output, target) / 2) ** 0.5).view(target.shape)

    def _width(self, output: Tensor, target: Tensor) -> float:
        return output.numel() / self.count(target)


class PerToken(Loss):
    """Any function `f(output, target)` that returns one loss for each scored token or sample, in any shape.

    `features` says how many of the output's last dimensions belong to one of them; only a Fisher matrix asks.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], name: str | None = None, features: int = 1
    ):
        self.function, self.features = function, features
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        terms = self.function(output, target)
        if not isinstance(terms, Tensor) or terms.dim() == 0:
            got = "a scalar" if isinstance(terms, Tensor) else type(terms).__name__
            raise ValueError(
                f"loss {self.name!r}: expected a tensor with one loss for each token or sample, got {got}; "
                'return the losses before they are averaged (reduction="none"), or write a cl.losses.Loss'
            )
        return terms

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return self.terms(output, target).sum()

    def count(self, target: Tensor) -> float:
        return float("nan")  # known only from the terms: the landscape asks `count_terms`

    def count_terms(self, output: Tensor, target: Tensor) -> int:
        return self.terms(output, target).numel()


def require_derivatives(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Refuse closed forms of one's own that are not the derivatives of the loss's value."""
    own = type(loss)
    if own.__module__ == __name__:
        return
    vectors = torch.randn(1, *output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    plain = Loss.gradient(loss, output, target), Loss.hessian_product(loss, output, target, vectors)
    found = loss.gradient(output, target), loss.hessian_product(output, target, vectors)
    for name, a, b in zip(("gradient", "hessian_product"), found, plain, strict=True):
        if a.shape != b.shape or not (a - b).norm() <= torch.finfo(b.dtype).eps ** 0.5 * (
            a.norm() + b.norm()
        ):
            raise ValueError(
                f"expected {own.__name__}.{name} to be the derivative of its value, got another; "
                "correct it, or leave it out: it is then taken by automatic differentiation"
            )


def named(loss: str | Loss | Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """The loss of a name, a `Loss` as it is, or a function of output and target as `PerToken`."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        known: dict[str, Loss] = {
            "next-token": CrossEntropy(shift=True),
            "cross-entropy": CrossEntropy(),
            "mse": MSE(),
        }
        if loss not in known:
            raise ValueError(f"expected a loss out of {', '.join(known)} or 'auto', got {loss!r}")
        return known[loss]
    if callable(loss):
        return PerToken(loss)
    raise TypeError(
        f"expected a loss name, a Loss or a function of output and target, got {type(loss).__name__}"
    )
