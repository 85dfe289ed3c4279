"""Engines: how a product with a curvature matrix is computed.

An engine is chosen openly, by name, and an operator says which one it uses:

"double-backward"       differentiates the gradient's own graph once more; the graph is kept for all vectors
"forward-over-reverse"  pushes a tangent through the gradient; keeps no graph of the gradient
"layered"               goes through the model layer by layer, with one layer's graph at a time and without logits

All give the same numbers up to rounding. "auto" goes layer by layer where the model can be cut and another engine would
hold a large graph; `choice` has the rule. `Quantity` says what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from curvlens import guards
from curvlens.batches import Batch
from curvlens.blocks import Blocks
from curvlens.engine import double_backward, forward_over_reverse, layered
from curvlens.engine.choice import auto
from curvlens.engine.chunks import chunk_size
from curvlens.engine.job import Job
from curvlens.engine.kept import Kept
from curvlens.engine.options import Options, matmul_precision
from curvlens.engine.quantity import Quantity
from curvlens.engine.room import Room, is_out_of_memory, remember, room_of
from curvlens.engine.trust import require_second_derivatives
from curvlens.landscape import Landscape, Parameters

# From a job, directions `{parameter: [K, *shape]}` and a chunk size, the products as `(first vector,
# {parameter: [chunk, *shape]})`, divided by the landscape's weight.
Engine = Callable[..., Iterator[tuple[int, Parameters]]]

ENGINES: dict[str, Engine] = {
    "double-backward": double_backward.product,
    "forward-over-reverse": forward_over_reverse.product,
    "layered": layered.product,
}


def choose(engine: str, quantity: Quantity, land: Landscape, keep: int = 0) -> str:
    """The engine that "auto" stands for where so many bytes may be kept, or the named one."""
    check(engine, quantity)
    return auto(land, quantity, keep) if engine == "auto" else engine


def check(engine: str, quantity: Quantity) -> None:
    """Refuse a name that is none, and an engine that cannot do the quantity."""
    if engine not in (*ENGINES, "auto"):
        raise ValueError(f"expected an engine out of {', '.join(ENGINES)} or 'auto', got {engine!r}")
    if engine == "layered" and quantity.at is not None:
        raise ValueError(
            f"expected a split at the model's output for this engine, got one at {quantity.at!r}; "
            'use engine="double-backward"'
        )


def product(
    engine: str,
    land: Landscape,
    quantity: Quantity,
    rows: Blocks,
    columns: Blocks,
    stack: Tensor,
    options: Options | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """`[K, columns] -> [K, rows]`: the given rows of the quantity times vectors over the given columns.

    If memory runs out, the product starts again in smaller steps, which are remembered for the landscape.
    """
    if not len(stack):
        return stack.new_zeros(0, rows.size)
    options, kept = options or Options(), Kept() if kept is None else kept
    if engine != "layered":  # which probes a sample: the logits of a whole batch may not fit
        land.probe()
    with (
        guards.twice_differentiable(land.model, land.device),
        guards.explained(),
        matmul_precision(options.precision),
    ):
        stack = stack.clone() if stack.is_inference() else stack
        while True:
            try:
                result = _product(engine, land, quantity.started(), rows, columns, stack, options, kept)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                room = _smaller(engine, land, len(stack), kept)
                if room is None:
                    raise MemoryError(
                        f"expected memory for one vector and one sample at a time, got none left ({error}); "
                        'use engine="layered", shorter sequences, or fewer rows and columns by .block(...)'
                    ) from error
            remember(land, room)  # here the failed attempt holds nothing any more
    land.require_finite(result, "product", given=stack)
    return result


def _product(
    engine: str,
    land: Landscape,
    quantity: Quantity,
    rows: Blocks,
    columns: Blocks,
    stack: Tensor,
    options: Options,
    kept: Kept,
) -> Tensor:
    samples = room_of(land).samples
    kept.renew(land, samples)
    result = None
    pieces = (part for piece in land.pieces() for part in piece.split(samples))
    for kept.piece, piece in enumerate(pieces):
        result = run_piece(engine, land, quantity, piece, rows, columns, stack, result, options, kept)
    assert result is not None  # a landscape has data
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
    options: Options | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """What one piece of the data adds to the products, or adds to a given result."""
    in_parts = engine == "layered"
    if not in_parts:
        require_second_derivatives(land, piece)
    add = in_parts or result is not None
    chunk = vectors_a_pass(land, piece, len(stack), engine)
    job = Job(
        land, quantity, piece, list(rows.parameters), options or Options(), Kept() if kept is None else kept
    )
    for start, image in ENGINES[engine](job, columns.to_parameters(stack), chunk):
        if result is None:  # not before the first pass has freed what it needed
            result = (stack.new_zeros if in_parts else stack.new_empty)(len(stack), rows.size)
        rows.gather(image, result[start : start + chunk], add=add)
        del image
    assert result is not None  # a stack has vectors
    return result


def vectors_a_pass(land: Landscape, piece: Batch, vectors: int, engine: str) -> int:
    limit = room_of(land).vectors or vectors
    if engine == "layered":
        return min(limit, layered.vectors_a_pass(land, piece, vectors))
    return min(limit, chunk_size(land, piece, vectors, kept=engine == "double-backward"))


def _smaller(engine: str, land: Landscape, vectors: int, kept: Kept) -> Room | None:
    """Steps smaller than those that memory ran out at; first what is kept is given up."""
    room = room_of(land)
    if len(kept):
        kept.clear()
        kept.budget = 0
        return room
    largest = max(land.pieces(), key=lambda piece: piece.target.numel())
    samples = min(room.samples or len(largest.target), len(largest.target))
    tokens = layered.tokens_a_chunk(land) if engine == "layered" else None
    return room.smaller(vectors_a_pass(land, largest, vectors, engine), tokens, samples)
