"""The slow and plain way to every matrix: dense double backward, in parameter order, then sorted into blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlens.blocks import Blocks


def entries(blocks: Blocks, names: list[str], shapes: list[torch.Size]) -> torch.Tensor:
    """Where each entry of the blocks lies in the concatenation of the flattened parameters."""
    starts, total = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        starts[name], total = total, total + math.prod(shape)
    return torch.cat([starts[b.source.parameter] + b.source.entries() for b in blocks])


def rows_of(outputs: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The Jacobian of a flat tensor with respect to the leaves: one backward pass a row, all at once."""
    outputs = outputs.flatten()
    found = torch.autograd.grad(
        outputs,
        leaves,
        torch.eye(len(outputs), dtype=outputs.dtype),
        retain_graph=True,
        is_grads_batched=True,
        allow_unused=True,
    )
    zero = outputs.new_zeros(len(outputs), 1)
    return torch.cat(
        [
            zero.expand(-1, leaf.numel()) if rows is None else rows.flatten(1)
            for leaf, rows in zip(leaves, found, strict=True)
        ],
        dim=1,
    )


def rows_one_by_one(outputs: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The same without batching, to check it."""
    rows = []
    for output in outputs.flatten():
        found = torch.autograd.grad(
            output, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    return torch.stack(rows)


def hessian_of(scalar: torch.Tensor, leaves: list[torch.Tensor], rows=rows_of) -> torch.Tensor:
    gradients = torch.autograd.grad(scalar, leaves, create_graph=True, allow_unused=True)
    flat = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)]
    return rows(torch.cat([g.flatten() for g in flat]), leaves)


def logits_and_labels(model, batch, loss):
    """Scored logits `[n, classes]` and labels `[n]`, or outputs and targets of a regression."""
    if isinstance(batch, dict):
        labels = batch["labels"]
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["labels"] = labels
        output = model(**inputs).logits
    else:
        inputs, labels = batch
        output = model(inputs)
        output = getattr(output, "logits", output)
    if loss == "mse":
        return output, labels
    if loss == "next-token":
        output, labels = output[:, :-1], labels[:, 1:]
    output, labels = output.reshape(-1, output.shape[-1]), labels.reshape(-1)
    return output[labels != -100], labels[labels != -100]


class Reference:
    """Dense `H`, `H_o`, `H_f` and the empirical Fisher matrix of a model on one batch, in the order of its blocks."""

    def __init__(self, model, batch, loss, blocks):
        self.leaves = [p for p in model.parameters() if p.requires_grad]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.order = entries(blocks, names, [p.shape for p in self.leaves])
        with sdpa_kernel(SDPBackend.MATH):
            output, target = logits_and_labels(model, batch, loss)
        self.output, self.target, self.loss = output, target, loss

    def _sorted(self, matrix):
        return matrix[self.order][:, self.order]

    def value(self):
        if self.loss == "mse":
            return (self.output - self.target).square().mean()
        return F.cross_entropy(self.output, self.target)

    def hessian(self):
        return self._sorted(hessian_of(self.value(), self.leaves))

    def outer(self):
        jacobian = rows_of(self.output, self.leaves)
        leaf = self.output.detach().flatten().requires_grad_()
        if self.loss == "mse":
            value = (leaf.view_as(self.output) - self.target).square().mean()
        else:
            value = F.cross_entropy(leaf.view_as(self.output), self.target)
        return self._sorted(jacobian.T @ hessian_of(value, [leaf]) @ jacobian)

    def fisher(self):
        if self.loss == "mse":
            terms = (self.output - self.target).square().mean(-1).flatten()
        else:
            terms = F.cross_entropy(self.output, self.target, reduction="none")
        gradients = rows_of(terms, self.leaves)
        return self._sorted(gradients.T @ gradients / len(terms))
