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
from typing import Any

import torch
from torch import Tensor

from curvlens import nets
from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_jet import AttentionLayer
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.jet import Layer, input_hessian
from curvlens.exact.linear import Linear
from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.result import Result, Tokens, hessian, loss_at
from curvlens.operator import Operator
from curvlens.structured.grid import frobenius
from curvlens.structured.kronecker import KroneckerSum
from curvlens.structured.stacks import LowRank, Stack
from curvlens.structured.terms import Term

IGNORED = -100


def next_tokens(labels: Tensor) -> Tensor:
    """Labels moved to the positions that predict them; the last position predicts nothing."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


@dataclass(frozen=True)
class TopLayer:
    """The Hessian of a network's loss in the weights of its top attention layer."""

    passed: Result  # with the loss curvature B: `Jᵀ B J`, and the layer's own second derivatives
    bent: Result | None  # with the curvature C of what follows the layer, `Jᵀ C J`; None where it has none
    inputs: Tensor  # [batch, tokens, width]: what the layer attends over
    attention: SelfAttention

    def operator(self, part: str, split: str = "logits") -> Operator:
        """ "outer", "functional" or "total"."""
        operator: Operator = getattr(self.passed, part)
        if self.bent is None or part == ("outer" if split == "logits" else "functional"):
            return operator
        return operator + self.bent.outer

    def norm(self, part: str, row: str, column: str | None = None, split: str = "logits") -> float:
        """The Frobenius norm of a block, exactly."""
        return float(frobenius(_without_zeros(self.operator(part, split).block(row, column or row))))


def _without_zeros(block: Operator) -> Operator:
    """The same sum over the tokens that add to it, since a norm costs their square.

    Most add nothing: `g`, `B` and `C` are zero where the loss does not depend on what follows a token.
    """
    if not isinstance(block, KroneckerSum):
        return block
    terms = []
    for term in block.terms:
        where: Any = (_nonzero(term.a) & _nonzero(term.b)).nonzero()[:, 0]
        if len(where):
            terms.append(Term(term.a.tokens(where), term.b.tokens(where), term.crossed))
    return KroneckerSum.of(terms or list(block.terms), block.codomain, block.domain)


def _nonzero(stack: Stack) -> Tensor:
    """Which matrices of a stack are not zero."""
    if isinstance(stack, LowRank):
        return stack.left.flatten(1).any(1) & stack.right.flatten(1).any(1)
    return stack.t.flatten(1).any(1)


def of_network(
    net: nets.GPT, ids: Tensor, labels: Tensor, attention: SelfAttention | None = None
) -> TopLayer:
    """For next-token prediction with `labels` as `digits` gives them."""
    return top_layer(of_net(net), embedded(net, ids), next_tokens(labels), attention=attention)


def top_layer(
    chain: Chain,
    x: Tensor,
    targets: Tensor,
    loss: str = "cross-entropy",
    attention: SelfAttention | None = None,
) -> TopLayer:
    """For a stack of blocks, its input `[batch, tokens, width]` and targets as `exact.hessian` takes them.

    `attention` may give the same layer in another form, such as the one with a single query-key matrix.
    """
    below, norms, layer, tail = _around(chain)
    for each in below:
        x = each(x)  # type: ignore[assignment]
    skipped = x
    for each in norms:
        x = each(x)  # type: ignore[assignment]
    batch, length, width = x.shape
    stream = skipped.reshape(-1, width) + layer.at(Tokens.of(x)).output
    wanted = targets.reshape(-1) if loss == "cross-entropy" else targets.reshape(len(stream), -1)
    seen = wanted != IGNORED if loss == "cross-entropy" else torch.ones_like(stream[:, 0], dtype=torch.bool)
    tokens = Tokens(stream[seen], (1,) * int(seen.sum()))
    jet = tail.at(tokens)
    at = loss_at(Tokens(stream[seen], (len(tokens.lengths),)), wanted[seen], loss)(jet.output)
    outputs = jet.output.shape[1]
    eye = torch.eye(outputs, dtype=x.dtype, device=x.device)
    rows = jet.pull(eye[:, None, :].expand(outputs, len(tokens.stacked), outputs))["input"]
    J = rows.transpose(0, 1)  # [n, outputs, width]
    B = J.mT @ at.curvature() @ J
    g = (at.gradient[:, None] @ J)[:, 0]
    own = attention or layer.attention

    def result(curvature: Tensor) -> Result:
        gradient = stream.new_zeros(stream.shape)
        gradient[seen] = g
        everywhere = stream.new_zeros(*stream.shape, width)
        everywhere[seen] = curvature
        return hessian(own, x, g=gradient.view(batch, length, width), B=everywhere)

    if _piecewise_linear(tail):
        return TopLayer(result(B), None, x, own)
    C = torch.stack(input_hessian(tail, jet, tokens, at.gradient))
    return TopLayer(result(B), result(C), x, own)


def _around(chain: Chain) -> tuple[list[Layer], list[Layer], AttentionLayer, Chain]:
    """The blocks below the top one, the norm within its skip, its attention, and all that comes after."""
    layers = [layer for name, layer in chain.layers if name.startswith("layer.")]
    end = [link for link in chain.layers if not link[0].startswith("layer.")]
    top: Any = layers[-1]
    (_, residual), *after = top.layers
    *norms, (_, attention) = residual.layers
    return layers[:-1], [norm for _, norm in norms], attention, Chain([*after, *end])


def _piecewise_linear(layer: Layer) -> bool:
    """Whether a layer has no curvature in its input almost everywhere."""
    if isinstance(layer, Chain):
        return all(_piecewise_linear(inner) for _, inner in layer.layers)
    if isinstance(layer, FeedForward):
        return layer.activation.name in ("relu", "identity")
    return isinstance(layer, Linear)
