"""Curvature propagation in any model, without a matrix: the recursion of `propagation` along the residual stream.

A step leads from one place of the stream to the next: into a block and out of its attention, from there out of
the block, and from the last block through the head. With `x` the stream at the step's start and `z` at its end,

    total v   = ∂²L/∂x² v               differentiating the loss twice by a shift of the stream,
    created v = Σ_m g_m ∂²z_m/∂x² v     the same with `⟨g, z(x)⟩` in the place of the loss, g = ∂L/∂z held fixed,
    passed v  = Jᵀ Γ J v                what is left of the first.

That the places follow each other on one stream is checked by `Jᵀ Γ J v` itself, by its own products: a block whose
sublayers run in parallel, say, is one step, not two. Products are exact; traces and norms of them are estimates
from random probes, with standard errors, and eigenvalues come with the residuals of their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from curvlens import families, guards
from curvlens.batches import Batch
from curvlens.blocks import Blocks
from curvlens.engine.quantity import share, split_gradient
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import Estimate, jackknife, mean_and_error, pm
from curvlens.landscape import Landscape
from curvlens.operator import Operator


class Place(NamedTuple):
    """A place on the stream: what a module takes first, or what it gives first."""

    path: str
    side: Literal["input", "output"]


class Step(NamedTuple):
    """From one place to the next, or to the model's output."""

    name: str
    start: Place
    end: Place | None
    skip: bool = False  # the end's module gives a change of the stream, to which the stream itself is added


@dataclass(frozen=True)
class ExtentEstimate:
    """The size of a curvature, estimated. The error of an eigenvalue is its residual: one lies that near."""

    trace: Estimate
    frobenius: Estimate
    smallest: Estimate | None
    largest: Estimate | None


@dataclass(frozen=True)
class StreamSublayer:
    """One step: `total = passed + created` is the loss's curvature by the stream at its start."""

    name: str
    passed: ExtentEstimate
    created: ExtentEstimate
    total: ExtentEstimate


