"""Layer by layer: products in the memory of one layer.

    forward    push the tangents through each layer, keep its input `(x, ẋ)`
    head       in chunks of tokens, `(g, ġ)` at its input
    backward   at each layer, from the last, with `s = ⟨g, f(θ, x)⟩` and its gradient `(u_θ, u_x)`:
               `g ← u_x`,  `(rows, ġ) ← ∇_(θ, x) (⟨u_θ, θ̇⟩ + ⟨u_x, ẋ⟩ + ⟨ġ, f⟩)`

so that only one layer's graph is there at a time, but for those that are kept for further products. A Gauss-Newton
product needs no `g`: its tangents come back by the layers' ordinary backward pass. Work, with one for a forward pass: a
Hessian product 3 + 9, each further vector of the same pass 2 + 6; a Gauss-Newton product 3 + 3, and 2 + 2. With a
layer's graph kept, every vector costs the latter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvlens.batches import Batch
from curvlens.engine.chunks import CPU_BYTES, layer_bytes
from curvlens.engine.cut import cut
from curvlens.engine.double_backward import first_gradient, pull_back
from curvlens.engine.head import Head, Projection, chunk_of_tokens
from curvlens.engine.job import Job
from curvlens.engine.segments import Graph, Recording, Segment, Value, moving_leaves, record
from curvlens.landscape import Landscape, Parameters
from curvlens.operator import free_memory

# Vectors go through a layer together while their intermediates stay below this: more of them leave a CPU's caches,
# and fill a GPU's units.
TOGETHER_BYTES = {"cuda": 2**32, "cpu": CPU_BYTES}


def product(job: Job, directions: Parameters, chunk: int) -> Iterator[tuple[int, Parameters]]:
    """Parts of the images, some parameters at a time: they add up."""
    count = len(next(iter(directions.values())))
    drawn = None if job.quantity.generator is None else job.quantity.generator.get_state()
    for start in range(0, count, chunk):
        if job.quantity.generator is not None and drawn is not None:
            job.quantity.generator.set_state(drawn)  # every pass draws the same targets
        part = {name: stack[start : start + chunk] for name, stack in directions.items()}
        for images in _Pass(job, part).run():
            yield start, images


def vectors_a_pass(land: Landscape, piece: Batch, vectors: int) -> int:
    """As many as there is memory for their images of a layer and their tangents between layers."""
    if vectors == 1:
        return 1
    layers = len(cut(land).layers)
    each = layer_bytes(land, piece, layers) + land.blocks.size * land.dtype.itemsize // layers
    return max(1, min(vectors, free_memory(land.device) // 4 // max(1, each)))


def vectors_together(land: Landscape, piece: Batch, vectors: int) -> int:
    """How many go through one layer at once, on a graph that serves all."""
    if vectors == 1:
        return 1
    each = 3 * layer_bytes(land, piece, len(cut(land).layers))
    return max(1, min(vectors, TOGETHER_BYTES.get(land.device.type, CPU_BYTES) // max(1, each)))


def tokens_a_chunk(land: Landscape) -> int | None:
    """Of the head; None if logits exist as a whole."""
    projection = cut(land).projection
    return None if projection is None else chunk_of_tokens(land, projection)


class _Pass:
    """One vector, or a stack of them, through the model and back."""

    def __init__(self, job: Job, directions: Parameters):
        self.job, self.directions = job, directions
        self.land, self.quantity, self.piece, self.rows = job.land, job.quantity, job.piece, job.rows
        self.second = not job.quantity.is_gauss_newton
        self.together = vectors_together(job.land, job.piece, self._count)

    def run(self) -> Iterator[Parameters]:
        at = cut(self.land)
        recording = record(
            self.land,
            self.piece,
            self.rows,
            self.directions,
            at.layers,
            at.projection,
            self.together,
            self.job.kept,
        )
        yield from self._head(recording, at.projection)
        while recording.segments:
            segment = recording.segments.pop()
            yield self._pull(segment)

    def _head(self, recording: Recording, projection: Projection | None) -> Iterator[Parameters]:
        end = recording.end
        assert end is not None
        if projection is None:
            if end.pulled:
                end.receive(*self._loss(end))
            return
        self.land.loss.check(projection.stand_in(end.primal), self.piece.target)
        tokens = chunk_of_tokens(self.land, projection)
        head = Head(self.land, self.quantity, projection, self.rows, self.directions, tokens)
        end.receive(*head.pull(end.primal, end.tangents, self.piece.target, end.pulled))
        yield head.rows

    def _loss(self, output: Value) -> tuple[Tensor | None, Tensor | None]:
        """`g` and `ġ` at the model's output."""
        land, target = self.land, self.piece.target
        gradient = products = None
        if self.second:
            gradient = land.loss.gradient(output.primal, target).detach() / land.weight
        if self.quantity.name != "functional" and output.tangents is not None:
            if self.quantity.name == "hessian":
                products = land.loss.hessian_product(output.primal, target, output.tangents) / land.weight
            else:
                products = self.quantity.middle(land, self.piece, output.primal)(output.tangents)
        return gradient, products

    def _pull(self, segment: Segment) -> Parameters:
        graph = segment.graph()
        outputs = list(zip(graph.outputs, segment.outputs, strict=True))
        moving = moving_leaves(graph, segment.inputs, self.directions)
        names = [name for name in graph.parameters if name in self.rows]
        streams = zip(graph.inputs, segment.inputs, strict=True)
        below = [(leaf, value) for leaf, value in streams if value.pulled]
        targets = [graph.parameters[name] for name in names] + [leaf for leaf, _ in below]

        known = [(y, value.products) for y, value in outputs if value.products is not None]
        gradients: dict[int, Tensor] = {}
        scored = [(y, value.gradient) for y, value in outputs if value.gradient is not None]
        if self.second and moving and scored:
            # below a segment that does not move, nothing moves and no gradient is needed
            gradients = self._gradients(graph, scored, [m for m, _ in moving] + [b for b, _ in below])
            known += [(gradients[id(leaf)], tangents) for leaf, tangents in moving]
        images = self._pull_back(known, targets, graph.lasting)
        for (leaf, value), image in zip(below, images[len(names) :], strict=True):
            gradient = gradients.get(id(leaf))
            value.receive(None if gradient is None else gradient.detach(), image)
        return dict(zip(names, images, strict=False))

    def _gradients(
        self, graph: Graph, scored: list[tuple[Tensor, Tensor]], leaves: list[Tensor]
    ) -> dict[int, Tensor]:
        if graph.gradients is not None:
            return graph.gradients
        leaves = list({id(leaf): leaf for leaf in leaves}.values())
        found = first_gradient([y for y, _ in scored], leaves, [g for _, g in scored])
        gradients = dict(zip(map(id, leaves), found, strict=True))
        if graph.lasting and graph.serves_products:
            graph.gradients = gradients
        return gradients

    def _pull_back(
        self, known: list[tuple[Tensor, Tensor]], targets: list[Tensor], lasting: bool
    ) -> list[Tensor]:
        """Some vectors at a time."""
        if not known:
            return [t.new_zeros(self._count, *t.shape) for t in targets]
        parts = []
        for at in range(0, self._count, self.together):
            end = at + self.together
            keep = lasting or end < self._count
            parts.append(pull_back([y for y, _ in known], targets, [c[at:end] for _, c in known], keep))
        return parts[0] if len(parts) == 1 else [torch.cat(images) for images in zip(*parts, strict=True)]

    @property
    def _count(self) -> int:
        return len(next(iter(self.directions.values())))
