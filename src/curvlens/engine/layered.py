"""Layer by layer: products in the memory of one layer.

    forward    push the tangents through each layer, keep its input `(x, ẋ)`
    head       in chunks of tokens, `(g, ġ)` at its input
    backward   at each layer, from the last, with `s = ⟨g, f(θ, x)⟩` and its gradient `(u_θ, u_x)`:
               `g ← u_x`,  `(rows, ġ) ← ∇_(θ, x) (⟨u_θ, θ̇⟩ + ⟨u_x, ẋ⟩ + ⟨ġ, f⟩)`

so that only one layer's graph is there at a time. A Gauss-Newton product needs no `g`: its tangents come back by the
layers' ordinary backward pass. Work, with one for a forward pass: a Hessian product 3 + 9, each further vector of the
same pass 2 + 6; a Gauss-Newton product 3 + 3, and 2 + 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from curvlens.batches import Batch
from curvlens.engine.cut import cut
from curvlens.engine.double_backward import first_gradient, pull_back
from curvlens.engine.head import Head, Projection
from curvlens.engine.quantity import Quantity
from curvlens.engine.segments import Recording, Segment, Value, record
from curvlens.landscape import Landscape, Parameters


def product(
    land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters, chunk: int
) -> Iterator[tuple[int, Parameters]]:
    """Parts of the images, some parameters at a time: they add up."""
    count = len(next(iter(directions.values())))
    drawn = None if quantity.generator is None else quantity.generator.get_state()
    for start in range(0, count, chunk):
        if quantity.generator is not None and drawn is not None:
            quantity.generator.set_state(drawn)  # every pass draws the same targets
        part = {name: stack[start : start + chunk] for name, stack in directions.items()}
        for images in _Pass(land, quantity, piece, rows, part).run():
            yield start, images


class _Pass:
    """One vector, or a stack of them, through the model and back."""

    def __init__(
        self, land: Landscape, quantity: Quantity, piece: Batch, rows: list[str], directions: Parameters
    ):
        self.land, self.quantity, self.piece = land, quantity, piece
        self.rows, self.directions = rows, directions
        self.second = not quantity.is_gauss_newton

    def run(self) -> Iterator[Parameters]:
        at = cut(self.land)
        recording = record(self.land, self.piece, self.rows, self.directions, at.layers, at.projection)
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
        head = Head(self.land, self.quantity, projection, self.rows, self.directions)
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
        moving = [(leaf, self.directions[n]) for n, leaf in graph.parameters.items() if n in self.directions]
        streams = list(zip(graph.inputs, segment.inputs, strict=True))
        moving += [(leaf, value.tangents) for leaf, value in streams if value.tangents is not None]
        names = [name for name in graph.parameters if name in self.rows]
        below = [(leaf, value) for leaf, value in streams if value.pulled]
        targets = [graph.parameters[name] for name in names] + [leaf for leaf, _ in below]

        known = [(y, value.products) for y, value in outputs if value.products is not None]
        gradients: dict[int, Tensor] = {}
        scored = [(y, value.gradient) for y, value in outputs if value.gradient is not None]
        if self.second and moving and scored:
            # below a segment that does not move, nothing moves and no gradient is needed
            leaves = list(
                {id(leaf): leaf for leaf in [m for m, _ in moving] + [b for b, _ in below]}.values()
            )
            found = first_gradient([y for y, _ in scored], leaves, [g for _, g in scored])
            gradients = dict(zip(map(id, leaves), found, strict=True))
            known += [(gradients[id(leaf)], tangents) for leaf, tangents in moving]
        if known:
            images = pull_back([y for y, _ in known], targets, [c for _, c in known], keep=segment.shared)
        else:
            images = [t.new_zeros(self._count, *t.shape) for t in targets]
        for (leaf, value), image in zip(below, images[len(names) :], strict=True):
            gradient = gradients.get(id(leaf))
            value.receive(None if gradient is None else gradient.detach(), image)
        return dict(zip(names, images, strict=False))

    @property
    def _count(self) -> int:
        return len(next(iter(self.directions.values())))
