"""Digit addition, `XXXXX+YYYYY=ZZZZZZ`: the task on which the attention paper trains its one-block GPT.

Eighteen tokens from a vocabulary of twelve, the digits, `+` and `=`; the six digits of the answer are scored. Chains
of carries are rare when digits are uniform, so in every fifth batch a fifth of the digit pairs sum to 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 12
PLUS, EQUALS = 10, 11
DIGITS = 5
LENGTH = 3 * DIGITS + 3
IGNORED = -100  # label of a token that is not scored

Batch = tuple[Tensor, Tensor]


def stream(size: int = 64, seed: int = 0) -> Iterator[Batch]:
    """Batches `(ids, labels)`, `[size, 18]` each, without end; the same seed gives the same batches.

    `labels` repeats the ids where they are scored and is -100 elsewhere: the prediction made *before* a label's
    position is compared with it, as the "next-token" loss does.
    """
    generator = torch.Generator().manual_seed(seed)
    number = 0
    while True:
        number += 1
        yield _batch(size, carries=number % 5 == 0, generator=generator)


def batches(count: int, size: int = 64, seed: int = 0) -> list[Batch]:
    """The first batches of the stream."""
    return list(islice(stream(size, seed), count))


def _batch(size: int, carries: bool, generator: torch.Generator) -> Batch:
    x, y = torch.randint(10, (2, size, DIGITS), generator=generator)
    if carries:
        y = torch.where(torch.rand(size, DIGITS, generator=generator) < 0.2, 9 - x, y)
    place = 10 ** torch.arange(DIGITS, -1, -1)
    total = (x * place[1:]).sum(1) + (y * place[1:]).sum(1)
    z = total[:, None] // place % 10
    plus, equals = torch.full((size, 1), PLUS), torch.full((size, 1), EQUALS)
    ids = torch.cat([x, plus, y, equals, z], dim=1)
    labels = ids.clone()
    labels[:, : -z.shape[1]] = IGNORED
    return ids, labels


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    steps: int,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train a model on the scored tokens, with AdamW unless given another; the loss before each step.

    `batches` is an iterator, or anything that can be gone through again when it is used up.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    losses = []
    for ids, labels in islice(_again(batches), steps):
        loss = F.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _again(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("expected a batch for every step, got none; pass a list, or an endless stream")
