"""Small nets written as the papers write them: weights multiply from the right, `X W`, and carry the papers' names.

A `GPT` holds `W_Q, W_K [d, k]`, `W_V [d, d_v]`, `W_O [d_v, d]`, `W_1 [d, 4 d]`, `W_2 [4 d, d]`, so that a block of
its Hessian is entry by entry the matrix of a theorem. Head `h` has the `h`-th share of the columns of `W_Q`,
`W_K`, `W_V` and of the rows of `W_O`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["relu", "gelu"] | None
Norm = Literal["none", "pre", "post"]


class SelfAttention(nn.Module):
    """`softmax(s Q Kᵀ) V W_O` with `Q = X W_Q`, `K = X W_K`, `V = X W_V`, head by head; `X [batch, tokens, d]`.

    `attention="linear"` takes the identity in place of the softmax; a causal mask then zeroes future entries.
    """

    def __init__(
        self,
        width: int,
        heads: int = 1,
        key_width: int | None = None,
        value_width: int | None = None,
        attention: Literal["softmax", "linear"] = "softmax",
        causal: bool = True,
        bias: bool = False,
        scale: float | None = None,
    ):
        super().__init__()
        key_width, value_width = key_width or width, value_width or width
        if key_width % heads or value_width % heads:
            raise ValueError(
                f"expected widths that {heads} heads divide, got {key_width} for keys, {value_width} for values"
            )
        _one_of("attention", attention, ("softmax", "linear"))
        self.heads, self.attention, self.causal = heads, attention, causal
        self.scale = (key_width // heads) ** -0.5 if scale is None else scale
        self.W_Q = _weight(width, key_width)
        self.W_K = _weight(width, key_width)
        self.W_V = _weight(width, value_width)
        self.W_O = _weight(value_width, width)
        self.b_Q = _weight(key_width) if bias else None
        self.b_K = _weight(key_width) if bias else None
        self.b_V = _weight(value_width) if bias else None
        self.b_O = _weight(width) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            _affine(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for weight, bias in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        if self.attention == "softmax":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        else:
            scores = self.scale * q @ k.mT
            mixed = (scores.tril() if self.causal else scores) @ v
        return _affine(mixed.transpose(-2, -3).flatten(-2), self.W_O, self.b_O)


class MLP(nn.Module):
    """`activation(X W_1 + b_1) W_2 + b_2`."""

    def __init__(
        self, width: int, hidden: int, activation: Literal["relu", "gelu"] = "relu", bias: bool = False
    ):
        super().__init__()
        _one_of("activation", activation, ("relu", "gelu"))
        self.activation = activation
        self.W_1 = _weight(width, hidden)
        self.W_2 = _weight(hidden, width)
        self.b_1 = _weight(hidden) if bias else None
        self.b_2 = _weight(width) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = _affine(x, self.W_1, self.b_1)
        hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden)
        return _affine(hidden, self.W_2, self.b_2)


class Block(nn.Module):
    """Attention and MLP, each added to its input; LayerNorm before each ("pre"), after each sum ("post"), or none."""

    def __init__(self, attn: SelfAttention, mlp: MLP | None, width: int, norm: Norm):
        super().__init__()
        _one_of("norm", norm, ("none", "pre", "post"))
        self.norm = norm
        self.attn, self.mlp = attn, mlp
        self.norm1 = nn.LayerNorm(width) if norm != "none" else None
        self.norm2 = nn.LayerNorm(width) if norm != "none" and mlp is not None else None

    def forward(self, x: Tensor) -> Tensor:
        for sublayer, norm in ((self.attn, self.norm1), (self.mlp, self.norm2)):
            if sublayer is None:
                continue
            if norm is None:
                x = x + sublayer(x)
            elif self.norm == "pre":
                x = x + sublayer(norm(x))
            else:
                x = norm(x + sublayer(x))
        return x


class Unembedding(nn.Module):
    """`X W_U`, or `X W_Eᵀ` with the token embedding `W_E [vocabulary, d]` where the two are tied."""

    def __init__(self, width: int, vocabulary: int, tied_to: nn.Embedding | None = None):
        super().__init__()
        self.W_U = _weight(width, vocabulary) if tied_to is None else None
        self.W_E = tied_to.weight if tied_to is not None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.W_E is not None:
            return x @ self.W_E.T
        assert self.W_U is not None
        return x @ self.W_U


class GPT(nn.Module):
    """Token and position embeddings, `depth` blocks, and a head: `ids [batch, tokens] -> [batch, tokens, vocabulary]`.

    Weights are drawn from `N(0, 0.64 / d)`, `d` the width; biases are 0 and norms 1. `activation=None` leaves the
    MLP out, `norm="pre"` adds a norm before the head, `tied` takes the token embedding's transpose as the head.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        depth: int = 1,
        heads: int = 1,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        hidden: int | None = None,
        activation: Activation = "relu",
        attention: Literal["softmax", "linear"] = "softmax",
        norm: Norm = "none",
        causal: bool = True,
        bias: bool = False,
        tied: bool = False,
        scale: float | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.length = length
        self.token = _embedding(vocabulary, width)
        self.position = _embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(
                SelfAttention(width, heads, key_width, value_width, attention, causal, bias, scale),
                MLP(width, hidden or 4 * width, activation, bias) if activation is not None else None,
                width,
                norm,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm == "pre" else None
        self.head = Unembedding(width, vocabulary, self.token if tied else None)
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw all weights anew; the same seed gives the same weights, up to rounding, in every dtype."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.8 * self.token.embedding_dim**-0.5 * draw)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[-1]
        if tokens > self.length:
            raise ValueError(f"expected at most {self.length} tokens, got {tokens}")
        x = self.token(ids) + self.position.weight[:tokens]
        for block in self.blocks:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x)


class LinearMLP(nn.Module):
    """`X W_1 W_2 … W_n`, with `W_i [widths[i-1], widths[i]]` drawn from `N(0, 1 / widths[i-1])`."""

    def __init__(self, widths: Sequence[int], seed: int = 0):
        super().__init__()
        if len(widths) < 2:
            raise ValueError(f"expected at least two widths, got {list(widths)}")
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter((torch.randn(a, b, generator=generator, dtype=torch.float64) * a**-0.5).to(dtype))
            for dtype in (torch.get_default_dtype(),)
            for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _embedding(rows: int, width: int) -> nn.Embedding:
    # without the draw from the global generator that nn.Embedding makes
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else x @ weight + bias


def _one_of(what: str, got: object, known: Sequence[str]) -> None:
    if got not in known:
        raise ValueError(f"expected {what} to be one of {', '.join(map(repr, known))}, got {got!r}")
