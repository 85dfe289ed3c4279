"""Guards: what would make a result wrong or a long run fail, met before the run.

Each raises one message: what was expected, what came, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
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
    if kind is not None and kind not in ("eager", "sdpa", "curvlens"):
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
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, gradients are recorded and nothing is autocast; the model, random state and switches are put back.

    Contexts are not enough for that: an interrupt may come while one of them is on its way in or out, as in the
    midst of an exchange of weights. So what they change is written down first, and put back last.
    """
    put_back = _snapshot(model, device)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        try:
            put_back()
        except BaseException:  # an interrupt in here
            put_back()
            raise


def _snapshot(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A function that puts back what a product may move: attributes of modules, random state, switches."""
    held = [vars(module) for module in model.modules()]
    # parameters, buffers, hooks, …
    held += [value for own in held for value in own.values() if isinstance(value, dict)]
    contents = [(holder, dict(holder)) for holder in held]
    on_gpu = device.type == "cuda"
    random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None
    switches = [(switch, read()) for read, switch in _SWITCHES]
    autocast = torch.is_autocast_enabled(device.type)
    leave_transforms = _transforms()

    def put_back() -> None:
        for holder, own in contents:
            if holder.keys() != own.keys() or any(holder[name] is not value for name, value in own.items()):
                holder.clear()
                holder.update(own)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)
        for switch, was in switches:
            switch(was)
        torch.set_autocast_enabled(device.type, autocast)
        leave_transforms()

    return put_back


def _transforms() -> Callable[[], None]:
    """A function that leaves transforms of torch.func entered since now: after one cut short, none would start again.

    PyTorch has no public name for this.
    """
    depth, nesting = _functorch.get_dynamic_layer_stack_depth(), eager_transforms.JVP_NESTING
    level = forward_ad._current_level

    def leave() -> None:
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        eager_transforms.JVP_NESTING = nesting
        if level < 0:
            with suppress(RuntimeError):  # none is open
                torch._C._exit_dual_level(level=0)
        forward_ad._current_level = level

    return leave


_CUDA = torch.backends.cuda
_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
)


@contextmanager
def twice_differentiable(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Undisturbed, and attention has second derivatives: torch's plain kernel, and ours where sequences are long."""
    with undisturbed(model, device), sdpa_kernel(SDPBackend.MATH), inside_models():
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do when an operation of the model has no second derivative."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        # TorchScript, in which tangents of some operations are written, wraps it
        if "KeyboardInterrupt" in text:
            raise KeyboardInterrupt from error
        if "forward AD" in text or "forward-mode" in text or "setup_context" in text:
            advice = 'use engine="double-backward"'
        elif ("is not implemented" in text and "derivative" in text) or "once_differentiable" in text:
            advice = "replace the operation, such as a fused kernel, by plain PyTorch for this analysis"
        else:
            raise
        raise RuntimeError(
            f"expected a model that can be differentiated twice, got: {text}; {advice}"
        ) from error
