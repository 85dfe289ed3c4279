"""Guards: what would make a result wrong or a long run fail, met before the run.

Each raises one message: what was expected, what came, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlens.kernels import inside_models

HALF = (torch.float16, torch.bfloat16)


def check_model(model: nn.Module) -> None:
    """Refuse models that are random, that keep statistics, or whose weights cannot be differentiated."""
    _check_weights(model)
    for path, module in model.named_modules():
        _check_dropout(path, module)
        _check_batch_norm(path, module)
    _check_attention(model)


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"expected weights, got {name!r} on the meta device; load the weights first")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ValueError(
                f"expected floating-point weights, got {name!r} in {parameter.dtype}; "
                "load the model without quantisation"
            )
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in ("Linear4bit", "Linear8bitLt") or "quantized" in kind.__module__:
            raise ValueError(
                f"expected floating-point weights, got the quantised module {path!r} ({kind.__name__}); "
                "load the model without quantisation"
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"expected all weights on one device, got {', '.join(sorted(map(str, devices)))}")


def _check_dropout(path: str, module: nn.Module) -> None:
    if not module.training:
        return
    rate = 0.0
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rate = module.p
    elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        rate = module.dropout
    elif isinstance(getattr(module, "attention_dropout", None), float):  # Hugging Face attention modules
        rate = module.attention_dropout  # type: ignore[assignment]
    if rate > 0:
        raise ValueError(
            f"expected a model without randomness, got active dropout (p = {rate:g}) in {path!r}; call model.eval()"
        )


def _check_batch_norm(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
        raise ValueError(
            f"expected a loss that is a mean over samples, got batch normalisation in training mode in {path!r}, "
            "which mixes the samples of a batch; call model.eval()"
        )


def _check_attention(model: nn.Module) -> None:
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind is not None and kind not in ("eager", "sdpa"):
        raise ValueError(
            f"expected attention with second derivatives (sdpa or eager), got {kind!r}; "
            'call model.set_attn_implementation("sdpa")'
        )


def check_ids(ids: Tensor, vocabulary: int) -> None:
    """Refuse token ids that the embedding has no row for, before a device assertion ends the process."""
    if ids.numel() and (ids.min() < 0 or ids.max() >= vocabulary):
        raise ValueError(
            f"expected token ids from 0 to {vocabulary - 1}, got {int(ids.min())} to {int(ids.max())}; "
            "does the tokenizer belong to this model?"
        )


def first_nonfinite(model: nn.Module, run: Callable[[], Any]) -> str:
    """Words for where NaN or infinity first appears: a weight, or the output of a module during `run`."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"in the weight {name!r}"
    found: list[str] = []

    def watch(path: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            if not found and any(isinstance(t, Tensor) and not torch.isfinite(t).all() for t in tensors):
                found.append(f"first in the output of {path!r} ({type(module).__name__})")

        return look

    handles = [m.register_forward_hook(watch(path)) for path, m in model.named_modules() if path]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "in the loss or a derivative; the outputs of all modules are finite"


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, gradients are recorded and nothing is autocast; random state and switches are restored."""
    devices = [device] if device.type == "cuda" else []
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def twice_differentiable(device: torch.device) -> Iterator[None]:
    """Undisturbed, and attention has second derivatives: torch's plain kernel, and ours where sequences are long."""
    with undisturbed(device), sdpa_kernel(SDPBackend.MATH), inside_models():
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do when an operation of the model has no second derivative."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if "forward AD" in text or "forward-mode" in text or "setup_context" in text:
            advice = 'use engine="double-backward"'
        elif ("is not implemented" in text and "derivative" in text) or "once_differentiable" in text:
            advice = "replace the operation, such as a fused kernel, by plain PyTorch for this analysis"
        else:
            raise
        raise RuntimeError(
            f"expected a model that can be differentiated twice, got: {text}; {advice}"
        ) from error
