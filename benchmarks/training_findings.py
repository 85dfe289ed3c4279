"""Findings of training on runs that had no part in choosing their thresholds: how many are found, how many are false.

python benchmarks/training_findings.py [JSON-lines file]     goes on with the file where it was broken off

Ten healthy runs, ten with something planted, three that train well at a rate beyond the limit. Other tasks, widths,
depths, lengths, batches and seeds than the runs of the tests; settings were written down before the first was run.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import curvlens as cl
from curvlens import digits, grammar, nets

Batch = tuple[Tensor, Tensor]
TASKS = {
    "copy": (24, 20),
    "grammar": (grammar.VOCABULARY, 24),
    "addition": (digits.VOCABULARY, digits.LENGTH),
}


def stream(task: str, size: int, seed: int) -> Iterator[Batch]:
    """Ids and labels. "copy" is ten random tokens and the same ten again, of which only the second ten are scored."""
    if task == "addition":
        yield from digits.stream(size, seed)
    elif task == "grammar":
        yield from ((ids, ids) for ids in grammar.stream(size, 24, seed))
    generator = torch.Generator().manual_seed(seed)
    while True:
        half = torch.randint(24, (size, 10), generator=generator)
        ids, labels = torch.cat([half, half], 1), torch.cat([torch.full_like(half, -100), half], 1)
        yield ids, labels


def net(
    task: str, width: int, seed: int, depth: int = 2, heads: int = 4, norm: Any = "pre", scale: float = 1.0
):
    found = nets.GPT(*TASKS[task], width, depth, heads, norm=norm, activation="gelu", seed=seed)
    with torch.no_grad():
        for p in found.parameters():
            if p.dim() >= 2:
                p.mul_(scale)
    return found


class Multiplied(nn.Module):
    """A net whose token embedding is multiplied on its way in, and smaller by as much: the same function."""

    def __init__(self, inner: nets.GPT, factor: float):
        super().__init__()
        self.inner, self.factor = inner, factor
        with torch.no_grad():
            inner.token.weight.div_(factor)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.factor * self.inner.token(ids) + self.inner.position.weight[: ids.shape[1]]
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(self.inner.norm(x))


def warm_up(optimizer: torch.optim.Optimizer, steps: int, total: int):
    """Linear up over `steps`, then linear down to a tenth."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / steps if step < steps else 1 - 0.9 * (step - steps) / (total - steps),
    )


def run(
    task: str,
    model: nn.Module,
    kind: type[torch.optim.Optimizer],
    steps: int,
    seed: int,
    *,
    every: int = 20,
    warm: int = 0,
    clip: float | None = None,
    size: int = 24,
    times: tuple[int, str, float] | None = None,
    **rates: Any,
) -> cl.Tracker:
    """Train and track. `times = (step, parameter, factor)` multiplies a parameter after that step."""
    optimizer = kind(model.parameters(), **rates)
    schedule = warm_up(optimizer, warm, steps) if warm else None
    held = list(itertools.islice(stream(task, 8, seed + 5000), 1))
    parts = ("eigenvalues", "optimizer", "blocks")
    tracker = cl.Tracker(model, held, optimizer, every, path=None, parts=parts, clip=clip)
    for step, (ids, labels) in zip(range(1, steps + 1), stream(task, size, seed), strict=False):
        loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if times is not None and step == times[0]:
            with torch.no_grad():
                model.get_parameter(times[1]).mul_(times[2])
        tracker.step(loss, norm)
    tracker.close()
    return tracker


SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
RATE, WARM, BLOCKS, SPIKE = "rate-beyond-the-limit", "warm-up-too-short", "blocks-differ-by-orders", "spike"
Run = Callable[[], cl.Tracker]

