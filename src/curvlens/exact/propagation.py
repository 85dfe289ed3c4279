"""Curvature propagation: what a sublayer passes down of the curvature above it, and what it creates itself.

For a sublayer `z = f(x)` with the gradient `g` and the curvature `Γ = ∂²ℓ/∂z²` of the loss at its output,

    ∂²ℓ/∂x² = Jᵀ Γ J + Σ_m g_m ∂²f_m/∂x²,

a recursion from the loss down to the first input: the role of each sublayer in curvature propagation, as
"Closing the Curvature Gap" (arXiv 2510.16927) asks for it, measured. Here both terms are exact matrices, one a
sequence, for layers with jets (`TransformerBlock`, `stack`, …): `O((L d)²)` memory and `O((L d)³)` time a
sublayer. For the large models of other libraries see `stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.exact.chain import Chain, ChainJet, qualified
from curvlens.exact.jet import Jet, Layer, input_hessian, input_jacobian
from curvlens.exact.result import Sequences, TokenLoss, Tokens, loss_at
from curvlens.exact.stream import StreamPropagation, stream_propagation
from curvlens.landscape import Landscape

Matrices = list[Tensor]  # one [L_b d, L_b d] a sequence; between sequences there is no curvature


@dataclass(frozen=True)
class Extent:
    """The size of a curvature: exact numbers of a symmetric matrix."""

    trace: float
    frobenius: float
    smallest: float  # eigenvalue
    largest: float

    @classmethod
    def of(cls, matrices: Matrices) -> Extent:
        """Those of the block-diagonal matrix of all sequences."""
        values = torch.cat([torch.linalg.eigvalsh(matrix) for matrix in matrices])
        return cls(
            sum(matrix.trace().item() for matrix in matrices),
            torch.stack([matrix.norm() for matrix in matrices]).norm().item(),
            values.min().item(),
            values.max().item(),
        )


@dataclass(frozen=True)
class Sublayer:
    """One step of the recursion. `total = passed + created` is the loss's curvature by the sublayer's input.

    A sublayer with its skip is one step, `x + attn(norm1(x))`; `parts` holds what each layer in it creates, seen
    from the step's input.
    """

    name: str
    passed: Extent
    created: Extent
    total: Extent
    parts: dict[str, Extent]


@dataclass(frozen=True)
class Propagation:
    """The steps in the order of the forward pass, and the loss's own curvature at the output."""

    sublayers: tuple[Sublayer, ...]
    output: Extent

    def __getitem__(self, name: str) -> Sublayer:
        for step in self.sublayers:
            if step.name == name:
                return step
        raise KeyError(f"expected a sublayer among {[s.name for s in self.sublayers]}, got {name!r}")

    def __str__(self) -> str:
        rows = [("", "passed down", "", "", "created", "", "")]
        rows += [("sublayer", "trace", "‖·‖_F", "λ", "trace", "‖·‖_F", "λ")]
        for step in self.sublayers:
            rows.append((step.name, *_shown(step.passed), *_shown(step.created)))
        rows.append(("loss", "", "", "", *_shown(self.output)))
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def propagation(
    model: Layer | Landscape | nn.Module, batch: Any = None, loss: str | None = None, **options: Any
) -> Propagation | StreamPropagation:
    """What every sublayer passes down and what it creates.

    For a block or a chain of layers with jets, `batch = (X, Y)` and the loss "mse" (the default) or "cross-entropy",
    or `g=` and `B=` as in `hessian`: exact matrices. For a `Landscape`, or a model with a batch and a loss as a
    `Landscape` takes them: exact products, and estimates with errors from them; see `stream_propagation` for the
    options `samples`, `eigenvalues`, `tol` and `seed`.
    """
    if isinstance(model, Layer):
        return layer_propagation(model, batch, loss or "mse", **options)
    land = model if isinstance(model, Landscape) else Landscape(model, batch, loss or "auto")
    return stream_propagation(land, **options)


def layer_propagation(
    layer: Layer, batch: tuple[Sequences, Sequences], loss: str = "mse", **given: Any
) -> Propagation:
    """The recursion through a block or a chain of layers with jets; exact."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"expected a batch (X, Y) of tokens and targets, got {type(batch).__name__}")
    X, Y = batch
    tokens = Tokens.of(X)
    units = list(flattened(layer))
    inputs: list[Tokens] = [tokens]
    jets: list[Jet] = []
    for _, unit in units:
        jets.append(unit.at(inputs[-1]))
        inputs.append(Tokens(jets[-1].output, tokens.lengths))
    at = loss_at(tokens, Y, loss, **given)(inputs[-1].stacked)
    gamma, g = _at_output(at, tokens), at.gradient
    output = Extent.of(gamma)
    found: list[Sublayer] = []
    for (name, unit), x, jet in reversed(list(zip(units, inputs[:-1], jets, strict=True))):
        J = input_jacobian(unit, jet, x)
        passed = [j.T @ G @ j for j, G in zip(J, gamma, strict=True)]
        parts = dict(_created(name, unit, jet, x, g))
        created = [sum(several[1:], several[0]) for several in zip(*parts.values(), strict=True)]
        gamma = [a + b for a, b in zip(passed, created, strict=True)]
        g = jet.pull(g[None])["input"][0]
        sizes = {part: Extent.of(matrices) for part, matrices in parts.items()}
        found.append(Sublayer(name, Extent.of(passed), Extent.of(created), Extent.of(gamma), sizes))
    return Propagation(tuple(reversed(found)), output)


def flattened(layer: Layer, name: str = "") -> Iterator[tuple[str, Layer]]:
    """The steps of a model: chains taken apart, except around a skip. A step goes by the name of its last layer."""
    if not isinstance(layer, Chain):
        yield name or type(layer).__name__, layer
    elif layer.residual:
        yield qualified(name, layer.layers[-1][0]) if name else layer.layers[-1][0], layer
    else:
        for part, inner in layer.layers:
            yield from flattened(inner, qualified(name, part) if part else name)


def _at_output(at: TokenLoss, tokens: Tokens) -> Matrices:
    """The loss's curvature of each sequence: its tokens' `B_i` along the diagonal."""
    return [torch.block_diag(*B) for B in at.curvature().split(tokens.lengths)]


def _created(name: str, unit: Layer, jet: Jet, x: Tokens, g: Tensor) -> Iterator[tuple[str, Matrices]]:
    """What each layer of a step creates, as seen from the step's input: `J_belowᵀ (Σ_m g_m ∂²f_m) J_below`."""
    if not isinstance(unit, Chain) or not isinstance(jet, ChainJet):
        yield name, input_hessian(unit, jet, x, g)
        return
    place = name.rpartition(".")[0]
    below: Matrices | None = None
    for (part, layer), inner, upstream in zip(unit.layers, jet.jets, jet.gradients(g), strict=True):
        S, J = input_hessian(layer, inner, x, upstream), input_jacobian(layer, inner, x)
        if below is not None:
            S = [b.T @ s @ b for b, s in zip(below, S, strict=True)]
            J = [j @ b for b, j in zip(below, J, strict=True)]
        yield f"{place}.{part}" if place else part, S
        below, x = J, Tokens(inner.output, x.lengths)


def _shown(extent: Extent) -> tuple[str, str, str]:
    spectrum = f"{extent.smallest:.2e} … {extent.largest:.2e}"
    return f"{extent.trace:.3e}", f"{extent.frobenius:.3e}", spectrum
