"""The peers' own estimates of a GPT-2-like model's Hessian: who, products used, and what came out.

A peer that does not end by itself is stopped after `CAP` products, and the line says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from contenders import Logits, _dictionary, _pairs
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl

CAP = 200


class Capped(Exception):
    """The allowance of products is used up."""


def eigenvalues(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    with sdpa_kernel(SDPBackend.MATH):
        yield from _eigenthings(model, ids)
        yield from _pyhessian(model, ids)


def traces(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    """At their defaults where they have some; the error is theirs where they state one."""
    with sdpa_kernel(SDPBackend.MATH):
        yield from _eigenthings_traces(model, ids)
        yield from _pyhessian_trace(model, ids)


def _eigenthings_traces(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    import hessian_eigenthings as he

    operator = he.HessianOperator(model, [_dictionary(ids)], he.hf_lm_loss())
    for method in ("hutchinson", "hutch++"):
        found = he.trace(operator, num_matvecs=CAP, method=method, seed=0)
        yield f"hessian-eigenthings, {method}", CAP, f"{found.estimate:.5g} ± {found.stderr:.2g}"


def _pyhessian_trace(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    """It stops when the mean changes by its tolerance from one probe to the next."""
    module = import_module("pyhessian.hessian")
    torch.manual_seed(0)
    wrapped = Logits(model)
    (pair,) = _pairs(ids)
    kept = module.hessian(wrapped, nn.CrossEntropyLoss(), data=pair, cuda=ids.is_cuda)
    samples = kept.trace()
    wrapped.zero_grad()
    yield "PyHessian, Hutchinson, default tolerance", len(samples), f"{sum(samples) / len(samples):.5g}"


def _eigenthings(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    import hessian_eigenthings as he
    from hessian_eigenthings.algorithms.lanczos import lanczos

    operator = he.HessianOperator(model, [_dictionary(ids)], he.hf_lm_loss())
    for steps in (20, 40, 80):  # 20 is its default for ten pairs; more is up to its user
        found = lanczos(operator, k=10, max_iter=steps, tol=1e-3, seed=0)
        vectors = _to_blocks(model, ids, found.eigenvectors)
        good, worst = _residuals(model, ids, found.eigenvalues, vectors)
        yield (
            f"hessian-eigenthings, max_iter={steps}",
            steps,
            f"{good} of 10 to 1e-3, worst residual {worst:.1e}",
        )


def _pyhessian(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, int, str]]:
    module = import_module("pyhessian.hessian")  # the package gives this name to a class of it

    wrapped = Logits(model)
    (pair,) = _pairs(ids)
    kept = module.hessian(wrapped, nn.CrossEntropyLoss(), data=pair, cuda=ids.is_cuda)
    original, count, starts = module.hessian_vector_product, [0], []

    def counted(*arguments: Any) -> Any:
        if count[0] == CAP:
            raise Capped
        count[0] += 1
        return original(*arguments)

    module.hessian_vector_product = counted
    # one call of `orthnormal` a product, with the vectors found so far
    orthogonal = module.orthnormal
    module.orthnormal = lambda v, found: (starts.append(len(found)), orthogonal(v, found))[1]
    try:
        with suppress(Capped):
            kept.eigenvalues(maxIter=100, tol=1e-3, top_n=10)
            starts.append(10)
    finally:
        module.hessian_vector_product, module.orthnormal = original, orthogonal
        wrapped.zero_grad()
    yield "PyHessian, power iteration", count[0], f"{max(starts)} of 10 found, by change of the value to 1e-3"


def _to_blocks(model: nn.Module, ids: Tensor, vectors: Tensor) -> Tensor:
    """Vectors in the order of the parameters as vectors over the blocks."""
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    parts = vectors.split(sizes, dim=1)
    stacks = {
        name: part.reshape(len(vectors), *p.shape)
        for (name, p), part in zip(parameters.items(), parts, strict=True)
    }
    return cl.Landscape(model, [ids]).blocks.from_parameters(stacks)


def _residuals(model: nn.Module, ids: Tensor, values: Tensor, vectors: Tensor) -> tuple[int, float]:
    H = cl.hessian(cl.Landscape(model, [ids]))
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    residuals = (H.apply(unit) - values[:, None] * unit).norm(dim=1) / values.abs()
    return int((residuals < 1e-3).sum()), residuals.max().item()
