"""Digit addition: right sums, the scored tokens, carries, seeds."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from curvlens import Landscape, digits, nets


def number(rows):
    return (rows * 10 ** torch.arange(rows.shape[1] - 1, -1, -1)).sum(1)


def test_sums_are_right():
    for ids, _ in digits.batches(10, size=50, seed=3):
        assert ids.shape == (50, digits.LENGTH)
        x, y, z = ids[:, :5], ids[:, 6:11], ids[:, 12:]
        assert (ids[:, 5] == digits.PLUS).all()
        assert (ids[:, 11] == digits.EQUALS).all()
        assert x.max() <= 9
        assert torch.equal(number(x) + number(y), number(z))


def test_the_answer_alone_is_scored():
    ids, labels = digits.batches(1, size=7)[0]
    assert (labels[:, :12] == -100).all()
    assert torch.equal(labels[:, 12:], ids[:, 12:])


def test_every_fifth_batch_chains_carries():
    share = [
        ((ids[:, :5] + ids[:, 6:11]) == 9).double().mean().item() for ids, _ in digits.batches(10, size=4000)
    ]
    # 20,000 digit pairs: a tenth sums to 9 by chance; forcing a fifth makes 0.2 + 0.8 / 10. Five standard errors.
    error = 5 * (0.25 / 20_000) ** 0.5
    expected = [0.28 if i % 5 == 4 else 0.1 for i in range(10)]
    assert all(abs(a - b) < error for a, b in zip(share, expected, strict=True))


def test_seeds():
    first, second, other = (next(digits.stream(8, seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    stream = digits.stream(8, 0)
    for batch, streamed in zip(digits.batches(3, 8, 0), stream, strict=False):
        assert torch.equal(batch[0], streamed[0])
    assert not torch.equal(*(ids for ids, _ in digits.batches(2, 8)))


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    digits.batches(5, 8)
    nets.GPT(digits.VOCABULARY, digits.LENGTH, 8)
    assert torch.equal(before, torch.get_rng_state())


def test_training_takes_adamw_steps_on_the_scored_tokens():
    batches = digits.batches(2, size=8)
    net, twin = (nets.GPT(digits.VOCABULARY, digits.LENGTH, 8) for _ in range(2))
    losses = digits.train(net, batches, steps=3, lr=1e-2)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    for (ids, _), loss in zip(itertools.cycle(batches), losses, strict=False):
        logits = twin(ids)[:, 11:17]  # predict the six digits of the answer, each before it is read
        own = F.cross_entropy(logits.reshape(-1, 12), ids[:, 12:].reshape(-1))
        assert own.item() == pytest.approx(loss, rel=1e-5)  # float32
        optimizer.zero_grad()
        own.backward()
        optimizer.step()
    assert len(losses) == 3


def test_the_loss_is_that_of_the_landscape():
    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, 8)
    batches = digits.batches(1, size=8)
    land = Landscape(net, batches, loss="next-token")
    assert land.weight == 8 * 6
    value = float(land.value())
    assert digits.train(net, batches, steps=1)[0] == pytest.approx(value, rel=1e-5)  # float32


def test_training_learns():
    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, 16)
    losses = digits.train(net, digits.stream(64), steps=150, lr=1e-2)
    # the first digit of an answer, 0 or 1, is worth (log 10 - log 2) / 6 = 0.27 on its own
    assert sum(losses[-10:]) / 10 < torch.log(torch.tensor(10.0)) - 0.27


def test_training_without_batches_is_refused():
    net = nets.GPT(digits.VOCABULARY, digits.LENGTH, 8)
    with pytest.raises(ValueError, match="expected a batch for every step, got none"):
        digits.train(net, [], steps=1)
    with pytest.raises(ValueError, match="expected a batch for every step, got none"):
        digits.train(net, iter(digits.batches(1, 4)), steps=2)
