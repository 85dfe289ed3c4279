"""The layer-by-layer engine beside gradients and peers: `python benchmarks/layered.py --device cuda`.

One command makes the table of `benchmarks/layered.md` for the machine that it is on. Times are the least of some
repeats, each next to a gradient of its own; memory is the allocator's record of one call above what was there before
it, vectors not counted. "Repeated" lines keep what does not change between products; what they hold is in a column of
its own.

    --problem like small            the two cores of the table (`like` is what a CPU runs by default)
    --problem gpt2 xl               GPT-2 small 8 x 1024, GPT-2 XL 1 x 1024 (what a GPU runs by default)
    --problem llama7b --no-gradient an exact product of a Llama of 7B parameters, in float32
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from contenders import GPT2_LIKE, Run, gradient, lines
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from curvlens.engine.memory import recorded_peak

XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
# problem: model, samples, tokens
PROBLEMS: dict[str, tuple[str, dict[str, int], int, int]] = {
    "like": ("GPT2", GPT2_LIKE, 4, 128),
    "small": ("GPT2", {}, 1, 64),
    "gpt2": ("GPT2", {}, 8, 1024),
    "xl": ("GPT2", XL, 1, 1024),
    "llama7b": ("Llama", {}, 1, 1024),
}
ALONE = ("xl", "llama7b")  # no peer is tried at these sizes


@dataclass
class Row:
    who: str
    vectors: int
    seconds: float
    peak: int
    held: int | None = None


def build(problem: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    kind, sizes, samples, tokens = PROBLEMS[problem]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
    head = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind]
    with torch.device(device):
        model = getattr(transformers, head)(config).eval()
    return model, torch.randint(0, config.vocab_size, (samples, tokens)).to(device)


Make = Callable[[nn.Module, Tensor], tuple[Run, Callable[[], int | None]]]


def ours(matrix: Callable[..., Any], **options: Any) -> Make:
    def make(model: nn.Module, ids: Tensor) -> tuple[Run, Callable[[], int | None]]:
        operator = matrix(cl.Landscape(model, ids, "next-token"), **options)
        return operator.apply, lambda: operator.kept.bytes or None

    return make


def theirs(prepare: Callable[[nn.Module, Tensor], Run]) -> Make:
    return lambda model, ids: (prepare(model, ids), lambda: None)


def contenders(problem: str, options: argparse.Namespace) -> Iterator[tuple[str, Make]]:
    for name, matrix in (("Hessian", cl.hessian), ("Gauss-Newton", cl.gauss_newton)):
        yield f"{name}: layered", ours(matrix, engine="layered")
        for precision in options.precision:
            yield f"{name}: layered, {precision}", ours(matrix, engine="layered", precision=precision)
        if problem not in ALONE:
            keep = int(options.keep * 2**30)
            yield f"{name}: layered, repeated", ours(matrix, engine="layered", keep=keep)
            yield f"{name}: double backward", ours(matrix, engine="double-backward")
            yield f"{name}: double backward, repeated", ours(matrix, engine="double-backward", keep=keep)
    if problem not in ALONE and not options.no_peers:
        for line in lines():
            if not line.who.startswith("curvlens"):
                yield f"{line.matrix}: {line.who}", theirs(line.prepare)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    found = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del found
    return seconds


def measure(problem: str, options: argparse.Namespace) -> tuple[float, int, list[Row], dict[str, str]]:
    device = torch.device(options.device)
    model, ids = build(problem, device)
    size = sum(p.numel() for p in model.parameters())
    stack = torch.randn(max(options.vectors), size, device=device)
    unit, base = float("inf"), 0
    run_gradient = gradient(model, ids)

    def one_gradient() -> Any:
        return run_gradient(stack)

    rows: list[Row] = []
    failed: dict[str, str] = {}
    with sdpa_kernel(SDPBackend.MATH):
        if not options.no_gradient:
            one_gradient()
            base = recorded_peak(one_gradient, device)
        for who, make in contenders(problem, options):
            if options.only not in who:
                continue
            try:
                for count in options.vectors:
                    run, held = make(model, ids)
                    call = partial(run, stack[:count])
                    if "repeated" not in who:
                        call()  # what is set up once is not counted; a repeated product holds it
                    peak = recorded_peak(call, device)
                    best = float("inf")
                    for _ in range(options.repeats):
                        if not options.no_gradient:
                            unit = min(unit, seconds_of(one_gradient, device))
                        best = min(best, seconds_of(call, device))
                    rows.append(Row(who, count, best / count, peak, held()))
                    print(rows[-1], f"gradient {unit:.4f} s, {base} bytes", flush=True)
                    del run, held, call
                    gc.collect()
            except (RuntimeError, MemoryError) as error:  # a peer may need more than there is
                failed[who] = str(error).splitlines()[0][:100]
                gc.collect()
    return unit, base, rows, failed


def table(
    problem: str, unit: float, base: int, rows: list[Row], failed: dict[str, str], options: argparse.Namespace
) -> str:
    kind, sizes, samples, tokens = PROBLEMS[problem]
    size = f"{kind} {sizes or ''}".strip()
    title = f"### {problem}: {size}, {samples} x {tokens} tokens, {options.device}"
    head = "| | vectors | time a vector / gradient | ms | peak memory / gradient's | MiB | held between products, MiB |"
    text = [title, "", head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    if base:
        text.append(f"| one gradient | | 1 | {1e3 * unit:.1f} | 1 | {base / 2**20:.0f} | |")
    for row in rows:
        relative = f"{row.seconds / unit:.2f}" if base else "–"
        memory = f"{row.peak / base:.2f}" if base else "–"
        held = "" if row.held is None else f"{row.held / 2**20:.0f}"
        text.append(
            f"| {row.who} | {row.vectors} | {relative} | {1e3 * row.seconds:.1f} | {memory} "
            f"| {row.peak / 2**20:.0f} | {held} |"
        )
    text += [f"| {who} | failed: {why} | | | | | |" for who, why in failed.items()]
    return "\n".join([*text, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--problem", choices=list(PROBLEMS), nargs="+")
    parser.add_argument("--vectors", type=int, nargs="+", default=[1])
    parser.add_argument("--precision", choices=["tf32", "bf16"], nargs="*", default=[])
    parser.add_argument("--keep", type=float, default=2.0, help="GiB for repeated products")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-gradient", action="store_true", help="where a gradient does not fit")
    parser.add_argument("--markdown", type=Path, help="a file to write the tables to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    text = [f"torch {version('torch')}, {name}, {options.threads} threads, float32.\n"]
    for problem in options.problem or (["gpt2", "xl"] if options.device.startswith("cuda") else ["like"]):
        text.append(table(problem, *measure(problem, options), options))
        print("\n" + text[-1], flush=True)
        if options.markdown:
            options.markdown.write_text("\n".join(text))


if __name__ == "__main__":
    main()
