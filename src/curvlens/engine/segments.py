"""Segments: a forward pass of the model, recorded as the chain of its layers and of what lies between them.

The model runs its own code once. Each of its layers is met as it is called: its tangents are pushed through it, and
nothing is kept but its inputs, with all that the model gave it beside the stream (masks, rotary tables, positions).
What the model does between layers, as embeddings, the last norm, or a bias that all layers share, keeps its small
graph. So masks and switches are the model's own, and values that flow past layers, such as the states of an encoder,
carry their tangents wherever they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlens.batches import Batch, output_tensor
from curvlens.engine.chunks import bytes_saved_by
from curvlens.engine.double_backward import Push, jacobian
from curvlens.engine.head import Projection
from curvlens.engine.kept import Kept
from curvlens.landscape import Landscape, Parameters

Function = Callable[[Parameters, list[Tensor]], list[Tensor]]


@dataclass(eq=False)
class Value:
    """A tensor that passes from one segment to others; on the way back, what they say of it."""

    primal: Tensor
    tangents: Tensor | None  # `[K, *shape]`; None: it does not move
    pulled: bool  # whether rows lie below it
    gradient: Tensor | None = None  # `g`
    products: Tensor | None = None  # `ġ`, `[K, *shape]`

    def receive(self, gradient: Tensor | None, products: Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient
        if products is not None:
            self.products = products if self.products is None else self.products + products


@dataclass(eq=False)
class Graph:
    """A segment, ready to be differentiated."""

    outputs: list[Tensor]
    parameters: dict[str, Tensor]  # leaves
    inputs: list[Tensor]  # leaves
    lasting: bool = False  # serves other segments or further products, so it is not freed
    serves_products: bool = False  # kept between products, so that its gradients are the same each time
    gradients: dict[int, Tensor] | None = None  # of `⟨g, outputs⟩` with their graph, by leaf
    _push: Push | None = None

    def push(self, moving: list[tuple[Tensor, Tensor]], together: int) -> list[Tensor]:
        """Tangents of the outputs for stacks of tangents of leaves, some vectors at a time."""
        if self._push is None:
            self._push = jacobian(self.outputs, [leaf for leaf, _ in moving])
        stacks = [stack for _, stack in moving]
        parts = [
            self._push([stack[at : at + together] for stack in stacks], True)
            for at in range(0, len(stacks[0]), together)
        ]
        return [torch.cat(images) if len(images) > 1 else images[0] for images in zip(*parts, strict=True)]


@dataclass(eq=False)
class Segment:
    name: str
    parameters: tuple[str, ...]  # those that it uses, out of rows and columns
    inputs: list[Value]
    outputs: list[Value]
    graph: Callable[[], Graph]


def moving_leaves(graph: Graph, inputs: list[Value], directions: Parameters) -> list[tuple[Tensor, Tensor]]:
    """The leaves of a segment that move, with their tangents."""
    moving = [(leaf, directions[name]) for name, leaf in graph.parameters.items() if name in directions]
    streams = zip(graph.inputs, inputs, strict=True)
    return moving + [(leaf, value.tangents) for leaf, value in streams if value.tangents is not None]


@dataclass
class Recording:
    """The segments of one forward pass, and its end: the output, or what the projection to the output is given."""

    segments: list[Segment] = field(default_factory=list)
    end: Value | None = None


def record(
    land: Landscape,
    piece: Batch,
    rows: list[str],
    directions: Parameters,
    layers: Mapping[str, str],
    projection: Projection | None,
    together: int = 1,
    kept: Kept | None = None,
) -> Recording:
    """Run the model on a piece of data, pushing stacks of directions `{parameter: [K, *shape]}` along.

    So many vectors go through a layer `together`. What is `kept` of layers in one run serves the next.
    """
    return _Recorder(
        land, rows, directions, layers, projection, together, Kept() if kept is None else kept
    ).run(piece)


class _Recorder:
    def __init__(
        self,
        land: Landscape,
        rows: list[str],
        directions: Parameters,
        layers: Mapping[str, str],
        projection: Projection | None,
        together: int,
        kept: Kept,
    ):
        self.land, self.rows, self.directions, self.layers = land, set(rows), directions, layers
        self.projection, self.together, self.kept = projection, together, kept
        self.calls = 0
        self.values = land.parameters()
        self.constants = land.constants()
        for name in {*rows, *directions}:
            self.values[name].requires_grad_()
        state = {**self.constants, **self.values}
        canonical = dict(_keys(land.model, every=False))
        self.bodies = {
            path: Body(land.model.get_submodule(path), state, {key: name for name, key in canonical.items()})
            for path in layers
        }
        self.recording = Recording()
        self._leaves = {id(self.values[name]): name for name in {*rows, *directions}}
        # tensors as the model sees them, kept alive so that an id stays theirs, with their version
        self._known: dict[int, tuple[Tensor, Value, int]] = {}
        self._inside = False

    def run(self, piece: Batch) -> Recording:
        model = self.land.model
        with met(model, [*self.layers, *([self.projection.path] if self.projection else [])], self._meet):
            output = output_tensor(
                functional_call(model, {**self.constants, **self.values}, piece.args, piece.kwargs)
            )
        if self.projection is None:
            (self.recording.end,) = self._receive("output", [output])
        elif not self.projection.is_end(output, self._projected):
            raise Uncut("what the model does to its logits changed from one run to the next")
        self._known.clear()
        return self.recording

    def _meet(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:  # a layer within a layer
            return forward(*args, **kwargs)
        if self.projection is not None and path == self.projection.path:
            (self.recording.end,) = self._receive(path, [args[0]])
            self._projected = self.projection.stand_in(args[0])
            return self._projected
        self._inside = True
        try:
            return self._layer(path, args, kwargs)
        finally:
            self._inside = False

    def _layer(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = self.bodies[path]
        flat, tree = tree_flatten((args, kwargs))
        live = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
        inputs = self._receive(self.layers[path], [flat[i] for i in live])
        for i in live:
            flat[i] = None
        used = tuple(name for name in body.parameters if name in self.rows or name in self.directions)
        pulled = any(v.pulled for v in inputs) or any(name in self.rows for name in used)
        moves = any(v.tangents is not None for v in inputs) or any(name in self.directions for name in used)
        call, graph = self._kept_or(_Call(body, flat, tree, live), used, inputs, pulled and moves)
        versions = [v.primal._version for v in inputs]
        push = self._push(call, used, inputs) if graph is None else self._push_along(call, graph, inputs)
        found, tangents = push
        if [v.primal._version for v in inputs] != versions:
            raise Uncut(f"the layer {path!r} changes its input in place")
        outputs = [
            inputs[call.passed[i]]
            if i in call.passed
            else Value(found[i], None if tangents is None else tangents[i], pulled)
            for i in range(len(found))
        ]
        new = [value for i, value in enumerate(outputs) if i not in call.passed]
        if pulled:
            ready = graph if graph is not None and graph.lasting else None
            self.recording.segments.append(
                Segment(
                    self.layers[path],
                    used,
                    inputs,
                    new,
                    lambda: ready or call.graph({name: self.values[name] for name in used}, inputs),
                )
            )
        return call.returned([self._show(value) for value in outputs])

    def _kept_or(
        self, call: _Call, used: tuple[str, ...], inputs: list[Value], wanted: bool
    ) -> tuple[_Call, Graph | None]:
        """The layer's call of an earlier product and its graph, or this one, with a graph if one pays."""
        self.calls += 1
        found = self.kept.get(self.calls)
        if found is not None:
            return found
        if not wanted or (not self.kept.budget and self._count <= self.together):
            return call, None
        parameters = {name: self.values[name] for name in used}
        graph = None
        if self.kept.budget:
            # the graph of the gradient holds about twice as much again
            size = 3 * bytes_saved_by(
                lambda: call.graph(parameters, inputs).outputs, list(parameters.values())
            )
            if self.kept.fits(size):
                graph = call.graph(parameters, inputs)
                graph.lasting = graph.serves_products = True
                self.kept.put(self.calls, (call, graph), size)
        elif self._count > self.together:
            graph = call.graph(parameters, inputs)
        return call, graph

    def _push_along(
        self, call: _Call, graph: Graph, inputs: list[Value]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """By the graph: for several vectors one after the other, or one that is kept."""
        new = zip(
            graph.outputs,
            graph.push(moving_leaves(graph, inputs, self.directions), self.together),
            strict=True,
        )
        primals, tangents = [], []
        for i in range(len(graph.outputs) + len(call.passed)):
            # what the layer passes on has its tangents already
            y, image = (inputs[call.passed[i]].primal,) * 2 if i in call.passed else next(new)
            primals.append(y.detach())
            tangents.append(image)
        return primals, tangents

    def _push(
        self, call: _Call, used: tuple[str, ...], inputs: list[Value]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        moving = {name: self.values[name].detach() for name in used if name in self.directions}
        primals = [value.primal for value in inputs]
        streams = [i for i, value in enumerate(inputs) if value.tangents is not None]
        if not moving and not streams:
            with torch.no_grad():
                return call({}, primals), None
        stacks = {name: self.directions[name] for name in moving}
        tangents = [t for t in (value.tangents for value in inputs) if t is not None]

        def function(parameters: Parameters, given: list[Tensor]) -> list[Tensor]:
            every = list(primals)
            for i, x in zip(streams, given, strict=True):
                every[i] = x
            return call(parameters, every)

        def push(stacks: Parameters, tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            found, images = jvp(function, (moving, [primals[i] for i in streams]), (stacks, tangents))[:2]
            return found, images

        with torch.no_grad():
            if self._count == 1:
                found, images = push({n: v[0] for n, v in stacks.items()}, [t[0] for t in tangents])
                return found, [image[None] for image in images]
            found, images = vmap(push, out_dims=(None, 0))(stacks, tangents)  # type: ignore[arg-type]
            return found, images

    @property
    def _count(self) -> int:
        return len(next(iter(self.directions.values())))

    def _show(self, value: Value) -> Tensor:
        """The value as the rest of the model sees it: at the root of its graphs, if anything depends on it."""
        leaf = value.primal.detach()
        if value.tangents is None and not value.pulled:
            return leaf
        shown = leaf.requires_grad_().view_as(leaf)
        for tensor in (leaf, shown):
            self._known[id(tensor)] = tensor, value, tensor._version
        return shown

    def _receive(self, name: str, tensors: list[Tensor]) -> list[Value]:
        """The values of what the model hands on: those shown before, or made of such by code between layers."""
        return [self._value(name, tensor) for tensor in tensors]

    def _value(self, name: str, tensor: Tensor) -> Value:
        if (known := self._known.get(id(tensor))) is not None and known[2] == tensor._version:
            return known[1]
        parameters, inputs, leaves = {}, [], []
        for leaf in leaves_of(tensor):
            if (parameter := self._leaves.get(id(leaf))) is not None:
                parameters[parameter] = leaf
            elif (known := self._known.get(id(leaf))) is not None:
                inputs.append(known[1])
                leaves.append(leaf)
        pulled = any(v.pulled for v in inputs) or any(name in self.rows for name in parameters)
        moving = [
            (leaf, self.directions[name]) for name, leaf in parameters.items() if name in self.directions
        ]
        moving += [
            (leaf, v.tangents) for leaf, v in zip(leaves, inputs, strict=True) if v.tangents is not None
        ]
        tangents = None
        if moving:
            (tangents,) = jacobian([tensor], [leaf for leaf, _ in moving])(
                [stack for _, stack in moving], True
            )
        value = Value(tensor.detach(), tangents, pulled)
        if pulled:
            graph = Graph([tensor], parameters, leaves, lasting=True)  # shared with others
            self.recording.segments.append(
                Segment(f"before {name}", tuple(parameters), inputs, [value], lambda: graph)
            )
        self._known[id(tensor)] = tensor, value, tensor._version
        return value


class Uncut(RuntimeError):
    """A model that is no chain of segments as far as this engine can tell."""

    def __init__(self, reason: str):
        super().__init__(
            f"expected a model that can be cut into its layers, got one that cannot: {reason}; "
            'use engine="double-backward", or "auto", which does'
        )


class Body:
    """A layer as a function of its parameters, without the hooks that the model runs around it."""

    def __init__(self, module: nn.Module, state: Parameters, canonical: Mapping[int, str]):
        self.names = {local: canonical[key] for local, key in _keys(module) if key in canonical}
        self.state = {local: state[name].detach() for local, name in self.names.items()}
        self.parameters = tuple(dict.fromkeys(self.names.values()))
        self.shell = _Shell(module)

    def __call__(self, parameters: Parameters, args: Any, kwargs: Any) -> Any:
        state = {
            f"body.{local}": parameters.get(name, self.state[local]) for local, name in self.names.items()
        }
        return functional_call(self.shell, state, args, kwargs)


class _Shell(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body.forward(*args, **kwargs)


def _keys(module: nn.Module, every: bool = True) -> Iterator[tuple[str, int]]:
    """Names and identities of parameters and buffers; those with several names under `every` or the first."""
    yield from ((name, id(p)) for name, p in module.named_parameters(remove_duplicate=not every))
    yield from ((name, id(b)) for name, b in module.named_buffers(remove_duplicate=not every))


class _Call:
    """One call of a layer: its arguments, in which the inputs take the `live` places, and the form of its result."""

    def __init__(self, body: Body, flat: list[Any], tree: Any, live: list[int]):
        self.body, self.flat, self.tree, self.live = body, flat, tree, live
        self.passed: dict[int, int] = {}  # outputs that are inputs
        self._result: tuple[list[Any], Any, list[int]] | None = None

    def __call__(self, parameters: Parameters, inputs: list[Tensor]) -> list[Tensor]:
        """The floating-point tensors of the result."""
        flat = list(self.flat)
        for i, x in zip(self.live, inputs, strict=True):
            flat[i] = x
        args, kwargs = tree_unflatten(flat, self.tree)
        leaves, tree = tree_flatten(self.body(parameters, args, kwargs))
        places = [i for i, y in enumerate(leaves) if isinstance(y, Tensor) and y.is_floating_point()]
        outputs = [leaves[i] for i in places]
        if self._result is None:
            for o, y in enumerate(outputs):
                self.passed.update((o, i) for i, x in enumerate(inputs) if x is y)
            constants = [None if i in places else y for i, y in enumerate(leaves)]
            self._result = constants, tree, places
        return outputs

    def returned(self, shown: list[Tensor]) -> Any:
        """The result as the model expects it, with the given tensors."""
        assert self._result is not None
        leaves, tree, places = list(self._result[0]), *self._result[1:]
        for i, y in zip(places, shown, strict=True):
            leaves[i] = y
        return tree_unflatten(leaves, tree)

    def graph(self, parameters: Parameters, inputs: list[Value]) -> Graph:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        streams = [value.primal.detach().requires_grad_() for value in inputs]
        # as views: tools that count by hooks on a module's inputs take no leaves
        outputs = self(leaves, [x.view_as(x) for x in streams])
        return Graph([y for i, y in enumerate(outputs) if i not in self.passed], leaves, streams)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaves that a tensor's graph leads to."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    waiting, seen, found = [tensor.grad_fn], {tensor.grad_fn}, []
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


@contextmanager
def met(model: nn.Module, paths: list[str], meet: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of the modules at these paths go to `meet(path, forward, args, kwargs)`."""
    # one module may stand at several paths
    modules = list(
        {id(m): (path, m) for path, m in ((path, model.get_submodule(path)) for path in paths)}.values()
    )
    own = [module.__dict__.get("forward") for _, module in modules]

    def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        return lambda *args, **kwargs: meet(path, forward, args, kwargs)

    try:
        for path, module in modules:
            module.__dict__["forward"] = stand_in(path, module)
        yield
    finally:
        for (_, module), before in zip(modules, own, strict=True):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
