"""The head: projection to logits and cross-entropy, in chunks of tokens, so that the logits never exist at once.

With `z` the input of the projection, `F = z W + b` the logits, `p = softmax(F)`, and a tangent at each:

    Ḟ = ż W + z Ẇ + ḃ        g = (p − e_y)/n        ġ = (p ∘ Ḟ − p ⟨p, Ḟ⟩)/n
    g_z = g Wᵀ               ġ_z = ġ Wᵀ + g Ẇᵀ       row W: zᵀ ġ + żᵀ g       row b: Σ ġ

Tokens that are not scored take no part. Logits that the model scales or soft-caps, `φ(F)`, have `ġ` times `φ'` and,
but for `H_o`, `φ'' ∘ Ḟ ∘ g` more. The memory is that of a chunk, two or three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.batches import Batch, output_tensor
from curvlens.engine.quantity import Quantity
from curvlens.engine.room import FEWEST_TOKENS, room_of
from curvlens.families.family import is_linear
from curvlens.landscape import Landscape, Parameters
from curvlens.losses import IGNORED, CrossEntropy, Loss
from curvlens.nets import Unembedding

CHUNK_BYTES = {"cuda": 192 * 2**20, "cpu": 32 * 2**20}  # of logits, at a time


@dataclass(frozen=True)
class Shaping:
    """What a model does to its logits, entry by entry: `φ(F) = a F`, or soft-capped, `φ(F) = a tanh(b F)`."""

    outer: float = 1.0
    inner: float | None = None

    @property
    def plain(self) -> bool:
        return self.outer == 1 and self.inner is None

    def shape_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.inner is not None:
            logits.mul_(self.inner).tanh_()
        return logits if self.outer == 1 else logits.mul_(self.outer)

    def slopes(self, shaped: Tensor) -> tuple[Tensor | float, Tensor | None]:
        """`φ'` and `φ''` where `φ` has the given values; None for zero."""
        if self.inner is None:
            return self.outer, None
        slope = torch.square(shaped / self.outer).neg_().add_(1).mul_(self.outer * self.inner)
        return slope, (slope * shaped).mul_(-2 * self.inner / self.outer)


@dataclass(frozen=True)
class Projection:
    """The linear module whose output, shaped entry by entry, is the model's output, `φ(z W + b)`."""

    path: str
    weight: str
    bias: str | None
    transposed: bool  # the parameter is `Wᵀ [classes, d]`
    classes: int
    shaping: Shaping = Shaping()

    def stand_in(self, z: Tensor) -> Tensor:
        """In the place of the logits: their shape, without their memory, even if the model goes on to shape them."""
        if not self.shaping.plain:
            return z.new_empty(*z.shape[:-1], self.classes, device="meta")
        return z.new_zeros(1).expand(*z.shape[:-1], self.classes)

    def is_end(self, output: Tensor, stand_in: Tensor) -> bool:
        """Whether a model returned what it was given as its logits."""
        return output is stand_in or (output.is_meta and output.shape == stand_in.shape)

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.mT if self.transposed else parameter


def find_projection(land: Landscape, piece: Batch) -> Projection | None:
    """The projection to logits, if the model ends with one and the loss is a cross-entropy."""
    if type(land.loss) is not CrossEntropy:
        return None
    found: dict[int, tuple[str, nn.Module, Tensor]] = {}
    handles = []
    names = {id(p): name for name, p in land.model.named_parameters()}

    def watch(path: str) -> Callable[..., Any]:
        def look(module: nn.Module, args: Any, output: Any) -> Any:
            leaf = output.detach().requires_grad_()
            found[id(leaf)] = path, module, leaf
            return leaf

        return look

    for path, module in land.model.named_modules():
        if path and (is_linear(module) or isinstance(module, Unembedding)):
            handles.append(module.register_forward_hook(watch(path)))
    try:
        with torch.enable_grad():
            output = output_tensor(land.output(land.parameters(), piece))
    finally:
        for handle in handles:
            handle.remove()
    shaped = _shaping(output)
    if shaped is None or id(shaped[0]) not in found:
        return None
    path, module, logits = found[id(shaped[0])]
    values = shaped[1].shape_(logits.detach().clone())
    tolerance = 100 * torch.finfo(values.dtype).eps
    if output.shape != logits.shape or not (values - output).norm() <= tolerance * values.norm():
        return None
    bias = getattr(module, "bias", None)
    weight: Any = module.weight if not isinstance(module, Unembedding) else module.W_U
    transposed = isinstance(module, nn.Linear)
    if weight is None and isinstance(module, Unembedding):
        transposed, weight = True, module.W_E
    if id(weight) not in names or (bias is not None and id(bias) not in names):
        return None
    return Projection(
        path,
        names[id(weight)],
        None if bias is None else names[id(bias)],
        transposed,
        output.shape[-1],
        shaped[1],
    )


