"""The other way to every number: layers by their definitions, differentiated by autodiff, block by block.

Layers here are compositions of elementary operations, and second derivatives are forward over reverse,
`jacfwd(grad)`: two derivatives in one mode, `hessian` or `jacrev(jacrev)`, are silently wrong through torch's own
`layer_norm` with a weight. Nothing here shares code with the closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Weights: TypeAlias = dict[str, Tensor]
Blocks: TypeAlias = dict[tuple[str, str], Tensor]
Function: TypeAlias = Callable[[Weights], Tensor]
Loss: TypeAlias = Callable[[Tensor], Tensor]


# -- derivatives


def second(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`∂²f/∂x²` of a number by a flat vector, or `∂²f` of a flat vector, `[outputs, x, x]`."""
    if f(x).dim() == 0:
        return torch.func.jacfwd(torch.func.grad(f))(x)
    return torch.func.jacfwd(torch.func.jacrev(f))(x)


def first(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`∂ vec f/∂ vec x`, with rows stacked."""
    return torch.func.jacrev(lambda v: f(v.view_as(x)).flatten())(x.flatten())


def total(f: Function, at: Weights, loss: Loss) -> Blocks:
    """The blocks of the Hessian of `loss(f(weights))`."""
    return _blocks(second(lambda v: loss(f(_named(v, at))), _flat(at)), at)


def outer(f: Function, at: Weights, loss: Loss) -> Blocks:
    """Those of its outer-product part, `Jᵀ (∂²ℓ/∂F²) J`."""
    F = f(at)
    B = second(lambda z: loss(z.view_as(F)), F.flatten())
    J = torch.func.jacrev(lambda v: f(_named(v, at)).flatten())(_flat(at))
    return _blocks(J.T @ B @ J, at)


def functional(f: Function, at: Weights, loss: Loss) -> Blocks:
    """Those of its functional part, `Σ_m g_m ∂²F_m`, with `g = ∂ℓ/∂F` held: no difference of two Hessians."""
    g = torch.func.grad(loss)(f(at))
    return curvature(f, at, g)


def curvature(f: Function, at: Weights, g: Tensor) -> Blocks:
    """`Σ_m g_m ∂²f_m` for given `g`."""
    return _blocks(second(lambda v: (g * f(_named(v, at))).sum(), _flat(at)), at)


def jacobian(f: Function, at: Weights) -> dict[str, Tensor]:
    """`∂ vec f/∂ vec W` of every weight."""
    J = torch.func.jacrev(lambda v: f(_named(v, at)).flatten())(_flat(at))
    return dict(zip(at, J.split([w.numel() for w in at.values()], 1), strict=True))


def matrix(blocks: Blocks, names: list[str]) -> Tensor:
    """The blocks of these names, put together."""
    return torch.cat([torch.cat([blocks[row, column] for column in names], 1) for row in names])


def _flat(at: Weights) -> Tensor:
    return torch.cat([w.flatten() for w in at.values()])


def _named(v: Tensor, at: Weights) -> Weights:
    parts = v.split([w.numel() for w in at.values()])
    return {name: part.view_as(w) for (name, w), part in zip(at.items(), parts, strict=True)}


def _blocks(H: Tensor, at: Weights) -> Blocks:
    sizes = [w.numel() for w in at.values()]
    return {
        (row, column): block
        for row, rows in zip(at, H.split(sizes), strict=True)
        for column, block in zip(at, rows.split(sizes, 1), strict=True)
    }


# -- losses


def mse(F: Tensor, Y: Tensor) -> Tensor:
    """`‖F − Y‖² / (L d_V)`."""
    return (F - Y).square().sum() / Y.numel()


def cross_entropy(F: Tensor, classes: Tensor) -> Tensor:
    logs = F - F.logsumexp(-1, keepdim=True)
    return -logs.gather(-1, classes[..., None]).mean()


# -- layers


def scores(W: Weights, X: Tensor) -> Tensor:
    """`T = X W_Q W_Kᵀ Xᵀ / √d_K`."""
    return X @ W["query"] @ W["key"].T @ X.T / math.sqrt(W["query"].shape[1])


def attention(W: Weights, X: Tensor) -> Tensor:
    """`softmax(T) X W_V`, equation 1 of paper A."""
    return softmax(scores(W, X)) @ X @ W["value"]


def softmax(T: Tensor) -> Tensor:
    e = (T - T.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def heads(W: Weights, X: Tensor, count: int, prefix: str = "") -> Tensor:
    """Concatenated heads and an output matrix, weights side by side as models store them."""
    q, k, v = ((X @ W[f"{prefix}{name}"]).chunk(count, -1) for name in ("query", "key", "value"))
    parts = [softmax(a @ b.T / math.sqrt(a.shape[1])) @ c for a, b, c in zip(q, k, v, strict=True)]
    return torch.cat(parts, -1) @ W[f"{prefix}out"]


def relu(h: Tensor) -> Tensor:
    return h.clamp(min=0)


def gelu(h: Tensor) -> Tensor:
    return h * (1 + torch.erf(h / math.sqrt(2))) / 2


def silu(h: Tensor) -> Tensor:
    return h * torch.sigmoid(h)


ACTIVATIONS = {"relu": relu, "gelu": gelu, "silu": silu}


def feed_forward(W: Weights, X: Tensor, activation: str, prefix: str = "") -> Tensor:
    """`σ(X W_1) W_2`, or gated."""
    sigma, up = ACTIVATIONS[activation], X @ W[f"{prefix}up"]
    hidden = sigma(X @ W[f"{prefix}gate"]) * up if f"{prefix}gate" in W else sigma(up)
    return hidden @ W[f"{prefix}down"]


def norm(X: Tensor, weight: Tensor | float, bias: Tensor | float, eps: float, centred: bool = True) -> Tensor:
    """LayerNorm, or RMSNorm if not centred."""
    m = X - X.mean(-1, keepdim=True) if centred else X
    return weight * m / (m.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def steps(
    W: Weights, placement: str, count: int, activation: str, eps: float
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The sublayers of a Transformer block, one after the other: norms "pre", "post" or "none"."""

    def normed(x: Tensor, name: str) -> Tensor:
        return norm(x, W[name], W[f"{name}.bias"], eps)

    def attn(x: Tensor) -> Tensor:
        return x + heads(W, normed(x, "norm1") if placement == "pre" else x, count, "attn.")

    def mlp(x: Tensor) -> Tensor:
        return x + feed_forward(W, normed(x, "norm2") if placement == "pre" else x, activation, "mlp.")

    if placement != "post":
        return {"attn": attn, "mlp": mlp}
    return {
        "attn": attn,
        "norm1": lambda x: normed(x, "norm1"),
        "mlp": mlp,
        "norm2": lambda x: normed(x, "norm2"),
    }


def block(W: Weights, X: Tensor, placement: str, count: int, activation: str, eps: float) -> Tensor:
    """A Transformer block."""
    for step in steps(W, placement, count, activation, eps).values():
        X = step(X)
    return X
