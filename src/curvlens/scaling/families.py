"""Families of small GPTs to scale: digit addition, or text of the package's own grammar, along width or depth.

The model trains for a given number of steps on the given number of distinct samples, over and over; its curvature is
that of the loss on a fixed set of other samples, the same for all members.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlens import digits, grammar
from curvlens.landscape import Landscape
from curvlens.nets import GPT
from curvlens.scaling.sizes import Family

Task = Literal["addition", "text"]
Batch = tuple[Tensor, Tensor]
BATCH = 32
IGNORED = digits.IGNORED


def number_type(name: str | None) -> torch.dtype:
    """The dtype of a name, float32 if there is none."""
    known = {"float32": torch.float32, "float64": torch.float64}
    if name is not None and name not in known:
        raise ValueError(f"expected the dtype float32 or float64, got {name!r}")
    return known[name or "float32"]


def samples(task: Task, count: int, seed: int) -> Batch:
    """`(ids, labels)` of so many sequences."""
    if task == "addition":
        made = digits.batches(-(-count // BATCH), BATCH, seed)
        return torch.cat([ids for ids, _ in made])[:count], torch.cat([labels for _, labels in made])[:count]
    if task == "text":
        ids = torch.cat(grammar.batches(-(-count // BATCH), BATCH, seed=seed))[:count]
        return ids, ids.clone()
    raise ValueError(f"expected the task 'addition' or 'text', got {task!r}")


def gpt(
    task: Task = "addition",
    axis: Literal["width", "depth"] = "width",
    steps: int = 200,
    measured: int = 64,
    lr: float = 3e-3,
    width: int = 16,
    depth: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Family:
    """`family(size, data, seed)` of pre-norm GPTs whose width or depth is the size; `steps=0` leaves them untrained."""
    if axis not in ("width", "depth"):
        raise ValueError(f"expected the axis 'width' or 'depth', got {axis!r}")
    vocabulary = digits.VOCABULARY if task == "addition" else grammar.VOCABULARY
    length = digits.LENGTH if task == "addition" else grammar.LENGTH

    def family(size: int, data: int, seed: int) -> Landscape:
        wide, deep = (size, depth) if axis == "width" else (width, size)
        model = GPT(vocabulary, length, wide, deep, norm="pre", activation="gelu", seed=seed).to(
            device, dtype
        )
        ids, labels = (t.to(device) for t in samples(task, data, 1000 + seed))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        parts = zip(ids.split(BATCH), labels.split(BATCH), strict=True)
        for some, wanted in islice(cycle(parts), steps):
            logits = model(some)[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, wanted[:, 1:].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return Landscape(model, [samples(task, measured, 999_983)], loss="next-token")

    return family
