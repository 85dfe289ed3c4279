"""Landscapes with uneven samples, and the slow way to every sample's derivatives."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from curvlens.nets import GPT


def ragged(dtype=torch.float64):
    """Seven sequences of unequal numbers of scored tokens, one with none; uneven batches, tied weights."""
    generator = torch.Generator().manual_seed(0)
    model = GPT(5, 6, 4, depth=1, heads=2, norm="pre", activation="gelu", hidden=4, tied=True, bias=True)
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                dtype
            )
    ids = torch.randint(5, (8, 6), generator=generator)
    labels = ids.clone()
    for row, hidden in enumerate((0, 1, 3, 6, 2, 4, 0, 3)):
        labels[row, :hidden] = -100
    batches = [(ids[:3], labels[:3]), (ids[3:4], labels[3:4]), (ids[4:], labels[4:])]
    return cl.Landscape(model, batches, loss="next-token"), ids, labels


def one_by_one(land, ids, labels):
    """Losses, weights, gradients and Hessians of all samples, each by dense double backward of its own."""
    names = [name for name, _ in land.model.named_parameters()]
    start = [p.detach() for p in land.model.parameters()]
    blocks = land.blocks

    def loss(flat, row):
        parameters = blocks.to_parameters(flat)
        with sdpa_kernel(SDPBackend.MATH):
            logits = torch.func.functional_call(land.model, parameters, (ids[row : row + 1],))
        return F.cross_entropy(logits[0, :-1], labels[row, 1:], ignore_index=-100)

    at = blocks.from_parameters(dict(zip(names, start, strict=True)))
    kept = [row for row in range(len(ids)) if (labels[row, 1:] != -100).any()]
    losses, gradients, hessians = [], [], []
    for row in kept:
        leaf = at.clone().requires_grad_()
        value = loss(leaf, row)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0] for g in gradient]
        losses.append(value.detach())
        gradients.append(gradient.detach())
        hessians.append(torch.stack(rows))
    weights = (labels[kept, 1:] != -100).sum(1).double()
    return torch.stack(losses), weights, torch.stack(gradients), torch.stack(hessians)


def quadratic(n=9, d=5, seed=0):
    """Linear regression: every sample's loss is its own polynomial of second degree, everywhere."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(d, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, d, generator=generator, dtype=torch.float64))
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return cl.Landscape(model, [(x[:4], y[:4]), (x[4:], y[4:])], loss="mse")
