"""What tracking costs: share of the training time, by part and in whole, and how well a budget is kept.

python benchmarks/tracking.py [seconds]
"""

from __future__ import annotations

import sys
import time

import torch
from torch.nn.functional import cross_entropy

import curvlens as cl
from curvlens import grammar, nets
from curvlens.training.gauge import PARTS

WIDTH, DEPTH, HEADS, LENGTH, SIZE, HELD = 64, 4, 4, 24, 64, 4


def build():
    torch.manual_seed(0)
    net = nets.GPT(grammar.VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS, norm="pre", activation="gelu")
    return net, torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)


def train(net, optimizer, batches, seconds, tracker=None):
    """Train for so many seconds of wall time; the number of steps."""
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        ids = batches[step % len(batches)]
        loss = cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if tracker is not None:
            tracker.step(loss)
    return step


def main(seconds: float = 40.0) -> None:
    batches = grammar.batches(64, SIZE, LENGTH)
    held = grammar.batches(1, HELD, LENGTH, seed=1)
    net, optimizer = build()
    train(net, optimizer, batches, 1.0)
    steps = train(net, optimizer, batches, seconds / 10)
    step_time = seconds / 10 / steps
    size = sum(p.numel() for p in net.parameters())
    print(
        f"{size:,} parameters, {SIZE} sequences a step, {HELD} held: a step takes {1e3 * step_time:.1f} ms\n"
    )
    print("part            one measurement     at every 100 steps")
    for parts in (*((name,) for name in PARTS), tuple(PARTS)):
        tracker = cl.Tracker(net, held, optimizer, every=10**9, path=None, parts=parts)
        tracker.measure()  # cold
        train(net, optimizer, batches, 100 * step_time)
        cost = tracker.measure()["seconds"]
        name = parts[0] if len(parts) == 1 else "all of these"
        print(f"{name:14}  {cost / step_time:8.1f} steps  {cost / step_time / 100:16.1%}")
    print("\nbudget     kept     measurements")
    for budget in (0.02, 0.05, 0.2):
        net, optimizer = build()
        tracker = cl.Tracker(net, held, optimizer, budget=budget, path=None)
        train(net, optimizer, batches, seconds / 4, tracker)
        print(f"{budget:6.0%} {tracker.pace.share:9.2%} {len(tracker.track.steps):10}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
