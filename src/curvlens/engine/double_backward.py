"""Double backward: `H v = ∂⟨∂s/∂θ, v⟩/∂θ`.

The graph of the gradient is built once for a batch and serves all vectors: 3 units of work (a gradient) and 6
for the first product, of which 6 are repeated for each further one. Only the parameters in rows and columns
are differentiated, so a pass ends at the lowest of them. The last pass frees the graph as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from curvlens.batches import Batch
from curvlens.engine.chunks import saved_bytes
from curvlens.engine.job import Job
from curvlens.engine.quantity import Quantity, replaced_output, share
from curvlens.landscape import Landscape, Parameters

# from stacks of directions, one for each column parameter, and whether the graph is kept for more of them
Push = Callable[[list[Tensor], bool], list[Tensor]]  # to stacks of tangents, one for each output
Pull = Callable[[list[Tensor], bool], list[Tensor]]  # to stacks of images, one for each row parameter


def product(job: Job, directions: Parameters, chunk: int) -> Iterator[tuple[int, Parameters]]:
    pull = job.kept.get("pull")
    keep = pull is not None
    if pull is None:
        pull = _prepared(job, list(directions))
        if job.kept.budget and not job.quantity.sampled:
            keep = job.kept.put("pull", pull, graph_bytes(job.land, job.piece, job.quantity))
    count = len(next(iter(directions.values())))
    for start in range(0, count, chunk):
        part = [stack[start : start + chunk] for stack in directions.values()]
        yield start, dict(zip(job.rows, pull(part, keep or start + chunk < count), strict=True))


def graph_bytes(land: Landscape, piece: Batch, quantity: Quantity) -> int:
    """About what the graph of a gradient, or of `u ↦ Jᵀ u`, holds: a few times what a forward pass does."""
    return (2 if quantity.is_gauss_newton else 3) * saved_bytes(land, piece)


def _prepared(job: Job, names: list[str]) -> Pull:
    """The graph of the gradient, ready for any directions of the named parameters."""
    land, quantity, piece = job.land, job.quantity, job.piece
    parameters = land.parameters()
    for name in {*job.rows, *names}:
        parameters[name].requires_grad_()
    leaves = [parameters[name] for name in job.rows]
    columns = [parameters[name] for name in names]
    if quantity.at is None and not quantity.is_gauss_newton:
        return _hessian(land, quantity, piece, parameters, leaves, columns)
    if not quantity.is_gauss_newton:
        return _derivative(first_gradient(quantity.scalar(land, piece)(parameters), columns), leaves)
    if quantity.at is None:
        return _gauss_newton(land, quantity, piece, parameters, leaves, columns)
    return _inner_gauss_newton(land, quantity.at, piece, parameters, leaves, columns)


def _hessian(
    land: Landscape,
    quantity: Quantity,
    piece: Batch,
    parameters: Parameters,
    leaves: list[Tensor],
    columns: list[Tensor],
) -> Pull:
    """The derivative of `Jᵀ g`, with `g` fixed for the functional part; the loss enters in closed form alone."""
    output = land.output(parameters, piece)
    gradient = _LossGradient.apply(output, land, piece.target)
    gradient = gradient.detach() if quantity.name == "functional" else gradient
    return _derivative(first_gradient([output], columns, [gradient]), leaves)


class _LossGradient(torch.autograd.Function):
    """`g = ∂L/∂F` of the output, and for its own derivative `∂²L/∂F²`."""

    @staticmethod
    def forward(ctx, output, land, target):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(output)
        ctx.land, ctx.target = land, target
        return land.loss.gradient(output, target) / land.weight

    @staticmethod
    def backward(ctx, tangent):  # type: ignore[no-untyped-def]
        (output,) = ctx.saved_tensors
        product = ctx.land.loss.hessian_product(output.detach(), ctx.target, tangent[None])[0]
        return product / ctx.land.weight, None, None


def _derivative(gradients: list[Tensor], leaves: list[Tensor]) -> Pull:
    return lambda directions, keep: pull_back(gradients, leaves, directions, keep)


def _gauss_newton(
    land: Landscape,
    quantity: Quantity,
    piece: Batch,
    parameters: Parameters,
    leaves: list[Tensor],
    columns: list[Tensor],
) -> Pull:
    """`Jᵀ M J v`; `J v` is the derivative of `Jᵀ u` with respect to `u`, so forward mode is not needed."""
    output = land.output(parameters, piece)
    middle = quantity.middle(land, piece, output)
    push = jacobian([output], columns)
    return lambda directions, keep: pull_back([output], leaves, [middle(push(directions, keep)[0])], keep)


def _inner_gauss_newton(
    land: Landscape,
    at: str,
    piece: Batch,
    parameters: Parameters,
    leaves: list[Tensor],
    columns: list[Tensor],
) -> Pull:
    """`H − H_f` at an inner split, `Jᵀ ∂²ℓ/∂(F, θ)² J` with `J` the Jacobian of `θ ↦ (F, θ)`."""
    with replaced_output(land, at) as found:
        scalar = share(land, parameters, piece)
    cut = found()
    push = jacobian([cut.output], columns)
    gradients = first_gradient(scalar, [cut.replacement, *columns])

    def pull(directions: list[Tensor], keep: bool) -> list[Tensor]:
        cotangents = [*push(directions, keep), *directions]
        # the rest of the model may share what lies below the split, as a residual stream
        at_split, *direct = pull_back(gradients, [cut.replacement, *leaves], cotangents, keep=True)
        below = pull_back([cut.output], leaves, [at_split], keep)
        return [a + b for a, b in zip(direct, below, strict=True)]

    return pull


def first_gradient(
    outputs: Tensor | Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """`∂s/∂leaf` with its own graph, `s` a scalar or `Σ_o ⟨c_o, output_o⟩`; a constant zero where there is none."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    cotangents = [torch.ones_like(o) for o in outputs] if cotangents is None else cotangents
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    found = torch.autograd.grad(
        [o for o, _ in live], leaves, [c for _, c in live], create_graph=True, allow_unused=True
    )
    return [
        torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


def jacobian(outputs: Sequence[Tensor], columns: Sequence[Tensor]) -> Push:
    """`J v` of each output for a stack of directions, by differentiating `u ↦ Jᵀ u`."""
    live = [o for o in outputs if o.requires_grad]
    cotangents = [torch.zeros_like(o, requires_grad=True) for o in live]
    pulled: Sequence[Tensor | None] = [None] * len(columns)
    if live:
        pulled = torch.autograd.grad(
            live, columns, cotangents, create_graph=True, retain_graph=True, allow_unused=True
        )
    known = [p for p in pulled if p is not None]

    def push(directions: list[Tensor], keep: bool) -> list[Tensor]:
        met = [v for p, v in zip(pulled, directions, strict=True) if p is not None]
        images = iter(pull_back(known, cotangents, met, keep) if met else [])
        return [
            next(images) if met and o.requires_grad else o.new_zeros(len(directions[0]), *o.shape)
            for o in outputs
        ]

    return push


def pull_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], keep: bool
) -> list[Tensor]:
    """`Σ_o (∂output_o/∂input)ᵀ c_o` for stacks of cotangents `[K, *shape]`: one stack for each input.

    `keep` the graph for another pass, or free it on the way.
    """
    count = len(cotangents[0])
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return [input.new_zeros(count, *input.shape) for input in inputs]
    found = torch.autograd.grad(
        [o for o, _ in live],
        inputs,
        [c if count > 1 else c[0] for _, c in live],
        retain_graph=keep,
        is_grads_batched=count > 1,
        allow_unused=True,
    )
    # zeros made by autograd itself would lack the dimension of the stack
    return [
        input.new_zeros(count, *input.shape) if image is None else image if count > 1 else image[None]
        for input, image in zip(inputs, found, strict=True)
    ]
