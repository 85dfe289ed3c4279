"""Small training runs with something planted in them, or nothing: what findings must see, and pass by."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from curvlens import digits, grammar, nets
from curvlens.training.tracker import Tracker


def model(task="addition", depth=2, width=16, norm="pre", seed=0):
    torch.manual_seed(seed)
    vocabulary, length = (12, 18) if task == "addition" else (grammar.VOCABULARY, 16)
    return nets.GPT(vocabulary, length, width, depth, 2, norm=norm, activation="gelu")


def data(task="addition", size=16, seed=0):
    if task == "addition":
        yield from digits.stream(size, seed)
    else:
        for ids in grammar.stream(size, 16, seed):
            yield ids, ids


def loss_of(net, batch):
    ids, labels = batch
    return F.cross_entropy(net(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def adamw(net, lr=3e-3, **more):
    return torch.optim.AdamW(net.parameters(), lr=lr, **more)


def warm_up(optimizer, steps, total):
    """Linear up over `steps`, then a cosine down to a tenth."""

    def factor(step):
        if step < steps:
            return (step + 1) / steps
        return 0.55 + 0.45 * torch.cos(torch.tensor(3.14159 * (step - steps) / max(1, total - steps))).item()

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(net, optimizer, steps, *, task="addition", every=20, schedule=None, clip=None, plant=None, seed=0,
          size=16, path=None, **options):  # fmt: skip
    """Train and track. `plant(step, net, optimizer, batch) -> batch` may break something before a step."""
    held = list(itertools.islice(data(task, 8, seed=1000), 1))
    parts = ("eigenvalues", "optimizer", "blocks")
    tracker = Tracker(net, held, optimizer, every=every, path=path, parts=parts, clip=clip, **options)
    for step, batch in zip(range(1, steps + 1), data(task, size, seed), strict=False):
        if plant is not None:
            batch = plant(step, net, optimizer, batch) or batch
        loss = loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = None if clip is None else torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        tracker.step(loss, norm)
    tracker.close()
    return tracker
