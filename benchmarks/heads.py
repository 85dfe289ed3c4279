"""All heads of GPT-2 small on one sequence, against one gradient: `heads.py [tokens [repeats [threads]]]`.

Random weights, float32, two CPU threads. Gradient and heads alternate, and the least of the repeats of each counts;
CPU time is given beside wall time, for machines that are shared.
"""

from __future__ import annotations

import sys
import time

import torch
import transformers

import curvlens as cl
from curvlens.exact import heads


def timed(run) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main(tokens: int = 1024, repeats: int = 3, threads: int = 2) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    land = cl.Landscape(model, {"input_ids": ids}, loss="next-token")

    def gradient() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    gradient()
    times: dict[str, list[tuple[float, float]]] = {"gradient": [], "heads": []}
    for _ in range(repeats):
        times["gradient"] += [timed(gradient), timed(gradient)]
        times["heads"].append(timed(lambda: heads(land)))
        print(times, flush=True)
    least = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    print("| | wall, s | CPU, s |\n|---|---|---|")
    for name, (wall, cpu) in least.items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    ratios = [h / g for h, g in zip(least["heads"], least["gradient"], strict=True)]
    print(f"| heads / gradient | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
