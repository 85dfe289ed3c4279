"""Double backward: `H v = ∂⟨∂s/∂θ, v⟩/∂θ`.

The graph of the gradient is built once for a batch and serves all vectors: 3 units of work (a gradient) and 6
for the first product, of which 4 are repeated for each further one. Only the parameters in rows and columns
are differentiated, so a pass ends at the lowest of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens.batches import Batch
from curvlens.engine.quantity import Quantity, replaced_output
from curvlens.landscape import Landscape, Parameters


def product(
    land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters, chunk: int
) -> Parameters:
    """The rows' images of directions `{column parameter: [K, *shape]}`, summed over one piece of the data."""
    parameters = land.parameters()
    for name in {*rows, *directions}:
        parameters[name].requires_grad_()
    if not quantity.is_gauss_newton:
        scalar = quantity.scalar(land, piece)(parameters)
        images = _second_derivative(scalar, parameters, rows, directions, chunk)
    elif quantity.at is None:
        images = _gauss_newton(land, quantity, piece, parameters, rows, directions, chunk)
    else:
        images = _inner_gauss_newton(land, quantity, piece, parameters, rows, directions, chunk)
    return dict(zip(rows, images, strict=True))


def _second_derivative(
    scalar: Tensor, parameters: Parameters, rows: list[str], directions: Parameters, chunk: int
) -> list[Tensor]:
    gradients = first_gradient(scalar, [parameters[name] for name in directions])
    return pull_back(gradients, [parameters[name] for name in rows], list(directions.values()), chunk)


def _gauss_newton(
    land: Landscape,
    quantity: Quantity,
    piece: Batch,
    parameters: Parameters,
    rows: list[str],
    directions: Parameters,
    chunk: int,
) -> list[Tensor]:
    """`Jᵀ M J v`; `J v` is the derivative of `Jᵀ u` with respect to `u`, so forward mode is not needed."""
    output = land.output(parameters, piece)
    tangents = jacobian_product(output, [parameters[name] for name in directions], directions, chunk)
    cotangents = quantity.middle(land, piece, output)(tangents)
    return pull_back([output], [parameters[name] for name in rows], [cotangents], chunk)


def _inner_gauss_newton(
    land: Landscape,
    quantity: Quantity,
    piece: Batch,
    parameters: Parameters,
    rows: list[str],
    directions: Parameters,
    chunk: int,
) -> list[Tensor]:
    """`H − H_f` at an inner split, `Jᵀ ∂²ℓ/∂(F, θ)² J` with `J` the Jacobian of `θ ↦ (F, θ)`."""
    assert quantity.at is not None
    with replaced_output(land, quantity.at) as found:
        scalar = land.loss.value(land.output(parameters, piece), piece.target)
    cut = found()
    columns = [parameters[name] for name in directions]
    inner = jacobian_product(cut.output, columns, directions, chunk)
    gradients = first_gradient(scalar, [cut.replacement, *columns])
    targets = [cut.replacement, *(parameters[name] for name in rows)]
    at_split, *direct = pull_back(gradients, targets, [inner, *directions.values()], chunk)
    below = pull_back([cut.output], targets[1:], [at_split], chunk)
    return [a + b for a, b in zip(direct, below, strict=True)]


def first_gradient(scalar: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """`∂s/∂leaf` with its own graph; a leaf that `s` does not depend on gets a constant zero."""
    if not scalar.requires_grad:
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    found = torch.autograd.grad(scalar, leaves, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


def jacobian_product(output: Tensor, columns: Sequence[Tensor], directions: Parameters, chunk: int) -> Tensor:
    """`J v` for a stack of directions, by differentiating `u ↦ Jᵀ u`."""
    cotangent = torch.zeros_like(output, requires_grad=True)
    if not output.requires_grad:
        stack = len(next(iter(directions.values())))
        return output.new_zeros(stack, *output.shape)
    pulled = torch.autograd.grad(
        output, columns, cotangent, create_graph=True, retain_graph=True, allow_unused=True
    )
    known = [(p, v) for p, v in zip(pulled, directions.values(), strict=True) if p is not None]
    return pull_back([p for p, _ in known], [cotangent], [v for _, v in known], chunk)[0]


def pull_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], chunk: int
) -> list[Tensor]:
    """`Σ_o (∂output_o/∂input)ᵀ c_o` for stacks of cotangents `[K, *shape]`: one stack for each input."""
    count = len(cotangents[0]) if cotangents else 0
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return [input.new_zeros(count, *input.shape) for input in inputs]
    chunks: list[tuple[Tensor, ...]] = []
    for start in range(0, count, chunk):
        part = [c[start : start + chunk] for _, c in live]
        chunks.append(_pull_back_chunk([o for o, _ in live], inputs, part))
    return [torch.cat(parts) if len(chunks) > 1 else parts[0] for parts in zip(*chunks, strict=True)]


def _pull_back_chunk(
    outputs: list[Tensor], inputs: Sequence[Tensor], cotangents: list[Tensor]
) -> tuple[Tensor, ...]:
    together = len(cotangents[0]) > 1
    found = torch.autograd.grad(
        outputs,
        inputs,
        cotangents if together else [c[0] for c in cotangents],
        retain_graph=True,
        is_grads_batched=together,
        allow_unused=True,
        materialize_grads=True,
    )
    return found if together else tuple(image[None] for image in found)