@dataclass(frozen=True)
class StreamPropagation:
    """The steps in the order of the forward pass."""

    sublayers: tuple[StreamSublayer, ...]

    def __getitem__(self, name: str) -> StreamSublayer:
        for step in self.sublayers:
            if step.name == name:
                return step
        raise KeyError(f"expected a sublayer among {[s.name for s in self.sublayers]}, got {name!r}")

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("sublayer", "passed: trace", "‖·‖_F", "created: trace", "‖·‖_F")]
        for step in self.sublayers:
            numbers = [x for part in (step.passed, step.created) for x in (part.trace, part.frobenius)]
            rows.append((step.name, *(pm(x.value, x.stderr) for x in numbers)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)


def stream_propagation(
    land: Landscape, samples: int = 16, eigenvalues: bool = True, tol: float = 1e-3, seed: int = 0
) -> StreamPropagation:
    """The recursion through every block of a model: traces and norms from `samples` probes, extreme eigenvalues.

    A probe costs two products a step, about 3 gradients of the model above it and 3 of the step.
    """
    land.probe()
    curvatures = StreamCurvatures(land)
    found = []
    for step in curvatures.steps:
        total, created = curvatures.total(step), curvatures.created(step)
        operators = {"passed": total - created, "created": created, "total": total}
        images, probes = _images(total, created, samples, seed)
        sizes = {
            name: _extent(
                f"{step.name} {name}", operators[name], images[name], probes, eigenvalues, tol, seed
            )
            for name in operators
        }
        found.append(StreamSublayer(step.name, **sizes))
    return StreamPropagation(tuple(found))


# -- products


class StreamCurvatures:
    """The operators of every step, over one block a batch, `[samples, tokens, width]`."""

    def __init__(self, land: Landscape):
        self.land, self.pieces = land, list(land.pieces())
        self.gradients: list[dict[Place, Tensor]] = []
        self.steps = find_steps(land.model)
        places = {place for step in self.steps for place in (step.start, step.end) if place is not None}
        for piece in self.pieces:
            self.gradients.append(_gradients(land, piece, places))
        self.steps = self._sequential()

    def total(self, step: Step) -> Operator:
        return StreamCurvature(self, step, of_loss=True)

    def created(self, step: Step) -> Operator:
        return StreamCurvature(self, step, of_loss=False)

    def _sequential(self) -> list[Step]:
        """The steps, those of a block joined where they do not follow each other on one stream."""
        found: list[Step] = []
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            if found and found[-1].end == step.end:
                continue  # joined with the one before
            if step.skip and following is not None and not self._leads_on(step, following):
                layer = step.name.rpartition(".")[0]
                step = Step(layer or "block", step.start, following.end)
            found.append(step)
        return found

    def _leads_on(self, step: Step, following: Step) -> bool:
        """Whether `∂²L/∂x² v = Jᵀ Γ J v + created v` for a probe: the end is all that the loss sees of the start."""
        total, created, above = self.total(step), self.created(step), self.total(following)
        v = probes_like(total, [0], 0, "gaussian")
        passed = self._pulled(step, above.apply(self._pushed(step, v)))
        expected, got = total.apply(v), passed + created.apply(v)
        size = expected.norm() + got.norm()
        return bool((expected - got).norm() <= torch.finfo(v.dtype).eps ** 0.5 * size)

    def _pushed(self, step: Step, v: Tensor) -> Tensor:
        """`J v`: the derivative by `u` of `⟨Jᵀ u, v⟩`."""
        images = []
        for piece, gradients, part in self._parts(step, v):
            with guards.twice_differentiable(self.land.model, self.land.device):
                delta = torch.zeros_like(gradients[step.start]).requires_grad_()
                end = _run(self.land, piece, step, delta)
                u = torch.zeros_like(end).requires_grad_()
                (pulled,) = torch.autograd.grad(end, delta, u, create_graph=True)
                (image,) = torch.autograd.grad(pulled, u, part)
            images.append((image + part if step.skip else image).flatten())
        return torch.cat(images)[None]

    def _pulled(self, step: Step, u: Tensor) -> Tensor:
        """`Jᵀ u`."""
        images = []
        for piece, gradients, part in self._parts(step, u):
            with guards.twice_differentiable(self.land.model, self.land.device):
                delta = torch.zeros_like(gradients[step.start]).requires_grad_()
                (image,) = torch.autograd.grad(_run(self.land, piece, step, delta), delta, part)
            images.append((image + part if step.skip else image).flatten())
        return torch.cat(images)[None]

    def _parts(self, step: Step, v: Tensor) -> Iterator[tuple[Batch, dict[Place, Tensor], Tensor]]:
        sizes = [gradients[step.start].numel() for gradients in self.gradients]
        for piece, gradients, part in zip(self.pieces, self.gradients, v[0].split(sizes), strict=True):
            yield piece, gradients, part.view_as(gradients[step.start])


class StreamCurvature(Operator):
    """`∂²L/∂x²` by the stream at a step's start, or the part that the step creates; by double backward."""

    def __init__(self, curvatures: StreamCurvatures, step: Step, of_loss: bool):
        land = curvatures.land
        shapes = [gradients[step.start].shape for gradients in curvatures.gradients]
        space = Blocks.of({f"batch.{i}": shape for i, shape in enumerate(shapes)})
        super().__init__(space, space, land.dtype, land.device, symmetric=True)
        self.curvatures, self.step, self.of_loss = curvatures, step, of_loss

    def apply(self, stack: Tensor) -> Tensor:
        parts = self.domain.split(stack).values()
        land, images = self.curvatures.land, []
        for piece, gradients, part in zip(
            self.curvatures.pieces, self.curvatures.gradients, parts, strict=True
        ):
            with guards.twice_differentiable(land.model, land.device):
                delta = torch.zeros_like(gradients[self.step.start]).requires_grad_()
                (gradient,) = torch.autograd.grad(
                    self._scalar(piece, gradients, delta), delta, create_graph=True
                )
                images.append(_products(gradient, delta, part))
        return torch.cat([image.flatten(1) for image in images], dim=1)

    def _scalar(self, piece: Batch, gradients: dict[Place, Tensor], delta: Tensor) -> Tensor:
        land, step = self.curvatures.land, self.step
        if self.of_loss:
            with _at(land.model, step.start, _shift(delta)):
                return share(land, land.parameters(), piece)
        end = _run(land, piece, step, delta)
        g = split_gradient(land, piece, None) if step.end is None else gradients[step.end]
        return (g * end).sum()


def _products(gradient: Tensor, delta: Tensor, stack: Tensor) -> Tensor:
    if not gradient.requires_grad:  # linear in the shift
        return torch.zeros_like(stack)
    images = [torch.autograd.grad(gradient, delta, v, retain_graph=True)[0] for v in stack]
    return torch.stack(images)


def _gradients(land: Landscape, piece: Batch, places: set[Place]) -> dict[Place, Tensor]:
    """`∂L/∂x` at every place: one gradient."""
    leaves: dict[Place, Tensor] = {}
    with guards.twice_differentiable(land.model, land.device):

        def leaf(place: Place) -> Callable[[Tensor], Tensor]:
            def shift(x: Tensor) -> Tensor:
                leaves[place] = torch.zeros_like(x).requires_grad_()
                return x + leaves[place]

            return shift

        with ExitStack() as stack:
            for place in places:
                stack.enter_context(_at(land.model, place, leaf(place)))
            value = share(land, land.parameters(), piece)
        found = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


class _Reached(Exception):
    """Raised to leave a forward pass at the place that was asked for."""


def _run(land: Landscape, piece: Batch, step: Step, delta: Tensor) -> Tensor:
    """What the step's end gives when the stream is shifted at its start; nothing above it is computed."""
    seen: list[Tensor] = []

    def stop(x: Tensor) -> Tensor:
        seen.append(x)
        raise _Reached

    with _at(land.model, step.start, _shift(delta)):
        if step.end is None:
            return land.output(land.parameters(), piece)
        with _at(land.model, step.end, stop), suppress(_Reached):
            land.output(land.parameters(), piece)
    return seen[0]


def _shift(delta: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x + delta


@contextmanager
def _at(model: nn.Module, place: Place, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, what passes the place is changed; the model is left as it was."""
    module = model.get_submodule(place.path)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        return (change(output[0]), *output[1:])

    if place.side == "input":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def find_steps(model: nn.Module) -> list[Step]:
    """The steps of a model of blocks with self-attention: "layer.0.attn", "layer.0.mlp", …, "head"."""
    blocks: dict[str, families.AttentionSite] = {}
    for site in families.attention_sites(model):
        path = _block_path(site.module)
        if path is None or path in blocks or site.self_attention is False:
            raise ValueError(
                f"expected one self-attention in each entry of a list of blocks, got {site.module!r} besides or "
                "elsewhere; curvature propagates along one stream, of an encoder or a decoder by itself"
            )
        blocks[path] = site
    if not blocks:
        raise ValueError(f"expected a model with attention of a known kind, got {type(model).__name__}")
    paths, steps = list(blocks), []
    for i, (path, site) in enumerate(blocks.items()):
        middle = Place(site.output, "output")
        end = Place(paths[i + 1], "input") if i + 1 < len(paths) else Place(path, "output")
        steps.append(Step(site.name, Place(path, "input"), middle, skip=True))
        steps.append(Step(f"{site.layer}.mlp" if site.layer else "mlp", middle, end))
    return [*steps, Step("head", Place(paths[-1], "output"), None)]


def _block_path(path: str) -> str | None:
    """The module's ancestor that is an entry of a list: `h.0` of `h.0.attn`."""
    parts = path.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts) or None


# -- estimates


def _images(total: Operator, created: Operator, samples: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The images of the same probes by the three operators."""
    found: list[tuple[Tensor, Tensor]] = []
    probes = probes_like(total, range(samples), seed, "rademacher")
    for start in range(0, samples, 8):
        part = probes[start : start + 8]
        found.append((total.apply(part), created.apply(part)))
    totals, parts = (torch.cat(images) for images in zip(*found, strict=True))
    return {"passed": totals - parts, "created": parts, "total": totals}, probes


def _extent(
    what: str, operator: Operator, images: Tensor, probes: Tensor, eigenvalues: bool, tol: float, seed: int
) -> ExtentEstimate:
    count = len(probes)
    trace, trace_error = mean_and_error((probes * images).sum(1).double())
    norm, norm_error = jackknife(images.double().square().sum(1), lambda mean: mean.clamp(min=0).sqrt())

    def estimate(name: str, value: Tensor, error: Tensor) -> Estimate:
        return Estimate(f"{name}({what})", value.item(), error.item(), count, count, True, "samples")

    smallest, largest = _extremes(what, operator, tol, seed) if eigenvalues else (None, None)
    return ExtentEstimate(
        estimate("trace", trace, trace_error), estimate("frobenius", norm, norm_error), smallest, largest
    )


def _extremes(
    what: str, operator: Operator, tol: float, seed: int, most: int = 200
) -> tuple[Estimate, Estimate]:
    """The smallest and the largest eigenvalue by Lanczos with full reorthogonalisation, each with its residual."""
    q = probes_like(operator, [0], seed, "gaussian")[0]
    basis: list[Tensor] = [q / q.norm()]
    diagonal: list[float] = []
    off: list[float] = []
    while True:
        y = operator.apply(basis[-1][None])[0]
        diagonal.append(torch.dot(y, basis[-1]).item())
        Q = torch.stack(basis)
        for _ in range(2):  # twice is enough
            y = y - Q.T @ (Q @ y)
        beta = y.norm().item()
        T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if off:
            T += torch.diag(torch.tensor(off, dtype=torch.float64), 1)
            T += torch.diag(torch.tensor(off, dtype=torch.float64), -1)
        values, vectors = torch.linalg.eigh(T)
        residuals = beta * vectors[-1, [0, -1]].abs()
        count, size = len(basis), values.abs().max().item()
        exhausted = count == operator.shape[0] or beta <= torch.finfo(y.dtype).eps * size
        converged = exhausted or bool((residuals <= tol * size).all())
        if converged or count == most:
            break
        off.append(beta)
        basis.append(y / beta)
    stopped = "tolerance" if converged else "samples"
    return tuple(  # type: ignore[return-value]
        Estimate(f"eigenvalue({what})", values[at].item(), residuals[at].item(), 1, count, converged, stopped)
        for at in (0, -1)
    )
