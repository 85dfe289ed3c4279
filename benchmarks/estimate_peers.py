"""The peers' own estimates of a model's Hessian, each called as its documentation says.

One that does not end by itself is stopped after `CAP` products. curvlinops has the products, and the trace; its
eigenvalues are those of SciPy, and its block norms those of our estimator, on its products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from contenders import Logits, _dictionary, _pairs
from measured import Counted, Row, arpack, checked, worst
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl

CAP = 200


class Capped(Exception):
    """The allowance of products is used up."""


def contenders(part: str, H: cl.Operator) -> Iterator[Iterator[Row]]:
    """`H` is the Hessian of a model of Hugging Face on one batch; it checks what the others find."""
    model, (ids,) = H.landscape.model, H.landscape.batches
    functions = {
        "eigenvalues": (_curvlinops_eigenvalues, _eigenthings, _pyhessian),
        "trace": (_curvlinops_traces, _eigenthings_traces, _pyhessian_trace),
        "norms": (_curvlinops_norms,),
    }
    with sdpa_kernel(SDPBackend.MATH):
        for function in functions[part]:
            yield function(H, model, ids)


def _curvlinops(H: cl.Operator, model: nn.Module, ids: Tensor) -> Any:
    import curvlinops

    wrapped = Logits(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    operator = curvlinops.HessianLinearOperator(
        wrapped, nn.CrossEntropyLoss(), parameters, _pairs(ids), check_deterministic=False
    )
    return operator, Counted(cl.from_curvlinops(operator, H.domain, names))


def _curvlinops_eigenvalues(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    _, theirs = _curvlinops(H, model, ids)
    values, vectors = arpack(theirs)
    yield "curvlinops and SciPy", theirs.count[0], partial(checked, H, values, vectors)


def _curvlinops_traces(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    """They state no error: at a number of products that is given."""
    from curvlinops import hutchinson_trace, hutchpp_trace, xtrace

    operator, _ = _curvlinops(H, model, ids)
    for function in (xtrace, hutchpp_trace, hutchinson_trace):
        torch.manual_seed(0)
        value = float(function(operator, num_matvecs=CAP - CAP % 6))
        name = f"curvlinops, {function.__name__}, {CAP - CAP % 6} products as given"
        yield name, CAP - CAP % 6, partial("{:.5g}, no error stated".format, value)


def _curvlinops_norms(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    _, theirs = _curvlinops(H, model, ids)
    found = cl.block_norms(theirs, samples=4, tol=0.05, max_minutes=2)
    yield "curvlens on the products of curvlinops", theirs.count[0], partial(worst, found)


def _eigenthings_traces(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    """Twice the products until the error that it states is 2 %; only the last are counted."""
    import hessian_eigenthings as he

    operator = he.HessianOperator(model, [_dictionary(ids)], he.hf_lm_loss())
    for method in ("hutchinson", "hutch++"):
        products = 12
        while True:
            found = he.trace(operator, num_matvecs=products, method=method, seed=0)
            if found.stderr <= 0.02 * abs(found.estimate) or products > CAP:
                break
            products *= 2
        text = f"{found.estimate:.5g} ± {found.stderr:.2g}"
        yield f"hessian-eigenthings, {method}", products, partial(str, text)


def _pyhessian_trace(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    """It stops when the mean changes by its tolerance from one probe to the next."""
    module = import_module("pyhessian.hessian")
    torch.manual_seed(0)
    wrapped = Logits(model)
    (pair,) = _pairs(ids)
    kept = module.hessian(wrapped, nn.CrossEntropyLoss(), data=pair, cuda=ids.is_cuda)
    samples = kept.trace()
    wrapped.zero_grad()
    mean = sum(samples) / len(samples)
    yield "PyHessian, its tolerance", len(samples), partial("{:.5g}, no error stated".format, float(mean))


def _eigenthings(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
    import hessian_eigenthings as he
    from hessian_eigenthings.algorithms.lanczos import lanczos

    operator = he.HessianOperator(model, [_dictionary(ids)], he.hf_lm_loss())
    for steps in (20, 40, 80):  # 20 is its default for ten pairs; more is up to its user
        found = lanczos(operator, k=10, max_iter=steps, tol=1e-3, seed=0)
        vectors = _to_blocks(H, model, found.eigenvectors)
        result = partial(checked, H, found.eigenvalues, vectors)
        yield f"hessian-eigenthings, max_iter={steps}", steps, result


def _pyhessian(H: cl.Operator, model: nn.Module, ids: Tensor) -> Iterator[Row]:
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
    text = f"{max(starts)} of 10 found, by change of the value to 1e-3"
    yield "PyHessian, power iteration", count[0], partial(str, text)


def _to_blocks(H: cl.Operator, model: nn.Module, vectors: Tensor) -> Tensor:
    """Vectors in the order of the parameters as vectors over the blocks."""
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    parts = vectors.split(sizes, dim=1)
    stacks = {
        name: part.reshape(len(vectors), *p.shape)
        for (name, p), part in zip(parameters.items(), parts, strict=True)
    }
    return H.domain.from_parameters(stacks)
