"""The closed form of one attention layer inside a network: the top one, in whatever stands around it.

What follows the top attention layer acts token by token, `logits_i = φ(F_i)`: skip, MLP, norms, head. So the loss is a
token-wise one of the layer's output `F`, with

    g_i = φ'ᵀ ∂ℓ/∂logits_i,    B_i = φ'ᵀ (∂²ℓ/∂logits_i²) φ',    C_i = Σ_m (∂ℓ/∂logits_i)_m ∂²φ_m,

and the Hessian of the network in the layer's weights is that of `curvlens.exact` for the loss curvature `B_i + C_i`:
every block norm exactly, without a product. The split has two places. At the logits, as in the authors' code,
`H_o = Jᵀ B J` and `H_f` holds the rest, `Jᵀ C J` with it; at `F`, as in the theorems, `H_o = Jᵀ (B + C) J`. The two
are the same without norms: a ReLU MLP has no `C` almost everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens import nets
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.chain import Chain
from curvlens.exact.jet import Layer, input_hessian
from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.result import Result, Tokens, hessian, loss_at
from curvlens.structured.grid import frobenius

IGNORED = -100


def next_tokens(labels: Tensor) -> Tensor:
    """Labels moved to the positions that predict them; the last position predicts nothing."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


@dataclass(frozen=True)
class TopLayer:
    """The Hessian of a network's loss in the weights of its top attention layer."""

    at_logits: Result  # with the loss curvature B; its functional part lacks `Jᵀ C J`
    at_output: Result  # with B + C: the split at the layer's own output

    @cached_property
    def curved(self) -> bool:
        """Whether what follows the layer has curvature of its own."""
        return self.at_logits is not self.at_output

    def norm(self, part: str, row: str, column: str | None = None, split: str = "logits") -> float:
        """The Frobenius norm of a block of "outer", "functional" or "total", exactly."""
        column = column or row
        if part == "total":
            operator = self.at_output.total
        elif split == "output" or not self.curved:
            operator = getattr(self.at_output, part)
        elif part == "outer":
            operator = self.at_logits.outer
        else:
            operator = self.at_output.total - self.at_logits.outer
        return float(frobenius(operator.block(row, column)))


def top_layer(net: nets.GPT, ids: Tensor, labels: Tensor, loss: str = "cross-entropy") -> TopLayer:
    """For `labels` as `digits` gives them (cross-entropy), or targets `[batch, tokens, outputs]` ("mse")."""
    below, norms, attention, tail = _around(net)
    x: Any = embedded(net, ids)
    for layer in below:
        x = layer(x)
    skipped = x
    for layer in norms:
        x = layer(x)
    batch, length, width = x.shape
    stream = skipped.reshape(-1, width) + attention.at(Tokens.of(x)).output
    targets = next_tokens(labels).reshape(-1) if loss == "cross-entropy" else labels.reshape(len(stream), -1)
    seen = targets != IGNORED if loss == "cross-entropy" else stream.new_ones(len(stream), dtype=torch.bool)
    tokens = Tokens(stream[seen], (1,) * int(seen.sum()))
    jet = tail.at(tokens)
    at = loss_at(tokens, targets[seen] if loss == "cross-entropy" else targets, loss)(jet.output)
    outputs = jet.output.shape[1]
    eye = torch.eye(outputs, dtype=x.dtype, device=x.device)
    rows = jet.pull(eye[:, None, :].expand(outputs, len(tokens.stacked), outputs))["input"]
    J = rows.transpose(0, 1)  # [n, outputs, width]
    B = J.mT @ at.curvature() @ J
    g = (at.gradient[:, None] @ J)[:, 0]

    def result(curvature: Tensor) -> Result:
        gradient = stream.new_zeros(stream.shape)
        gradient[seen] = g
        everywhere = stream.new_zeros(*stream.shape, width)
        everywhere[seen] = curvature
        return hessian(attention.attention, x, g=gradient.view(batch, length, width), B=everywhere)

    at_logits = result(B)
    if net.norm is None and all(block.norm == "none" for block in net.blocks) and _piecewise(net):
        return TopLayer(at_logits, at_logits)
    C = torch.stack(input_hessian(tail, jet, tokens, at.gradient))
    return TopLayer(at_logits, result(B + C))


def _around(net: nets.GPT) -> tuple[list[Layer], list[Layer], AttentionLayer, Chain]:
    """The blocks below the top one, the norm within its skip, its attention, and all that comes after."""
    chain = of_net(net)
    layers = [layer for name, layer in chain.layers if name.startswith("layer.")]
    end = [link for link in chain.layers if not link[0].startswith("layer.")]
    top: Any = layers[-1]
    (_, residual), *after = top.layers
    *norms, (_, attention) = residual.layers
    return layers[:-1], [norm for _, norm in norms], attention, Chain([*after, *end])


def _piecewise(net: nets.GPT) -> bool:
    """Whether the top MLP, if any, is piecewise linear."""
    mlp: Any = net.blocks[-1].mlp
    return mlp is None or mlp.activation == "relu"
