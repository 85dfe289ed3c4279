"""Second order through attention alone, beside torch's own: `python benchmarks/attention.py`.

Of `⟨do, attention(q, k, v)⟩`, causal, one sample: its gradient, by torch's fused kernel; its Hessian product, by ours
and by torch's plain ("math") backend, the only one of torch's with second derivatives; and a Gauss-Newton product
`Jᵀ J v`. Times are the least of some repeats, each next to a gradient of its own; memory is the allocator's peak above
what was there before. What does not fit is said. With `--device cuda` the same table is made there, and errors are
those against float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from curvlens.kernels import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, is_causal=True)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gradient(attend: Attend, at: list[Tensor], dots: list[Tensor]) -> Any:
    leaves = [x.detach().requires_grad_() for x in at[:3]]
    return torch.autograd.grad(attend(*leaves), leaves, at[3])


def hessian_product(attend: Attend, at: list[Tensor], dots: list[Tensor]) -> Any:
    def first(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Any:
        return grad(lambda *qkv: (attend(*qkv) * do).sum(), (0, 1, 2))(q, k, v)

    return jvp(first, tuple(at), tuple(dots))[1]


def gauss_newton_product(attend: Attend, at: list[Tensor], dots: list[Tensor]) -> Any:
    moved = jvp(attend, tuple(at[:3]), tuple(dots[:3]))[1]
    return vjp(attend, *at[:3])[1](moved)


LINES = {
    "gradient, torch's fused": (gradient, fused),
    "gradient, torch's math": (gradient, math),
    "gradient, curvlens": (gradient, ours),
    "Hessian product, torch's math": (hessian_product, math),
    "Hessian product, curvlens": (hessian_product, ours),
    "Gauss-Newton product, torch's math": (gauss_newton_product, math),
    "Gauss-Newton product, curvlens": (gauss_newton_product, ours),
}
UNIT = "gradient, torch's fused"


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        found = run()
        last.record()
        torch.cuda.synchronize()
        taken = first.elapsed_time(last) / 1e3
    else:
        begin = time.perf_counter()
        found = run()
        taken = time.perf_counter() - begin
    del found
    return taken


def peak(run: Callable[[], Any], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = run()
        torch.cuda.synchronize()
        del found
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        found = run()
    del found
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def error(found: Any, exact: Any) -> float:
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True))


def measure(length: int, heads: int, size: int, options: argparse.Namespace) -> list[list[str]]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(length)
    draws = [torch.randn(1, heads, length, size, generator=generator) for _ in range(8)]
    at, dots = ([x.to(device, dtype) for x in part] for part in (draws[:4], draws[4:]))
    runs = {
        name: (lambda product=product, attend=attend: product(attend, at, dots))
        for name, (product, attend) in LINES.items()
        if options.only in name or name == UNIT
    }
    peaks: dict[str, int | None] = {}
    for name, run in runs.items():  # the first call compiles and tunes
        try:
            run()
            peaks[name] = peak(run, device)
        except (torch.OutOfMemoryError, RuntimeError) as fault:
            if "memory" not in str(fault):
                raise
            peaks[name] = None
    least = {name: float("inf") for name, room in peaks.items() if room is not None}
    unit = float("inf")
    for _ in range(options.repeats):
        for name in least:
            unit = min(unit, seconds(runs[UNIT], device))
            least[name] = min(least[name], seconds(runs[name], device))
    errors: dict[str, float] = {}
    if options.errors:
        exact = {
            product: product(math, [x.double() for x in at], [x.double() for x in dots])
            for product, _ in LINES.values()
        }
        errors = {name: error(runs[name](), exact[LINES[name][0]]) for name in least}
    rows = []
    for name in runs:
        room = peaks[name]
        if room is None:
            rows.append([f"{length}", name, "–", "–", "out of memory", "–", ""])
            continue
        rows.append(
            [
                f"{length}",
                name,
                f"{1e3 * least[name]:.4g}",
                f"{least[name] / unit:.2f}",
                f"{room / 2**20:.4g}",
                f"{room / (peaks[UNIT] or 1):.2f}",
                f"{errors[name]:.1e}" if name in errors else "",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--errors", action="store_true", help="compare with float64, which takes L x L")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.device}, {options.dtype}, {options.heads} heads of {options.size}"
    )
    header = ["tokens", "what", "ms", "gradients", "MiB", "gradient's", "error"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for length in options.lengths:
        for row in measure(length, options.heads, options.size, options):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
