"""Batches: what people hand over as data, made into inputs for the model and targets for the loss.

One batch is token ids, a tuple `(inputs, targets)`, or a dictionary as Hugging Face takes it; data is one
batch or anything that can be iterated again and again and gives the same batches each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from curvlens.losses import IGNORED, Loss, named


@dataclass(frozen=True)
class Batch:
    """Arguments for the model and targets for the loss."""

    args: tuple[Any, ...]
    target: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else value.dtype)

        args = tuple(map(move, self.args))
        kwargs = {name: move(value) for name, value in self.kwargs.items()}
        return Batch(args, move(self.target), kwargs)

    def tensors(self) -> list[Tensor]:
        return [v for v in (*self.args, *self.kwargs.values(), self.target) if isinstance(v, Tensor)]

    def split(self, size: int | None) -> Iterator[Batch]:
        """Micro-batches of at most `size` samples."""
        samples = len(self.target)
        if size is None or samples <= size:
            yield self
            return

        def cut(value: Any, start: int) -> Any:
            whole = isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples
            return value[start : start + size] if whole else value

        for start in range(0, samples, size):
            args = tuple(cut(value, start) for value in self.args)
            kwargs = {name: cut(value, start) for name, value in self.kwargs.items()}
            yield Batch(args, cut(self.target, start), kwargs)

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for equal data; used to notice data that changes from one pass to the next."""
        return tuple((tuple(t.shape), *_sums(t)) for t in self.tensors())


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.detach().flatten().double()
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
    return flat.sum().item(), (flat * places.sqrt()).sum().item()


def reiterable(batches: Any) -> Iterable[Any]:
    """One batch as a list of it; an iterator that can run only once as a list; others as they are."""
    if isinstance(batches, (Tensor, Mapping)) or _is_pair(batches):
        return [batches]
    if isinstance(batches, DataLoader) and isinstance(batches.sampler, RandomSampler):
        raise ValueError(
            "expected the same batches on every pass, got a DataLoader that shuffles; "
            "use shuffle=False, or draw the batches once: list(loader)"
        )
    if isinstance(batches, Iterator):
        return list(batches)
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"expected a batch or batches (token ids, (inputs, targets) or dictionaries), got {type(batches).__name__}"
            f"{'; wrap it in a torch.utils.data.DataLoader' if isinstance(batches, Dataset) else ''}"
        )
    return batches


def _is_pair(batch: Any) -> bool:
    """A tuple is one batch `(inputs, targets)`; a list is a list of batches."""
    return isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)


@dataclass(frozen=True)
class Reader:
    """Reads batches as one model takes them."""

    model: Any
    loss: Loss

    def read(self, batch: Any) -> Batch:
        batch = _alone(batch)
        if isinstance(batch, Tensor):
            read = self._read_ids(batch)
        elif isinstance(batch, Mapping):
            read = self._read_mapping(dict(batch))
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            read = self._read_pair(*batch)
        else:
            raise _unreadable(batch)
        return self._complete(_with_long_labels(read))

    def _read_ids(self, ids: Tensor) -> Batch:
        if self.loss.name != "next-token" or ids.is_floating_point():
            raise ValueError(
                f"expected targets for the loss {self.loss.name!r}, got a single tensor ({ids.dtype}); "
                'give batches (inputs, targets), or loss="next-token" for token ids'
            )
        return Batch((ids,), ids)

    def _read_pair(self, inputs: Any, target: Any) -> Batch:
        if not isinstance(target, Tensor):
            raise TypeError(f"expected a tensor of targets, got {type(target).__name__}")
        if isinstance(inputs, Mapping):
            return Batch((), target, dict(inputs))
        return Batch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), target)

    def _read_mapping(self, inputs: dict[str, Any]) -> Batch:
        target = inputs.pop("labels", None)
        mask = inputs.get("attention_mask")
        if target is None:
            if self.loss.name != "next-token" or "input_ids" not in inputs:
                raise ValueError(
                    f"expected 'labels' in the batch for the loss {self.loss.name!r}, got {', '.join(inputs)}; "
                    'give labels, or loss="next-token" for token ids'
                )
            target = inputs["input_ids"]
        if "decoder_attention_mask" in inputs:
            mask = inputs["decoder_attention_mask"]
        elif _encoder_decoder(self.model):
            mask = None  # the encoder's
        if mask is not None and mask.shape == target.shape and not target.is_floating_point():
            target = _without_padding(target, mask, shifted=self.loss.name == "next-token")
        return Batch((), target, inputs)

    def _complete(self, batch: Batch) -> Batch:
        """Add what a model needs so that padding and caches change nothing."""
        takes = _forward_parameters(self.model)
        kwargs = dict(batch.kwargs)
        if "use_cache" in takes and hasattr(self.model, "config"):
            kwargs.setdefault("use_cache", False)
        # nanoGPT gives all logits only when it is given targets
        if "targets" in takes and kwargs.get("targets") is None:
            kwargs["targets"] = batch.target
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and "position_ids" in takes and _counts_positions(self.model):
            left_padded = bool((mask[:, 0] == 0).any())
            if left_padded and kwargs.get("position_ids") is None:
                kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if (
            _encoder_decoder(self.model)
            and not {"decoder_input_ids", "decoder_inputs_embeds"} & kwargs.keys()
        ):
            kwargs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(batch.target)
        return replace(batch, kwargs=kwargs)


def _alone(batch: Any) -> Any:
    """The tensor of a list or tuple of one, as a DataLoader over a TensorDataset gives token ids."""
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 1 else batch


def _with_long_labels(batch: Batch) -> Batch:
    """Labels may come in any integer type; torch's cross-entropy takes one."""
    target = batch.target
    if target.is_floating_point() or target.dtype in (torch.long, torch.bool):
        return batch
    return replace(batch, target=target.long())


def _unreadable(batch: Any) -> TypeError:
    numbers = isinstance(batch, (int, np.ndarray)) or (isinstance(batch, (tuple, list)) and len(batch) > 2)
    many = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    return TypeError(
        "expected a batch of token ids, (inputs, targets) or a dictionary, "
        f"got {type(batch).__name__}{many}{'; make it a tensor: torch.tensor(...)' if numbers else ''}"
    )


def _without_padding(labels: Tensor, mask: Tensor, shifted: bool) -> Tensor:
    """Labels with padding unscored; a token whose predecessor is padding is predicted from nothing."""
    seen = mask.bool()
    if shifted:
        seen = seen.clone()
        seen[:, 1:] &= mask[:, :-1].bool()
    return labels.masked_fill(~seen, IGNORED)


def _forward_parameters(model: Any) -> frozenset[str]:
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(
        model, "prepare_decoder_input_ids_from_labels"
    )


def _counts_positions(model: Any) -> bool:
    """Whether positions are counted from the left end, padding included (RoBERTa counts them by itself)."""
    return not any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())


def output_tensor(output: Any) -> Tensor:
    """The tensor a loss acts on: the output itself, its logits, its last hidden state, or its first tensor."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(
        f"expected a model that returns a tensor, logits or a tuple of them, got {type(output).__name__}"
    )


def guess_loss(model: Any, batch: Any) -> Loss:
    """The loss that `loss="auto"` stands for, told by the first batch and the model."""
    batch = _alone(batch)
    if isinstance(batch, Tensor):
        return named("next-token")
    if not isinstance(batch, Mapping) and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise _unreadable(batch)
    target = batch.get("labels") if isinstance(batch, Mapping) else batch[1]
    if isinstance(target, Tensor) and target.is_floating_point():
        return named("mse")
    if not isinstance(batch, Mapping):
        return named("next-token" if _repeats(batch[0], target) else "cross-entropy")
    if _encoder_decoder(model):
        return named("cross-entropy")
    ids = batch.get("input_ids")
    per_token = target is None or (isinstance(ids, Tensor) and target.shape == ids.shape)
    return named("next-token" if per_token and _is_causal(model) else "cross-entropy")


def _repeats(ids: Any, labels: Any) -> bool:
    """Whether labels are the ids themselves where they are scored, so that each is to be predicted before it."""
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.shape != labels.shape:
        return False
    scored = labels != IGNORED
    return not ids.is_floating_point() and ids.dim() > 1 and torch.equal(ids[scored], labels[scored])


def _is_causal(model: Any) -> bool:
    name = type(model).__name__
    causal_class = name.endswith(("ForCausalLM", "LMHeadModel"))
    return causal_class or getattr(getattr(model, "config", None), "is_decoder", False)
