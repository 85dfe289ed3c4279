"""The contenders of the benchmarks: every way to multiply by a curvature matrix, each called as its documentation says.

A `Line` is a contender on a matrix. Its `prepare` gets a model of Hugging Face and a batch of token ids, and gives a
function from a stack of vectors `[K, P]` in the order of the model's parameters to their products; what that function
does is measured. Vectors come in the layout that a contender takes without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import curvlens as cl
from curvlens.engine import ENGINES

Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Problem:
    name: str
    config: dict[str, int]
    samples: int
    tokens: int

    def build(self) -> tuple[nn.Module, Tensor]:
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **self.config)).eval()
        return model, torch.randint(0, model.config.vocab_size, (self.samples, self.tokens))


GPT2_LIKE = {"vocab_size": 5000, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128}
PROBLEMS = {
    "like": Problem("GPT-2-like: 4 layers of 256, 4 x 128 tokens", GPT2_LIKE, 4, 128),
    "small": Problem("GPT-2 small: 12 layers of 768, 1 x 64 tokens", {}, 1, 64),
}


@dataclass(frozen=True)
class Line:
    matrix: str
    who: str
    prepare: Callable[[nn.Module, Tensor], Run]

    @property
    def key(self) -> str:
        return f"{self.matrix}/{self.who}"


def gradient(model: nn.Module, ids: Tensor) -> Run:
    """The unit: one gradient as training computes it, without vectors."""
    parameters = list(model.parameters())
    return lambda _: torch.autograd.grad(model(ids, labels=ids).loss, parameters)


def lines() -> Iterator[Line]:
    for engine in ENGINES:
        yield Line("Hessian", f"curvlens, {engine}", _ours(cl.hessian, engine))
    yield Line("Hessian", "curvlinops", _curvlinops("HessianLinearOperator"))
    yield Line("Hessian", "hessian-eigenthings", _eigenthings_hessian)
    yield Line("Hessian", "PyHessian", _pyhessian)
    for engine in ENGINES:
        yield Line("Gauss-Newton", f"curvlens, {engine}", _ours(cl.gauss_newton, engine))
    yield Line("Gauss-Newton", "curvlinops", _curvlinops("GGNLinearOperator"))
    yield Line("Gauss-Newton", "hessian-eigenthings", _eigenthings_ggn)


def _ours(matrix: Callable[..., cl.Operator], engine: str) -> Callable[[nn.Module, Tensor], Run]:
    def prepare(model: nn.Module, ids: Tensor) -> Run:
        operator = matrix(cl.Landscape(model, ids, "next-token"), engine=engine)
        return lambda stack: operator @ stack.T

    return prepare


def _curvlinops(kind: str) -> Callable[[nn.Module, Tensor], Run]:
    """Its data are pairs, its loss a module with a reduction; vectors are the columns of a matrix."""

    def prepare(model: nn.Module, ids: Tensor) -> Run:
        import curvlinops

        wrapped = Logits(model)
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        operator = getattr(curvlinops, kind)(
            wrapped, nn.CrossEntropyLoss(), parameters, _pairs(ids), check_deterministic=False
        )
        return lambda stack: operator @ (stack[0] if len(stack) == 1 else stack.T)

    return prepare


def _eigenthings_hessian(model: nn.Module, ids: Tensor) -> Run:
    import hessian_eigenthings as he

    operator = he.HessianOperator(model, [_dictionary(ids)], he.hf_lm_loss())
    return lambda stack: [operator @ v for v in stack]


def _eigenthings_ggn(model: nn.Module, ids: Tensor) -> Run:
    import hessian_eigenthings as he

    operator = he.GGNOperator(model, [_dictionary(ids)], he.hf_lm_forward(), he.hf_lm_loss_of_output())
    return lambda stack: [operator @ v for v in stack]


def _pyhessian(model: nn.Module, ids: Tensor) -> Run:
    """For a single batch it keeps the gradient's graph for all vectors; building that graph belongs to the call."""
    from pyhessian import hessian, hessian_vector_product

    wrapped = Logits(model)
    (pair,) = _pairs(ids)

    def run(stack: Tensor) -> list[Any]:
        wrapped.zero_grad()
        kept = hessian(wrapped, nn.CrossEntropyLoss(), data=pair, cuda=False)
        shapes = [p.shape for p in kept.params]
        images = []
        for v in stack:
            parts = [
                part.view(s) for part, s in zip(v.split([s.numel() for s in shapes]), shapes, strict=True)
            ]
            images.append(hessian_vector_product(kept.gradsH, kept.params, parts))
        wrapped.zero_grad()  # p.grad holds the graph, which holds p
        return images

    return run


class Logits(nn.Module):
    """A language model as a classifier of tokens, `[scored tokens, vocabulary]`: the form for plain losses."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits[:, :-1].flatten(0, 1)


def _pairs(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(ids, ids[:, 1:].flatten())]


def _dictionary(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}
