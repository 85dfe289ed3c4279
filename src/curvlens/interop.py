"""Operators of curvlinops as operators of curvlens, and back. For curvlinops 3.0.1.

curvlinops multiplies lists of tensors, one for each parameter, as the model stores it and in the model's order;
an operator here multiplies flat vectors over blocks, in the papers' orientation. Both adapters convert one into the
other exactly. Later versions of curvlinops speak of dictionaries of parameters: they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.operator import Operator

CURVLINOPS = "3.0.1"

try:
    _found = version("curvlinops-for-pytorch")
    from curvlinops._torch_base import PyTorchLinearOperator
except (ImportError, PackageNotFoundError) as missing:
    raise ImportError(
        f"expected curvlinops {CURVLINOPS}, got none ({missing}); install it: pip install curvlens[curvlinops]"
    ) from missing
if _found != CURVLINOPS:
    raise ImportError(
        f"expected curvlinops {CURVLINOPS}, got {_found}, whose interface differs; "
        "install the former: pip install curvlens[curvlinops]"
    )


def as_curvlinops(operator: Operator) -> PyTorchLinearOperator:
    """The same map for curvlinops, over a list of the parameters that the operator's blocks lie in.

    The list is in the model's order. Where blocks cover a parameter in part, as one head does, rows and columns
    outside of them are zero. Blocks that belong to no model are a tensor each, in their own shape.
    """
    return _AsCurvlinops(operator)


def from_curvlinops(
    operator: PyTorchLinearOperator, blocks: Blocks | None = None, parameters: Iterable[str] | None = None
) -> Operator:
    """A linear operator of curvlinops as an Operator over `blocks`.

    Blocks may be any of a model's, e.g. `land.blocks`; the result has their rows and columns alone. By default each
    tensor of the list is a block. `parameters` names the list's tensors as the model does: it is needed where the
    operator does not hold the model, as one that curvlinops derived from others. Symmetric if curvlinops says so.
    """
    return _FromCurvlinops(operator, blocks, None if parameters is None else tuple(parameters))


class _AsCurvlinops(PyTorchLinearOperator):
    def __init__(self, operator: Operator):
        super().__init__(list(_shapes(operator.domain).values()), list(_shapes(operator.codomain).values()))
        self.operator = operator
        self.SELF_ADJOINT = operator.symmetric

    def _matmat(self, X: list[Tensor]) -> list[Tensor]:
        """From `[*shape, K]` for each parameter to the same: curvlinops has the vectors last."""
        domain, codomain = self.operator.domain, self.operator.codomain
        stacks = {name: part.movedim(-1, 0) for name, part in zip(_shapes(domain), X, strict=True)}
        images = _to_tensors(codomain, self.operator.apply(_from_tensors(domain, stacks)))
        return [images[name].movedim(0, -1) for name in _shapes(codomain)]

    def _adjoint(self) -> PyTorchLinearOperator:
        return _AsCurvlinops(self.operator.T)

    @property
    def device(self) -> torch.device:
        return self.operator.device

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.dtype


class _FromCurvlinops(Operator):
    def __init__(
        self, operator: PyTorchLinearOperator, blocks: Blocks | None, parameters: tuple[str, ...] | None
    ):
        outputs, inputs = [tuple(s) for s in operator._out_shape], [tuple(s) for s in operator._in_shape]
        if inputs == outputs:
            self._inputs = self._outputs = _named(operator, inputs, parameters)
        elif blocks is None and parameters is None:
            self._inputs, self._outputs = _numbered(inputs), _numbered(outputs)
        else:
            raise ValueError(
                "expected an operator with the same rows and columns for blocks or parameters, "
                f"got shape {tuple(operator.shape)}; leave them out, and every tensor is a block"
            )
        if blocks is not None:
            _check_blocks(blocks, self._inputs, known=parameters is not None or _holds_model(operator))
        rows, columns = (blocks or Blocks.of(shapes) for shapes in (self._outputs, self._inputs))
        super().__init__(rows, columns, operator.dtype, operator.device, bool(operator.SELF_ADJOINT))
        self.operator, self._blocks, self._parameters = operator, blocks, parameters

    def apply(self, stack: Tensor) -> Tensor:
        given = _to_tensors(self.domain, stack)
        some = stack.new_zeros(())
        # parameters without a block stand still
        parts = [given.get(n, some.expand(len(stack), *shape)) for n, shape in self._inputs.items()]
        images = self.operator @ [part.movedim(0, -1) for part in parts]
        stacks = {n: image.movedim(-1, 0) for n, image in zip(self._outputs, images, strict=True)}
        return _from_tensors(self.codomain, stacks)

    def _adjoint(self) -> Operator:
        return _FromCurvlinops(self.operator.adjoint(), self._blocks, self._parameters)


def _in_a_model(blocks: Blocks) -> bool:
    return all(block.source is not None for block in blocks)


def _shapes(blocks: Blocks) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the list."""
    return blocks.parameters if _in_a_model(blocks) else {block.name: block.shape for block in blocks}


def _from_tensors(blocks: Blocks, stacks: dict[str, Tensor]) -> Tensor:
    if _in_a_model(blocks):
        return blocks.from_parameters(stacks)
    return torch.cat([stacks[block.name].flatten(1) for block in blocks], dim=1)


def _to_tensors(blocks: Blocks, stack: Tensor) -> dict[str, Tensor]:
    return blocks.to_parameters(stack) if _in_a_model(blocks) else blocks.split(stack)


def _numbered(shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {str(i): shape for i, shape in enumerate(shapes)}


def _holds_model(operator: PyTorchLinearOperator) -> bool:
    return hasattr(operator, "_params") and isinstance(
        getattr(operator, "_model_func", None), torch.nn.Module
    )


def _named(
    operator: Any, shapes: list[tuple[int, ...]], parameters: tuple[str, ...] | None
) -> dict[str, tuple[int, ...]]:
    """The list's tensors by the model's names: as given, as the operator's model has them, else by number."""
    if parameters is None:
        if not _holds_model(operator):
            return _numbered(shapes)
        names = {id(p): name for name, p in operator._model_func.named_parameters()}
        parameters = tuple(names[id(p)] for p in operator._params)
    if len(set(parameters)) != len(shapes):
        raise ValueError(f"expected {len(shapes)} distinct names of parameters, got {len(parameters)}")
    return dict(zip(parameters, shapes, strict=True))


def _check_blocks(blocks: Blocks, found: dict[str, tuple[int, ...]], known: bool) -> None:
    shapes = _shapes(blocks)
    if not known and _in_a_model(blocks):
        raise ValueError(
            "expected the names of the operator's parameters, which it does not tell; give their order, e.g. "
            "parameters=[name for name, _ in model.named_parameters()]"
        )
    for name, shape in shapes.items():
        if found.get(name) != tuple(shape):
            raise ValueError(
                f"expected blocks of the operator's parameters ({', '.join(list(found)[:3])}, …), "
                f"got {name!r} {list(shape)}, which is {list(found[name]) if name in found else 'none of them'}; "
                "give the model's names of the operator's list as parameters="
            )
