"""All heads of GPT-2 small on one sequence, against one gradient.

    python benchmarks/heads.py [tokens [repeats [threads]]] [--markdown benchmarks/heads.md]

Random weights, float32. Gradient and heads alternate, and the least of the repeats of each counts; CPU time is given
beside wall time, for machines that are shared.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import curvlens as cl
from curvlens.exact import heads

ABOUT = """Exact norms and traces of QQ, KK, QK, VQ, VK of 144 heads, one sequence, random weights, float32.
Gradient and heads alternate, the least of the repeats counts. At most six gradients are wanted at 1024 tokens.
"""

TRIED = """
Where it goes: 16 GFLOP a head by torch's count (2.3 TFLOP in all; a gradient has about 0.9 by arithmetic), four fifths
of the time in matrix products of 1024 × 1024.

What was tried:
- Moments as vectors of the width of the model (`A Y`, `D Y`, then their Gram matrices): by count about
  24 GFLOP a head; the first version with them took 14 gradients, on a machine at load 5. Products of the one Gram
  matrix `Y Yᵀ` with `A` and `D` from both sides do the same at 16, and the width of the model no longer matters.
- Causal attention halves every product with `A` or `D`, and a symmetric result takes a sixth: counted above.
- Sums of products of three matrices take tiles of rows that stay in the cache: elementwise work went from about 28 % of
  the profile to 11 %.
"""

Times = dict[str, list[tuple[float, float]]]


def timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(tokens: int, repeats: int) -> Times:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    land = cl.Landscape(model, {"input_ids": ids}, loss="next-token")

    def gradient() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    gradient()
    times: Times = {"gradient": [], "heads": []}
    for _ in range(repeats):
        times["gradient"] += [timed(gradient), timed(gradient)]
        times["heads"].append(timed(lambda: heads(land)))
        print(times, flush=True)
    return times


def table(times: Times) -> str:
    least = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    ratios = [h / g for h, g in zip(least["heads"], least["gradient"], strict=True)]
    lines = ["| | wall, s | CPU, s |", "|---|---:|---:|"]
    lines += [f"| {name} | {wall:.2f} | {cpu:.2f} |" for name, (wall, cpu) in least.items()]
    return "\n".join([*lines, f"| **heads / gradient** | **{ratios[0]:.2f}** | {ratios[1]:.2f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int, nargs="?", default=1024)
    parser.add_argument("repeats", type=int, nargs="?", default=3)
    parser.add_argument("threads", type=int, nargs="?", default=2)
    parser.add_argument("--markdown", type=Path, help="also write the page")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    found = table(measure(arguments.tokens, arguments.repeats))
    print(found)
    if arguments.markdown:
        where = (
            f"\n{arguments.tokens} tokens, {arguments.threads} threads, {arguments.repeats} repeats, torch "
            f"{torch.__version__}, the machine's load before the run {load:.1f}.\n\n"
        )
        arguments.markdown.write_text(
            f"# All heads of GPT-2 small from one gradient\n\n{ABOUT}{where}{found}\n{TRIED}"
        )


if __name__ == "__main__":
    main()
