"""Engines: how a product with a curvature matrix is computed.

An engine is chosen openly, by name, and an operator says which one it uses:

"double-backward"       differentiates the gradient's own graph once more; the graph is kept for all vectors
"forward-over-reverse"  pushes a tangent through the gradient; keeps no graph of the gradient
"layered"               goes through the model layer by layer, with one layer's graph at a time and without logits

All give the same numbers up to rounding. `Quantity` says what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from curvlens import guards
from curvlens.batches import Batch
from curvlens.blocks import Blocks
from curvlens.engine import double_backward, forward_over_reverse, layered
from curvlens.engine.chunks import chunk_size
from curvlens.engine.quantity import Quantity
from curvlens.engine.trust import require_second_derivatives
from curvlens.landscape import Landscape, Parameters

# From a landscape, a quantity, a piece of the data, the rows' parameters, directions `{parameter: [K, *shape]}` and a
# chunk size, the products as `(first vector, {parameter: [chunk, *shape]})`, divided by the landscape's weight.
Engine = Callable[..., Iterator[tuple[int, Parameters]]]

ENGINES: dict[str, Engine] = {
    "double-backward": double_backward.product,
    "forward-over-reverse": forward_over_reverse.product,
    "layered": layered.product,
}


def choose(engine: str, quantity: Quantity) -> str:
    """The engine that "auto" stands for, or the named one."""
    if engine == "auto":
        # one tangent forward and one backward make a Gauss-Newton product; a Hessian product costs either
        # engine the same arithmetic, and double backward shares it between vectors
        gauss_newton = quantity.is_gauss_newton and quantity.at is None
        return "forward-over-reverse" if gauss_newton else "double-backward"
    if engine not in ENGINES:
        raise ValueError(f"expected an engine out of {', '.join(ENGINES)} or 'auto', got {engine!r}")
    if engine == "layered" and quantity.at is not None:
        raise ValueError(
            f"expected a split at the model's output for this engine, got one at {quantity.at!r}; "
            'use engine="double-backward"'
        )
    return engine


def product(
    engine: str, land: Landscape, quantity: Quantity, rows: Blocks, columns: Blocks, stack: Tensor
) -> Tensor:
    """`[K, columns] -> [K, rows]`: the given rows of the quantity times vectors over the given columns."""
    if not len(stack):
        return stack.new_zeros(0, rows.size)
    if engine != "layered":  # which probes a sample: the logits of a whole batch may not fit
        land.probe()
    quantity = quantity.started()
    result = None
    with guards.twice_differentiable(land.model, land.device), guards.explained():
        stack = stack.clone() if stack.is_inference() else stack
        for piece in land.pieces():
            result = run_piece(engine, land, quantity, piece, rows, columns, stack, result)
    assert result is not None  # a landscape has data
    land.require_finite(result, "product", given=stack)
    return result


def run_piece(
    engine: str,
    land: Landscape,
    quantity: Quantity,
    piece: Batch,
    rows: Blocks,
    columns: Blocks,
    stack: Tensor,
    result: Tensor | None = None,
) -> Tensor:
    """What one piece of the data adds to the products, or adds to a given result."""
    in_parts = engine == "layered"
    if not in_parts:
        require_second_derivatives(land, piece)
    add = in_parts or result is not None
    chunk = vectors_a_pass(land, piece, len(stack), engine)
    images = ENGINES[engine](
        land, quantity, piece, list(rows.parameters), columns.to_parameters(stack), chunk
    )
    for start, image in images:
        if result is None:  # not before the first pass has freed what it needed
            result = (stack.new_zeros if in_parts else stack.new_empty)(len(stack), rows.size)
        rows.gather(image, result[start : start + chunk], add=add)
        del image
    assert result is not None  # a stack has vectors
    return result


def vectors_a_pass(land: Landscape, piece: Batch, vectors: int, engine: str) -> int:
    return chunk_size(land, piece, vectors, kept=engine == "double-backward")