def _shaping(output: Tensor) -> tuple[Tensor, Shaping] | None:
    """The logits that an output is made of, and how, if only by numbers and one tanh; read from its graph."""
    outer, inner = 1.0, None
    node: Any = output.grad_fn
    if node is None:
        return (output, Shaping()) if output.requires_grad else None
    while not hasattr(node, "variable"):
        kind = node.name()
        if kind in ("MulBackward0", "DivBackward0"):
            other = node._saved_other
            if other is None or other.numel() != 1 or len(_before(node)) != 1:
                return None
            factor = other.item() if kind == "MulBackward0" else 1 / other.item()
            outer, inner = (outer * factor, None) if inner is None else (outer, inner * factor)
        elif kind == "TanhBackward0" and inner is None:
            inner = 1.0
        elif kind != "ToCopyBackward0":
            return None
        (node,) = _before(node)
    return node.variable, Shaping(outer, inner)


def _before(node: Any) -> list[Any]:
    return [previous for previous, _ in node.next_functions if previous is not None]


class Head:
    """The head of one pass: `pull` takes the input of the projection and its tangents to `g`, `ġ` and the rows."""

    def __init__(
        self,
        land: Landscape,
        quantity: Quantity,
        projection: Projection,
        rows: list[str],
        directions: Parameters,
        tokens: int,
    ):
        state = {**land.constants(), **land.parameters()}
        self.land, self.quantity, self.projection = land, quantity, projection
        self.tokens = tokens
        self.count = len(next(iter(directions.values())))
        self.matrix = projection.matrix(state[projection.weight])
        self.bias = None if projection.bias is None else state[projection.bias]
        moving = directions.get(projection.weight)
        self.weight_tangents = None if moving is None else projection.matrix(moving)
        self.bias_tangents = None if projection.bias is None else directions.get(projection.bias)
        self.rows: Parameters = {
            name: torch.zeros(self.count, *state[name].shape, dtype=land.dtype, device=land.device)
            for name in (projection.weight, projection.bias)
            if name is not None and name in rows
        }

    def pull(
        self, z: Tensor, tangents: Tensor | None, target: Tensor, pulled: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """`g` and `ġ` at `z`, if anything below is asked for; what the rows get is added to `self.rows`."""
        flat = z.reshape(-1, z.shape[-1])
        dots = None if tangents is None else tangents.reshape(self.count, *flat.shape)
        places, labels = _scored(self.land.loss, target)
        gradient = torch.zeros_like(flat) if pulled and not self.quantity.is_gauss_newton else None
        products = flat.new_zeros(self.count, *flat.shape) if pulled else None
        for at, y in zip(places.split(self.tokens), labels.split(self.tokens), strict=True):
            chunk = _Chunk(self, flat[at], None if dots is None else dots[:, at], y)
            chunk.work()
            if gradient is not None and chunk.gradient is not None:
                gradient[at] = chunk.gradient
            if products is not None:
                products[:, at] = chunk.products
        return (
            None if gradient is None else gradient.view(z.shape),
            None if products is None else products.view(self.count, *z.shape),
        )


class _Chunk:
    """Some scored tokens: `z [n, d]`, `ż [K, n, d]`, labels `[n]`."""

    def __init__(self, head: Head, z: Tensor, tangents: Tensor | None, labels: Tensor):
        self.head, self.z, self.tangents, self.labels = head, z, tangents, labels
        self.scale = 1 / head.land.weight
        self.slope: Tensor | float = 1.0
        self.bent: Tensor | None = None
        self.gradient: Tensor | None = None
        self.products = z.new_zeros(head.count, *z.shape)

    def work(self) -> None:
        quantity, shaping = self.head.quantity, self.head.projection.shaping
        logits = shaping.shape_(self._logits())
        self.slope, self.bent = shaping.slopes(logits)
        if quantity.sampled:
            assert quantity.generator is not None
            self.labels = CrossEntropy().sample(logits, self.labels, quantity.generator)
        p = _softmax_(logits)
        if quantity.name in ("hessian", "gauss-newton"):
            self._curve(p)
        if quantity.name != "gauss-newton":
            p[torch.arange(len(p), device=p.device), self.labels] -= 1  # now the gradient
            self._fisher(p) if quantity.name == "fisher" else self._bend(p)

    def _curve(self, p: Tensor) -> None:
        """`ġ = p ∘ Ḟ − p ⟨p, Ḟ⟩`, vector by vector."""
        for k in range(self.head.count):
            if (dot := self._tangent(k, shaped=True)) is not None:
                self._add(k, self._sloped_(dot.sub_(_dots(p, dot)).mul_(p)))

    def _fisher(self, g: Tensor) -> None:
        for k in range(self.head.count):
            if (dot := self._tangent(k, shaped=True)) is not None:
                self._add(k, self._sloped_(torch.mul(g, _dots(g, dot), out=dot)))

    def _bend(self, g: Tensor) -> None:
        """What `g` gives with the tangents of the bilinear map `(z, W) ↦ z W`, and of `φ`."""
        head = self.head
        if self.bent is not None:
            bent = self.bent.mul_(g)  # φ'' g
            for k in range(head.count):
                if (dot := self._tangent(k)) is not None:
                    self._add(k, dot.mul_(bent))
        g = self._sloped_(g)
        self.gradient = (g @ head.matrix.mT).mul_(self.scale)
        for k in range(head.count):
            if head.weight_tangents is not None:
                self.products[k].addmm_(g, head.weight_tangents[k].mT, alpha=self.scale)
            if self.tangents is not None:
                self._add_weight(k, self.tangents[k], g)

    def _sloped_(self, at_logits: Tensor) -> Tensor:
        """From the shaped logits to those before, or the other way for tangents: times `φ'`, in place."""
        return at_logits if isinstance(self.slope, float) and self.slope == 1 else at_logits.mul_(self.slope)

    def _logits(self) -> Tensor:
        head = self.head
        return self.z @ head.matrix if head.bias is None else torch.addmm(head.bias, self.z, head.matrix)

    def _tangent(self, k: int, shaped: bool = False) -> Tensor | None:
        """`Ḟ`, or that of the shaped logits."""
        head = self.head
        found = None if self.tangents is None else self.tangents[k] @ head.matrix
        if head.weight_tangents is not None:
            weight = head.weight_tangents[k]
            found = self.z @ weight if found is None else found.addmm_(self.z, weight)
        if head.bias_tangents is not None:
            bias = head.bias_tangents[k]
            found = bias.expand(len(self.z), -1).clone() if found is None else found.add_(bias)
        return self._sloped_(found) if shaped and found is not None else found

    def _add(self, k: int, cotangent: Tensor) -> None:
        """Pull `ġ` at the logits back."""
        head = self.head
        self.products[k].addmm_(cotangent, head.matrix.mT, alpha=self.scale)
        self._add_weight(k, self.z, cotangent)
        if head.projection.bias in head.rows:
            head.rows[head.projection.bias][k].add_(cotangent.sum(0), alpha=self.scale)

    def _add_weight(self, k: int, z: Tensor, cotangent: Tensor) -> None:
        projection = self.head.projection
        if projection.weight in self.head.rows:
            first, second = (cotangent, z) if projection.transposed else (z, cotangent)
            self.head.rows[projection.weight][k].addmm_(first.mT, second, alpha=self.scale)


def chunk_of_tokens(land: Landscape, projection: Projection) -> int:
    limit = CHUNK_BYTES.get(land.device.type, CHUNK_BYTES["cpu"])
    tokens = max(FEWEST_TOKENS, limit // (projection.classes * land.dtype.itemsize))
    return min(tokens, room_of(land).tokens or tokens)


def _scored(loss: Loss, target: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the scored tokens among all, flattened, and their labels."""
    assert isinstance(loss, CrossEntropy)
    labels = target
    if loss.shift:  # the logits of a position are scored against the next label
        labels = torch.full_like(target, IGNORED)
        labels[..., :-1] = target[..., 1:]
    labels = labels.reshape(-1)
    places = (labels != IGNORED).nonzero()[:, 0]
    return places, labels[places]


def _softmax_(logits: Tensor) -> Tensor:
    """In place, without a second buffer."""
    logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    return logits.div_(logits.sum(-1, keepdim=True))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """`⟨a_i, b_i⟩` row by row `[n, 1]`, without their product."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0]