HEALTHY: dict[str, Run] = {
    "AdamW 3e-3, copy, width 24, clipped": lambda: run(
        "copy", net("copy", 24, 11), ADAMW, 100, 11, warm=20, clip=1.0, lr=3e-3
    ),
    "AdamW 2e-3, copy, width 32, post-norm": lambda: run(
        "copy", net("copy", 32, 12, norm="post"), ADAMW, 100, 12, warm=25, lr=2e-3
    ),
    "AdamW 3e-3, grammar, width 24, decay 0.1": lambda: run(
        "grammar", net("grammar", 24, 13), ADAMW, 100, 13, warm=20, lr=3e-3, weight_decay=0.1
    ),
    "AdamW 3e-3, grammar, width 12, depth 4": lambda: run(
        "grammar", net("grammar", 12, 14, depth=4), ADAMW, 100, 14, warm=20, lr=3e-3
    ),
    "Adam 1e-3 constant, grammar, width 32": lambda: run(
        "grammar", net("grammar", 32, 15), ADAM, 100, 15, lr=1e-3
    ),
    "Adam 1e-3 constant, copy, width 16, post-norm": lambda: run(
        "copy", net("copy", 16, 16, norm="post"), ADAM, 100, 16, lr=1e-3
    ),
    "SGD 0.03, grammar, width 24": lambda: run("grammar", net("grammar", 24, 17), SGD, 100, 17, lr=0.03),
    "SGD 0.02 with momentum, copy, width 16": lambda: run(
        "copy", net("copy", 16, 18), SGD, 100, 18, warm=20, lr=0.02, momentum=0.9
    ),
    "RMSprop 1e-3, copy, width 24": lambda: run(
        "copy", net("copy", 24, 19), RMSPROP, 100, 19, warm=20, lr=1e-3
    ),
    "SGD 0.01 with Nesterov, addition, width 24": lambda: run(
        "addition", net("addition", 24, 20), SGD, 100, 20, warm=20, lr=0.01, momentum=0.9, nesterov=True
    ),
}
PLANTED: dict[str, tuple[str, Run]] = {
    "SGD 4, copy, width 24": (RATE, lambda: run("copy", net("copy", 24, 21), SGD, 60, 21, every=5, lr=4.0)),
    "AdamW 0.5, grammar, width 24": (
        RATE,
        lambda: run("grammar", net("grammar", 24, 22), ADAMW, 60, 22, every=5, warm=10, lr=0.5),
    ),
    "SGD 1 with momentum, addition, width 24": (
        RATE,
        lambda: run("addition", net("addition", 24, 23), SGD, 60, 23, every=5, lr=1.0, momentum=0.9),
    ),
    "SGD 0.1 from a start three times as large, grammar, width 24": (
        WARM,
        lambda: run("grammar", net("grammar", 24, 24, scale=3.0), SGD, 60, 24, every=2, lr=0.1),
    ),
    "SGD 0.02 with momentum from a start three times as large, copy, width 16": (
        WARM,
        lambda: run(
            "copy", net("copy", 16, 25, scale=3.0), SGD, 60, 25, every=2, warm=3, lr=0.02, momentum=0.9
        ),
    ),
    "input times 200, SGD, copy, width 24": (
        BLOCKS,
        lambda: run("copy", Multiplied(net("copy", 24, 26), 200.0), SGD, 30, 26, every=10, lr=1e-6),
    ),
    "input times 150, momentum, grammar, width 12": (
        BLOCKS,
        lambda: run(
            "grammar", Multiplied(net("grammar", 12, 27), 150.0), SGD, 30, 27, every=10, lr=1e-7, momentum=0.9
        ),
    ),
    "values of layer 0 times 50 at step 45, copy, width 24": (
        SPIKE,
        lambda: run(
            "copy", net("copy", 24, 28), ADAMW, 60, 28, every=10, lr=3e-3, times=(45, "blocks.0.attn.W_V", 50.0)
        ),
    ),
    "second MLP matrix of layer 1 times 30 at step 45, grammar, width 32": (
        SPIKE,
        lambda: run(
            "grammar", net("grammar", 32, 29), ADAMW, 60, 29, every=10, lr=3e-3,
            times=(45, "blocks.1.mlp.W_2", 30.0),
        ),
    ),
    "token embedding times 20 at step 45, addition, width 24": (
        SPIKE,
        lambda: run(
            "addition", net("addition", 24, 30), ADAMW, 60, 30, every=10, lr=3e-3, times=(45, "token.weight", 20.0)
        ),
    ),
}  # fmt: skip
CULPRITS = ("layer.0.attn.value", "layer.1.mlp.down", "embed.token")  # of the three spikes
FAST: dict[str, Run] = {
    "SGD 0.5, grammar, width 24": lambda: run("grammar", net("grammar", 24, 31), SGD, 100, 31, lr=0.5),
    "SGD 1, grammar, width 24": lambda: run("grammar", net("grammar", 24, 32), SGD, 100, 32, lr=1.0),
    "Adam 0.03, grammar, width 24": lambda: run("grammar", net("grammar", 24, 33), ADAM, 100, 33, lr=0.03),
}


def told(tracker: cl.Tracker) -> dict[str, Any]:
    """What the run came to, and what is said of it."""
    losses, ratios = tracker.track.numbers("loss"), tracker.track.numbers("preconditioned", "ratio")
    return {
        "findings": {f.id: f.blocks for f in tracker.findings},
        "loss": [losses[0], losses[-1]],
        "ratio": max((r for r in ratios if r == r), default=float("nan")),
        "events": [words for _, words in tracker.events],
    }


def rows(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The tables of the page, and the counts."""

    def row(name: str, *more: str) -> str:
        result = results[name]
        loss = " → ".join(f"{value:.3g}" for value in result["loss"])
        said = ", ".join(
            f"{key} ({', '.join(blocks)})" if blocks else key for key, blocks in result["findings"].items()
        )
        ratio = f"{result['ratio']:.2g}"
        return f"| {' | '.join((name, *more, loss, ratio, said or 'none'))} |"

    false = sum(bool(results[name]["findings"]) for name in HEALTHY)
    hits = sum(expected in results[name]["findings"] for name, (expected, _) in PLANTED.items())
    spikes = [name for name, (expected, _) in PLANTED.items() if expected == SPIKE]
    blamed = sum(
        results[name]["findings"].get(SPIKE) == [culprit]
        for name, culprit in zip(spikes, CULPRITS, strict=True)
    )
    fast = sum(RATE in results[name]["findings"] for name in FAST)
    yield f"- healthy: {false} of {len(HEALTHY)} with a finding (false alarms)"
    yield f"- planted: {hits} of {len(PLANTED)} found; of {len(spikes)} spikes {blamed} with the block that was changed"
    yield f"- beyond the limit, and training: {fast} of {len(FAST)} told to be beyond it"
    for title, group in (("healthy", HEALTHY), ("beyond the limit, and training", FAST)):
        yield f"\n| {title} | loss | largest ratio | findings |\n|---|---|---:|---|"
        yield from map(row, group)
    yield "\n| planted | expected | loss | largest ratio | findings |\n|---|---|---|---:|---|"
    yield from (row(name, expected) for name, (expected, _) in PLANTED.items())


def main(path: str = "out/training_findings.jsonl") -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        results |= json.loads(line)
    warnings.filterwarnings("ignore", "curvlens.Tracker")  # a loss that is no number cannot be measured
    for name, make in {**HEALTHY, **{k: v for k, (_, v) in PLANTED.items()}, **FAST}.items():
        if name not in results:
            results[name] = told(make())
            with open(file, "a") as out:
                out.write(json.dumps({name: results[name]}) + "\n")
    print("\n".join(rows(results)))


if __name__ == "__main__":
    main(*sys.argv[1:])
