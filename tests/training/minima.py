"""A small trained Transformer at a minimum: of the cross-entropy with its own predictions as targets.

There the gradient is zero and the Hessian positive semidefinite, so a small distance away the local quadratic is the
whole story: what grows is unstable.
"""

from functools import lru_cache

import torch
from torch.nn import functional as F

import curvlens as cl
from curvlens import digits
from curvlens.nets import GPT

IDS = torch.cat([ids for ids, _ in digits.batches(2, size=6, seed=3)])[:11]
PARTS = (slice(0, 6), slice(6, 7), slice(7, 11))  # uneven


def net():
    return GPT(
        digits.VOCABULARY, digits.LENGTH, 8, 2, heads=2, norm="pre", activation="gelu", tied=True, bias=True
    )


def against(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), reduction="none")


@lru_cache
def _trained():
    model = net()
    digits.train(model, digits.batches(20, size=16, seed=1), steps=60, lr=3e-3)
    return {name: p.double() for name, p in model.state_dict().items()}


def at_minimum():
    """The model and its landscape."""
    model = net().double()
    model.load_state_dict(_trained())
    with torch.no_grad():
        targets = model(IDS).softmax(-1)
    return model, cl.Landscape(model, [(IDS[part], targets[part]) for part in PARTS], against)


def grow(land, optimizer, steps, sharp=None, size=1e-5):
    """Distances from the minimum over `steps` of an optimizer, from `size` away: in a random direction, and `sharp`."""
    start = flat(land)
    direction = torch.randn(start.shape, dtype=start.dtype, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    if sharp is not None:
        direction += sharp / sharp.norm()
    place(land, start + size * direction)
    distances = []
    for _ in range(steps):
        give_gradient(land)
        optimizer.step()
        distances.append((flat(land) - start).norm().item())
    return distances


def give_gradient(land):
    for name, g in land.blocks.to_parameters(land.gradient()).items():
        land.model.get_parameter(name).grad = g.clone()


def flat(land):
    return land.blocks.from_parameters(land.parameters())


@torch.no_grad()
def place(land, weights):
    """Put flat weights into the model."""
    for name, p in land.blocks.to_parameters(weights).items():
        land.model.get_parameter(name).copy_(p)
