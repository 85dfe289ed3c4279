"""Landscape: the function whose curvature is asked for.

    L(θ) = (1/n) Σ_batches Σ_tokens ℓ(model(θ, inputs), target),   n the number of scored tokens of all batches

This is the one definition of what is averaged: it does not change when the same data is batched, padded or
split otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from curvlens import families, guards
from curvlens.batches import Batch, Reader, guess_loss, output_tensor, reiterable
from curvlens.blocks import Block, Blocks, Slice
from curvlens.losses import Loss, PerToken, named, require_derivatives

Parameters = dict[str, Tensor]


class Landscape:
    """The mean loss of a model over all scored tokens of its batches, as a function of its parameters.

    model       an `nn.Module`, or a function `f(parameters, *inputs)` together with `parameters`
    batches     one batch or any re-iterable of them: token ids, (inputs, targets), or dictionaries
    loss        "next-token", "cross-entropy", "mse", "auto", a `losses.Loss`, or a function of output and target
    dtype       what to compute in; by default that of the weights, and float32 for half-precision weights
    micro_batch at most so many samples at a time, for less memory; changes no result

    The model is never changed: not its weights, gradients, mode, buffers or hooks.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        batches: Any,
        loss: str | Loss | Callable[[Tensor, Tensor], Tensor] = "auto",
        *,
        parameters: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
        micro_batch: int | None = None,
    ):
        self.model = model if isinstance(model, nn.Module) else _Function(model, parameters)
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"expected a micro_batch of at least 1, got {micro_batch}")
        guards.check_model(self.model)
        self.blocks = self._find_blocks()
        self.device = next(self.model.parameters()).device
        self.dtype, self.notes = _working_dtype(self.model, dtype)
        self.batches: Iterable[Any] = reiterable(batches)
        self.micro_batch = micro_batch
        self._weights: Parameters | None = None  # where it stands; None: at the model's own
        self._fingerprints: list[tuple[Any, ...]] | None = None
        first = next(self._drawn(), None)
        if first is None:
            raise ValueError("expected at least one batch, got none; is the iterable empty or used up?")
        self.loss = guess_loss(self.model, first) if loss == "auto" else named(loss)
        self._reader = Reader(model, self.loss)
        self._scored = self._survey()
        if not isinstance(self.loss, PerToken):
            _require_weight(sum(self._scored))

    def _find_blocks(self) -> Blocks:
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                "expected parameters that require gradients, got none; call model.requires_grad_()"
            )
        if isinstance(self.model, _Function):
            return self.model.blocks()
        return families.blocks(self.model)

    # -- data

    def pieces(self) -> Iterator[Batch]:
        """All data, batch by batch or micro-batch by micro-batch, on the model's device."""
        index = -1
        for index, batch in enumerate(self._drawn()):
            read = self._reader.read(batch)
            if self._fingerprints is not None and (
                index >= len(self._fingerprints) or read.fingerprint() != self._fingerprints[index]
            ):
                raise ValueError(
                    f"expected the same batches on every pass, got another batch {index} than before; "
                    "turn off shuffling and random augmentation, or draw the batches once: list(loader)"
                )
            for piece in read.split(self.micro_batch):
                yield piece.to(self.device, self.dtype)
        if self._fingerprints is not None and index + 1 != len(self._fingerprints):
            raise ValueError(
                f"expected {len(self._fingerprints)} batches on every pass, got {index + 1}; "
                "give data that can be iterated again"
            )

    def _drawn(self) -> Iterator[Any]:
        """The batches. A DataLoader begins with a random number for its workers, even if it has none: put back."""
        with torch.random.fork_rng([], enabled=isinstance(self.batches, DataLoader)):
            batches = iter(self.batches)
        yield from batches

    def _survey(self) -> list[float]:
        """Read all data once: count what is scored, check ids, remember fingerprints."""
        vocabulary = _vocabulary(self.model, self.blocks)
        fingerprints, scored = [], []
        for batch in self._drawn():
            read = self._reader.read(batch)
            for ids in _token_ids(read):
                if vocabulary is not None:
                    guards.check_ids(ids, vocabulary)
            fingerprints.append(read.fingerprint())
            scored.append(self.loss.count(read.target))
        again = self._reader.read(next(self._drawn(), None))
        if again.fingerprint() != fingerprints[0]:
            raise ValueError(
                "expected the same batches on every pass, got another first batch the second time; "
                "turn off shuffling, or draw the batches once: list(loader)"
            )
        self._fingerprints = fingerprints
        return scored

    def parts(self, count: int) -> list[Landscape]:
        """Landscapes of at most `count` disjoint parts of the data, cut between samples, of about equal size.

        Their losses, gradients and Hessians, weighted by `weight`, add up to those of the whole.
        """
        if count < 1:
            raise ValueError(f"expected at least one part, got {count}")
        reads = [self._reader.read(batch) for batch in self._drawn()]
        samples = [piece for read in reads for piece in read.split(1)]
        count = min(count, len(samples))
        size = -(-sum(len(read.target) for read in reads) // count)
        pieces = [piece for read in reads for piece in read.split(size)] if count < len(samples) else samples
        found = []
        for index in range(min(count, len(pieces))):
            data = [(piece.args or piece.kwargs, piece.target) for piece in pieces[index::count]]
            if any(self.loss.count(target) for _, target in data):
                found.append(self._with(data))
        return found

    def renewed(self) -> Landscape:
        """The same landscape of the model as it is now: after parameters were frozen or thawed."""
        return self._with(self.batches)

    def _with(self, batches: Any) -> Landscape:
        parameters = dict(self.model.named_parameters()) if isinstance(self.model, _Function) else None
        model = self.model.function if isinstance(self.model, _Function) else self.model
        part = Landscape(
            model, batches, self.loss, parameters=parameters, dtype=self.dtype, micro_batch=self.micro_batch
        )
        part._weights = self._weights
        return part

    @cached_property
    def weight(self) -> float:
        """The number of scored tokens (or samples) of all batches."""
        if isinstance(self.loss, PerToken):
            weight: float = 0
            with guards.twice_differentiable(self.model, self.device), torch.no_grad():
                parameters = self.parameters()
                for piece in self.pieces():
                    weight += self.loss.count_terms(self.output(parameters, piece), piece.target)
        else:
            weight = sum(self._scored)
        return _require_weight(weight)

    # -- the function

    def at(self, weights: Tensor | Mapping[str, Tensor]) -> Landscape:
        """The same landscape at other weights, a flat vector over the blocks or `{parameter: tensor}`.

        Its value, gradient and curvature are those at `weights`; the model is not touched, and need not hold them.
        Parameters left out stand where they are now.
        """
        self.probe()
        _ = self.weight  # known before, so that the copy need not count again
        moved = copy(self)
        moved._weights = {**self.parameters(), **self._weights_of(weights)}
        return moved

    def _weights_of(self, weights: Tensor | Mapping[str, Tensor]) -> Parameters:
        shapes = {name: tuple(p.shape) for name, p in self.parameters().items()}
        if isinstance(weights, Tensor):
            if tuple(weights.shape) != (self.blocks.size,):
                raise ValueError(f"expected weights [{self.blocks.size}], got {list(weights.shape)}")
            given: Mapping[str, Tensor] = self.blocks.to_parameters(weights.detach())
        else:
            given = weights
        for name, tensor in given.items():
            if name not in shapes:
                raise KeyError(
                    f"expected names of trainable parameters, such as {next(iter(shapes))!r}, got {name!r}"
                )
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(
                    f"parameter {name!r}: expected shape {list(shapes[name])}, got {list(tensor.shape)}"
                )
        return {
            name: tensor.detach().to(self.device, self.dtype, copy=True) for name, tensor in given.items()
        }

    def parameters(self) -> Parameters:
        """The trainable parameters by name, detached, in the landscape's precision: the model's present ones."""
        if self._weights is not None:
            return {name: p.detach() for name, p in self._weights.items()}
        return {
            name: p.detach().to(self.dtype) for name, p in self.model.named_parameters() if p.requires_grad
        }

    def output(self, parameters: Parameters, piece: Batch) -> Tensor:
        """The model's output tensor at the given parameters."""
        state = {**self.constants(), **parameters}
        if isinstance(self.model, _Function):
            return output_tensor(self.model.function(parameters, *piece.args, **piece.kwargs))
        return output_tensor(functional_call(self.model, state, piece.args, piece.kwargs))

    def constants(self) -> Parameters:
        """Frozen parameters, and copies of buffers: what a forward pass writes into them is dropped."""
        state = {
            n: p.detach().to(self.dtype) for n, p in self.model.named_parameters() if not p.requires_grad
        }
        for name, buffer in self.model.named_buffers():
            state[name] = buffer.detach().to(
                self.dtype if buffer.is_floating_point() else buffer.dtype, copy=True
            )
        return state

    def value(self) -> Tensor:
        """`L(θ)`, a scalar."""
        self.probe()
        with guards.twice_differentiable(self.model, self.device), torch.no_grad():
            parameters = self.parameters()
            total = torch.zeros((), dtype=self.dtype, device=self.device)
            for piece in self.pieces():
                total += self.loss.value(self.output(parameters, piece), piece.target)
        self.require_finite(total, "loss")
        return total / self.weight

    def gradient(self) -> Tensor:
        """`∂L/∂θ`, a flat vector over the blocks. Cost: one gradient."""
        self.probe()
        with guards.twice_differentiable(self.model, self.device):
            leaves = {name: p.requires_grad_() for name, p in self.parameters().items()}
            total = {name: torch.zeros_like(p) for name, p in leaves.items()}
            for piece in self.pieces():
                value = self.loss.value(self.output(leaves, piece), piece.target)
                gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
                for name, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:
                        total[name] += gradient
            flat = self.blocks.from_parameters(total)
        self.require_finite(flat, "gradient")
        return flat / self.weight

    # -- what is checked before a long run

    def probe(self, piece: Batch | None = None) -> None:
        """Run the first batch, or the one given, twice: the loss must fit, be finite, and be the same. Done once."""
        if getattr(self, "_probed", False):
            return
        piece = next(iter(self.pieces())) if piece is None else piece
        with guards.twice_differentiable(self.model, self.device), torch.no_grad():
            parameters = self.parameters()
            output = self.output(parameters, piece)
            self.loss.check(output, piece.target)
            require_derivatives(self.loss, output, piece.target)
            first = self.loss.value(output, piece.target)
            self.require_finite(first, "loss")
            second = self.loss.value(self.output(parameters, piece), piece.target)
        if (first - second).abs() > 1e3 * torch.finfo(self.dtype).eps * first.abs():
            raise ValueError(
                f"expected the same loss from the same batch, got {first.item():.8g} and then {second.item():.8g}; "
                "the model or the loss is random: call model.eval(), or fix its noise"
            )
        self._probed = True

    def require_finite(self, tensor: Tensor, what: str, given: Tensor | None = None) -> None:
        """Raise FloatingPointError, naming the first module that produced NaN or infinity, if not what was given."""
        # a sum is one pass without a copy; it may overflow where its terms do not
        if torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all():
            return
        if given is not None and not torch.isfinite(given).all():
            raise FloatingPointError("expected finite vectors to multiply, got NaN or infinity in them")

        def run() -> None:
            with guards.twice_differentiable(self.model, self.device), torch.no_grad():
                for piece in self.pieces():
                    self.output(self.parameters(), piece)

        where = guards.first_nonfinite(self.model, run)
        raise FloatingPointError(f"expected a finite {what}, got NaN or infinity, {where}")

    def __repr__(self) -> str:
        return (
            f"Landscape({type(self.model).__name__}, {self.loss.name} over {self.weight:,} scored tokens, "
            f"{self.blocks.size:,} parameters in {len(self.blocks)} blocks, {self.dtype} on {self.device}"
            f"{''.join(f'; {note}' for note in self.notes)})"
        )


class _Function(nn.Module):
    """A function `f(parameters, *inputs)` in the place of a module; holds its parameters by name."""

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor] | None):
        super().__init__()
        if not callable(function):
            raise TypeError(f"expected a module or a function, got {type(function).__name__}")
        if not parameters:
            raise ValueError("expected parameters={name: tensor} with a model that is a function, got none")
        self.function = function
        self._named = {
            name: nn.Parameter(p.detach(), requires_grad=p.is_floating_point())
            for name, p in parameters.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()

    def blocks(self) -> Blocks:
        return Blocks(Block(name, tuple(p.shape), Slice.of(name, p.shape)) for name, p in self._named.items())


def _working_dtype(model: nn.Module, dtype: torch.dtype | None) -> tuple[torch.dtype, list[str]]:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected a floating-point dtype such as torch.float64, got {dtype!r}")
    weights = {p.dtype for p in model.parameters() if p.requires_grad}
    own = max(weights, key=lambda kind: torch.finfo(kind).bits)
    if dtype is not None:
        return dtype, [] if dtype == own else [f"weights are {own}, computed in {dtype} as asked"]
    if own in guards.HALF:
        return torch.float32, [f"weights are {own}, computed in torch.float32"]
    return own, []


def _require_weight(weight: float) -> float:
    if weight == 0:
        raise ValueError(
            "expected at least one scored token, got none: every label is -100 or padding, "
            "or the sequences have a single token"
        )
    return weight


def _vocabulary(model: nn.Module, blocks: Blocks) -> int | None:
    """The number of rows of the token embedding, where the model or its family tells."""
    find: Any = getattr(model, "get_input_embeddings", None)
    try:
        embedding = find() if find is not None else None
    except NotImplementedError:
        embedding = None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    return blocks["embed.token"].shape[0] if "embed.token" in blocks else None


def _token_ids(batch: Batch) -> list[Tensor]:
    named_ids = [batch.kwargs.get(name) for name in ("input_ids", "decoder_input_ids")]
    return [
        ids
        for ids in (*batch.args[:1], *named_ids)
        if isinstance(ids, Tensor) and not ids.is_floating_point()
    ]
