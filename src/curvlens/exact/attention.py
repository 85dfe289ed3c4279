"""Self-attention as the papers write it, in the forms that models use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Block, Blocks
from curvlens.exact.attention_map import NAMED, AttentionMap, Mask
from curvlens.exact.result import LossAt, Result, Sequences, Tokens, numbers


class SelfAttention:
    """`F(X) = Σ_h a(T_h) X W_V^h W_O^h` with `T_h = X W_Q^h (X W_K^h)ᵀ / (t √d_K)`, weights as `[inputs, outputs]`.

    Heads: either matrices `[d, H k]` with `heads=H`, side by side as models store them, their outputs concatenated
    (`W_O` `[H d_v, d_out]`); or stacks `[H, d, k]`, one matrix a head, their outputs added (paper A, Appendix E;
    `W_O` `[H, d_v, d_out]`). Fewer key and value heads than query heads are shared by neighbours (grouped queries).
    A low-rank value matrix (Appendix E.1) is the pair `W_V`, `W_O`.

    `W_QK` in place of `W_Q` and `W_K` is the single-matrix form `T = X W_QK Xᵀ / t` (Lemma 4.1).
    `activation`: `"softmax"`, `"linear"`, `"sigmoid"`, an `Elementwise` or a `RowMap`. `mask` (True: may attend) is
    `[L, L]`, a padding mask of keys `[L]` or `[batch, L]`, `[batch, L, L]`, or a list of one a sequence; `causal`
    adds the usual one. A row that may attend to nothing gives zero. Biases are `[k]` or `[H k]` or `[H, k]`.

    `turns` `[L, k, k]` stand between projection and scores, `T_ij = (R_i q_i)·(R_j k_j) / (t √d_K)`, in every head:
    rotary positions are `turns=rotary(L, k)`. A key then acts by a turn of its own in every row, so that blocks are no
    sums of one Kronecker product a token any more: the Hessian's products stay exact, its norms and traces take one
    product a column.
    """

    def __init__(
        self,
        W_Q: Tensor | None = None,
        W_K: Tensor | None = None,
        W_V: Tensor | None = None,
        *,
        W_QK: Tensor | None = None,
        W_O: Tensor | None = None,
        b_Q: Tensor | None = None,
        b_K: Tensor | None = None,
        b_V: Tensor | None = None,
        b_O: Tensor | None = None,
        heads: int | None = None,
        activation: str | AttentionMap = "softmax",
        temperature: float = 1.0,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | Sequence[Tensor] | None = None,
        turns: Tensor | None = None,
    ):
        if W_V is None or (W_QK is None) == (W_Q is None) or (W_Q is None) != (W_K is None):
            raise ValueError("expected W_Q, W_K and W_V, or W_QK and W_V")
        if W_QK is not None and (b_Q is not None or b_K is not None):
            raise ValueError(
                "expected no b_Q or b_K with W_QK: the single-matrix form has no queries and keys"
            )
        if isinstance(activation, str) and activation not in NAMED:
            raise ValueError(
                f"expected activation {', '.join(map(repr, NAMED))}, an Elementwise or a RowMap, got {activation!r}"
            )
        first = W_QK if W_Q is None else W_Q
        assert first is not None
        if first.dim() not in (2, 3):
            raise ValueError(
                f"expected weights [inputs, outputs] or [heads, inputs, outputs], got {list(first.shape)}"
            )
        self.stacked = first.dim() == 3
        count = len(first) if self.stacked else heads or 1
        if heads is not None and heads != count:
            raise ValueError(f"expected heads={count} for a stack of shape {list(first.shape)}, got {heads}")
        self.heads = count
        single = {"query_key": (W_QK, None)} if W_Q is None else {"query": (W_Q, b_Q), "key": (W_K, b_K)}
        given = {**single, "value": (W_V, b_V), "out": (W_O, b_O)}
        self.weights = numbers({kind: W for kind, (W, _) in given.items() if W is not None})
        self.biases = numbers({kind: b for kind, (_, b) in given.items() if b is not None})
        self.d = first.shape[-2]
        width = first.shape[-1] // (1 if self.stacked else count)
        if W_K is not None and W_K.dim() == first.dim() and W_K.shape[-1] % max(width, 1):
            raise ValueError(
                f"key: expected heads of {width} columns, as the queries {list(first.shape)} have, got "
                f"{list(W_K.shape)}"
            )
        self.groups = {kind: self._count(kind, W, width) for kind, W in self.weights.items()}
        self.activation = NAMED[activation] if isinstance(activation, str) else activation
        if not temperature > 0:
            raise ValueError(f"expected a temperature above zero, got {temperature}")
        self.temperature = temperature
        default = 1.0 if W_Q is None else 1 / math.sqrt(width)
        self.scale = (default if scale is None else scale) / temperature
        self.causal, self.mask = causal, mask
        self.turns = None if turns is None else turns.detach()
        self._check_shapes()

    def _count(self, kind: str, W: Tensor, width: int) -> int:
        """The number of heads of one weight: as many as of queries, or fewer for keys and values."""
        if W.dim() != (3 if self.stacked else 2):
            raise ValueError(
                f"expected every weight as a {'stack' if self.stacked else 'matrix'}, got {kind} {list(W.shape)}"
            )
        if self.stacked:
            return len(W)
        if kind == "key":
            return W.shape[1] // width
        if kind == "value" and "key" in self.weights:
            return self.weights["key"].shape[1] // width
        return self.heads

    def _check_shapes(self) -> None:
        for kind, W in self.weights.items():
            count = self.groups[kind]
            across = W.shape[0 if kind == "out" else 1]
            if count == 0 or self.heads % count or (not self.stacked and across % count):
                raise ValueError(
                    f"{kind}: expected heads that divide {self.heads} query heads evenly, got {list(W.shape)}"
                )
            inputs = W.shape[-2]
            wanted = self.d if kind != "out" else (1 if self.stacked else self.heads) * self._value_width
            if inputs != wanted:
                raise ValueError(f"{kind}: expected {wanted} inputs (rows), got shape {list(W.shape)}")
        for kind, b in self.biases.items():
            columns = self.weights[kind].shape[-1] if kind in self.weights else self.outputs
            wanted_shape = (self.groups[kind], columns) if self.stacked and kind != "out" else (columns,)
            if tuple(b.shape) != wanted_shape:
                raise ValueError(f"bias of {kind}: expected shape {list(wanted_shape)}, got {list(b.shape)}")
        if self.turns is not None:
            if "query_key" in self.weights:
                raise ValueError(
                    "expected no turns with W_QK: the single-matrix form has no queries and keys"
                )
            k = self.weights["query"].shape[-1] // (1 if self.stacked else self.heads)
            if self.turns.dim() != 3 or tuple(self.turns.shape[1:]) != (k, k):
                raise ValueError(
                    f"expected turns [L, {k}, {k}], one a position, got {list(self.turns.shape)}"
                )

    @property
    def _value_width(self) -> int:
        W = self.weights["value"]
        return W.shape[-1] if self.stacked else W.shape[-1] // self.groups["value"]

    @property
    def outputs(self) -> int:
        """The width of the output."""
        if "out" in self.weights:
            return self.weights["out"].shape[-1]
        return self._value_width * (1 if self.stacked else self.heads)

    # -- the weights of one head

    def head(self, kind: str, h: int) -> Tensor | None:
        """The matrix of a query head `[d, k]` (`out`: `[d_v, o]`, None for the identity), shared by its group."""
        if kind not in self.weights:
            if (
                kind == "out" and self.heads > 1 and not self.stacked
            ):  # concatenation places each head's outputs
                W = self.weights["value"]
                eye = torch.eye(self.outputs, dtype=W.dtype, device=W.device)
                return eye.unflatten(0, (self.heads, -1))[h]
            return None
        W = self.weights[kind]
        if self.stacked:
            return W[self.group(kind, h)]
        if self.heads == 1:
            return W
        if kind == "out":
            return W.unflatten(0, (self.heads, -1))[h]
        return W.unflatten(1, (self.groups[kind], -1))[:, self.group(kind, h)]

    def bias(self, kind: str, h: int) -> Tensor | None:
        if kind not in self.biases:
            return None
        b = self.biases[kind]
        return (
            b[self.group(kind, h)]
            if self.stacked
            else b.unflatten(0, (self.groups[kind], -1))[self.group(kind, h)]
        )

    def group(self, kind: str, h: int) -> int:
        """The key or value head that query head `h` uses."""
        return h * self.groups.get(kind, self.heads) // self.heads

    @property
    def augmented(self) -> bool:
        """Whether a constant token entry is needed for biases."""
        return any(kind != "out" for kind in self.biases)

    def projection(self, kind: str, h: int) -> Tensor | None:
        """The matrix of a head with its bias as the last row, if the layer has biases."""
        W = self.head(kind, h)
        if W is None or not self.augmented:
            return W
        b = self.bias(kind, h)
        return torch.cat([W, (W.new_zeros(W.shape[1]) if b is None else b)[None]])

    # -- blocks

    @cached_property
    def blocks(self) -> Blocks:
        """`query`, `key` (or `query_key`), `value`, `out`, and `query.bias` and so on, as far as the layer has them."""
        made = []
        for kind, W in self.weights.items():
            made.append(Block(kind, tuple(W.shape), heads=self._split(kind)))
        for kind, b in self.biases.items():
            split = None if kind == "out" else self._split(kind)
            made.append(Block(f"{kind}.bias", tuple(b.shape), heads=split and (split[0], 0)))
        return Blocks(made)

    def _split(self, kind: str) -> tuple[int, int] | None:
        count = self.groups[kind]
        if self.stacked:
            return (count, 0)
        return (count, 0 if kind == "out" else 1) if self.heads > 1 else None

    @cached_property
    def cells(self) -> dict[str, tuple[str, int, bool]]:
        """Kind, head (of its own kind) and whether it is a bias, of every block or head of a block."""
        names = {}
        for block in self.blocks:
            kind = block.name.removesuffix(".bias")
            for i, head in enumerate(block.split_heads()):
                names[head.name] = (kind, i, kind != block.name)
        return names

    # -- the layer as a function

    def __call__(self, X: Sequences) -> Any:
        """The output for tokens `[L, d]`, `[batch, L, d]` or a list of `[L_b, d]`, in the same form."""
        return self.forward({}, X)

    def forward(self, parameters: dict[str, Tensor], X: Sequences) -> Any:
        """The output with some blocks replaced: `forward({"query": W_Q}, X)`, differentiable in them."""
        layer = self._with(parameters) if parameters else self
        tokens = Tokens.of(X)
        self._check_tokens(tokens)
        masks = layer.masks(tokens)
        outputs = [layer._attend(x, mask) for x, mask in zip(tokens.split(), masks, strict=True)]
        return tokens.like(X, torch.cat(outputs))

    def _with(self, parameters: dict[str, Tensor]) -> SelfAttention:
        layer = SelfAttention.__new__(SelfAttention)
        layer.__dict__.update(self.__dict__)
        weights, biases = dict(self.weights), dict(self.biases)
        for name, value in parameters.items():
            kind = name.removesuffix(".bias")
            (weights if kind == name else biases)[kind] = value
        layer.weights, layer.biases = weights, biases
        return layer

    def _attend(self, x: Tensor, mask: Mask) -> Tensor:
        output: Tensor | None = None
        for h in range(self.heads):
            A = self.activation.attend(self.score(x, h), mask)
            v = x @ _require(self.head("value", h))
            b = self.bias("value", h)
            v = v if b is None else v + b
            out = self.head("out", h)
            mixed = A @ (v if out is None else v @ out)
            output = mixed if output is None else output + mixed
        assert output is not None
        return output + self.biases["out"] if "out" in self.biases else output

    def score(self, x: Tensor, h: int) -> Tensor:
        """`T`, `[..., L, L]`, of one head."""
        if "query_key" in self.weights:
            return self.scale * (x @ _require(self.head("query_key", h)) @ x.mT)
        q, k = (self._project(x, kind, h) for kind in ("query", "key"))
        return self.scale * (q @ k.mT)

    def _project(self, x: Tensor, kind: str, h: int) -> Tensor:
        b = self.bias(kind, h)
        projected = x @ _require(self.head(kind, h))
        projected = projected if b is None else projected + b
        if self.turns is None:
            return projected
        return torch.einsum("lab,...lb->...la", self.turns[: x.shape[-2]], projected)

    def masks(self, tokens: Tokens) -> list[Mask]:
        """The mask `[L, L]` of each sequence, or None."""
        given = self._given_masks(tokens)
        if not self.causal:
            return given
        masks: list[Mask] = []
        for L, mask in zip(tokens.lengths, given, strict=True):
            causal = torch.ones(L, L, dtype=torch.bool, device=tokens.stacked.device).tril()
            masks.append(causal if mask is None else causal & mask)
        return masks

    def _given_masks(self, tokens: Tokens) -> list[Mask]:
        if self.mask is None:
            return [None] * len(tokens.lengths)
        L, batch = tokens.lengths[0], len(tokens.lengths)
        masks: list[Tensor]
        if not isinstance(self.mask, Tensor):
            masks = list(self.mask)
        elif self.mask.shape in ((L, L), (L,)):
            masks = [self.mask] * batch
        elif self.mask.dim() in (2, 3) and len(self.mask) == batch:
            masks = list(self.mask)
        else:
            raise ValueError(
                f"expected a mask [{L}, {L}] or [{L}] for all sequences, or one for each of {batch}, got "
                f"{list(self.mask.shape)}"
            )
        if len(masks) != batch:
            raise ValueError(f"expected one mask for each of {batch} sequences, got {len(masks)}")
        result: list[Mask] = []
        for L, mask in zip(tokens.lengths, masks, strict=True):
            if mask.dtype != torch.bool or tuple(mask.shape) not in ((L,), (L, L)):
                raise ValueError(
                    f"expected a boolean mask (True: may attend) [{L}, {L}] or [{L}] a sequence, "
                    f"got {mask.dtype} {list(mask.shape)}"
                )
            result.append(mask.expand(L, L))
        return result

    def _check_tokens(self, tokens: Tokens) -> None:
        W = self.weights["value"]
        if tokens.stacked.shape[1] != self.d:
            raise ValueError(
                f"expected tokens of width {self.d}, as the weights have rows, got {tokens.stacked.shape[1]}"
            )
        if self.turns is not None and max(tokens.lengths) > len(self.turns):
            raise ValueError(
                f"expected sequences of at most {len(self.turns)} tokens, as there are turns, got "
                f"{max(tokens.lengths)}"
            )
        if tokens.stacked.dtype != W.dtype or tokens.stacked.device != W.device:
            raise TypeError(
                f"expected tokens of {W.dtype} on {W.device}, as the weights are, got {tokens.stacked.dtype} "
                f"on {tokens.stacked.device}"
            )

    def _hessian(self, tokens: Tokens, loss: LossAt, **options: Any) -> Result:
        from curvlens.exact.attention_hessian import attention_hessian

        self._check_tokens(tokens)
        if self.turns is not None:
            from curvlens.exact.attention_jet import AttentionLayer

            return AttentionLayer(self)._hessian(tokens, loss, **options)
        return attention_hessian(self, tokens, loss, **options)


def rotary(L: int, k: int, base: float = 10000.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The turns `[L, k, k]` of rotary positions: at position i, entries `f` and `f + k/2` turn by `i base^(-2f/k)`.

    Entries that stand side by side instead, as in some models, are these after a permutation of the weights' columns.
    """
    if k % 2:
        raise ValueError(f"expected heads of an even width for rotary positions, got {k}")
    rates = base ** (-2 * torch.arange(k // 2, dtype=torch.float64) / k)
    angles = torch.arange(L, dtype=torch.float64)[:, None] * rates
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat([torch.cat([cos, -sin], dim=2), torch.cat([sin, cos], dim=2)], dim=1).to(dtype)


def _require(W: Tensor | None) -> Tensor:
    assert W is not None
    return W
