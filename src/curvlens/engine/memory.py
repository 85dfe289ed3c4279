"""What a call allocates, as the allocator records it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


def recorded_peak(call: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The highest sum of bytes that a call holds at a time, its result included, above what was there before."""
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else some builds of torch report every start on stderr
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as record:
        result = call()
    del result
    kineto = record.profiler.kineto_results
    events = sorted((e for e in kineto.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak
