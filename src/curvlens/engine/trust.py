"""Whether a model's own autograd functions can be differentiated twice.

PyTorch's operations can, or raise. A `torch.autograd.Function` of the model or of a kernel library may give a wrong
second derivative without a word: a backward marked `once_differentiable`, or made of detached data, reads as a
constant. So a model that has such functions is checked, once, against finite differences of its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from curvlens.batches import Batch
from curvlens.engine.quantity import share
from curvlens.landscape import Landscape, Parameters

# Far above what rounding leaves of a central difference in float32, far below what a missing term costs.
DISAGREEMENT = 0.05

_trusted: weakref.WeakSet[Landscape] = weakref.WeakSet()


def require_second_derivatives(land: Landscape, piece: Batch) -> None:
    """Refuse models whose own autograd functions have wrong second derivatives. Done once for a landscape."""
    if land in _trusted:
        return
    leaves = {name: p.requires_grad_() for name, p in land.parameters().items()}
    value = share(land, leaves, piece)
    own = _own_functions(value)
    if own:
        _compare(land, piece, leaves, value, own)
    _trusted.add(land)


def has_own_functions(value: Tensor) -> bool:
    """Whether autograd functions that are not PyTorch's lead to a tensor."""
    return bool(_own_functions(value))


def _own_functions(value: Tensor) -> list[str]:
    return sorted({type(node).__name__.removesuffix("Backward") for node in _graph(value) if _is_own(node)})


def _compare(land: Landscape, piece: Batch, leaves: Parameters, value: Tensor, own: list[str]) -> None:
    """The product with one random direction beside a central difference of the gradient."""
    parameters = list(leaves.values())
    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        * p.detach().norm().clamp(min=1e-3)
        / p.numel() ** 0.5
        for p in parameters
    ]  # each parameter moves by a like share of its norm

    def gradient(size: float) -> Tensor:
        moved = {
            name: (p.detach() + size * v).requires_grad_()
            for (name, p), v in zip(leaves.items(), directions, strict=True)
        }
        found = torch.autograd.grad(share(land, moved, piece), list(moved.values()), allow_unused=True)
        return _flat(found, parameters)

    first = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    live = [(g, v) for g, v in zip(first, directions, strict=True) if g is not None and g.requires_grad]
    exact: tuple[Tensor | None, ...] = (None,) * len(parameters)
    if live:
        exact = torch.autograd.grad([g for g, _ in live], parameters, [v for _, v in live], allow_unused=True)
    size = torch.finfo(land.dtype).eps ** (1 / 3)
    plus, minus = gradient(size), gradient(-size)
    expected = (plus - minus) / (2 * size)
    rounding = 10 * torch.finfo(land.dtype).eps * (plus.norm() + minus.norm()) / size
    if (_flat(exact, parameters) - expected).norm() > DISAGREEMENT * expected.norm() + rounding:
        raise RuntimeError(
            f"expected a model that can be differentiated twice, got second derivatives that disagree with finite "
            f"differences of the gradient, in a model with its own autograd functions ({', '.join(own)}); "
            "replace them by plain PyTorch for this analysis"
        )


def _flat(tensors, like: list[Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
    parts = (torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True))
    return torch.cat([part.detach().flatten() for part in parts])


def _is_own(node: Node) -> bool:
    """Of the model; attention of `curvlens.kernels`, which long sequences are given, is tested to be right."""
    return isinstance(node, BackwardCFunction) and not node._forward_cls.__module__.startswith("curvlens.")


def _graph(value: Tensor) -> Iterator[Node]:
    """The nodes of the graph that leads to a tensor."""
    waiting = [value.grad_fn] if value.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
