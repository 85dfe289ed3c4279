"""A model at rest: while it is measured nothing of it, and nothing random, is other than before."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

# modules that hold the real model: DataParallel, DDP and averaged models; torch.compile
WRAPPERS = (
    ("module", ("DataParallel", "DistributedDataParallel", "AveragedModel")),
    ("_orig_mod", ("OptimizedModule",)),
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what data parallelism, averaging or compilation put around it."""
    while True:
        for name, kinds in WRAPPERS:
            if type(model).__name__ in kinds:
                model = getattr(model, name)
                break
        else:
            return model


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside of one that accelerate or Lightning put around it."""
    while type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode and computes in its own precision; afterwards all is as it was.

    Kept: each module's mode, the random states of Python, NumPy and torch on every device, and what mixed precision or
    compilation have put over the modules' own `forward`. Weights, gradients and buffers a landscape does not touch.
    """
    modes = [(module, module.training) for module in model.modules()]
    covers = list(_covers(model))
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  the one that others use
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), _interruptible():
        try:
            for own, name, _, bare in covers:
                own[name] = bare
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for own, name, cover, _ in covers:
                own[name] = cover
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def _covers(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """What lies over the modules' own `forward`: where, its name, the cover, and what is below it."""
    for module in model.modules():
        own = module.__dict__
        if "forward" in own and "_original_forward" in own:  # accelerate's mixed precision
            yield own, "forward", own["forward"], own["_original_forward"]
        if own.get("_compiled_call_impl") is not None:  # module.compile(), which has no second derivatives
            yield own, "_compiled_call_impl", own["_compiled_call_impl"], None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the training, as without a tracker, and not just the estimate under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)  # estimators keep to a handler that is not the default
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
