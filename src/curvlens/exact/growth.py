"""Growth laws: how block norms grow with the scale σ of the tokens (paper A, equation 5 and Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_map import Softmax, linear
from curvlens.exact.result import Layer, Sequences, hessian
from curvlens.structured.grid import frobenius

Pair = tuple[str, str]


class GrowthLaw(NamedTuple):
    """The norm of one block against the scale of the tokens.

    `predicted`: the exponents of the terms of equation 5, the residual's own growth aside, None where no law is known;
    `fitted`: the slope of log norm over the whole range; `slopes`: that between neighbouring scales, so that one sees
    where each term rules.
    """

    part: str  # "outer", "functional" or "total"
    row: str
    column: str
    predicted: tuple[int, ...] | None
    fitted: float
    scales: Tensor
    norms: Tensor
    slopes: Tensor


class Growth(list[GrowthLaw]):
    """The laws of every block that is not zero; `print` shows exponents and local slopes."""

    def __str__(self) -> str:
        if not self:
            return "no block but zeros"
        width = max(len(f"{law.row}, {law.column}") for law in self)
        sigma = self[0].scales
        head = f"slopes between σ = {sigma[0]:.3g} and {sigma[-1]:.3g}"
        lines = [f"{'part':10}  {'block':{width}}  predicted  fitted  {head}"]
        for law in self:
            predicted = "-" if law.predicted is None else ", ".join(map(str, law.predicted))
            slopes = "  ".join(f"{slope:6.3f}" for slope in law.slopes)
            block = f"{law.row}, {law.column}"
            lines.append(f"{law.part:10}  {block:{width}}  {predicted:9}  {law.fitted:6.3f}  {slopes}")
        return "\n".join(lines)


def predicted_exponents(layer: Any) -> dict[str, dict[Pair, tuple[int, ...]]]:
    """Exponents of σ in each block's Frobenius norm, for a fixed gradient at the output.

    Softmax: `H_o` 6 for query and key, 4 with value, 2 for value; `H_f` 5, for (query, key) 5 and 3, 3 with value.
    Linear attention: 6 in all of `H_o` (`Σ_XX³`), 3 in the blocks of `H_f` that are not zero (`Ω_XY Σ_XX` less the
    residual's growth).
    """
    known = isinstance(layer, SelfAttention) and not layer.biases and "out" not in layer.weights
    if not known or (not isinstance(layer.activation, Softmax) and layer.activation is not linear):
        return {"outer": {}, "functional": {}}
    softmax = isinstance(layer.activation, Softmax)
    scores = [kind for kind in ("query_key", "query", "key") if kind in layer.weights]
    outer: dict[Pair, tuple[int, ...]] = {("value", "value"): (2 if softmax else 6,)}
    functional: dict[Pair, tuple[int, ...]] = {}
    for i, row in enumerate(scores):
        outer[row, "value"] = (4 if softmax else 6,)
        functional[row, "value"] = (3,)
        for column in scores[i:]:
            outer[row, column] = (6,)
            if softmax:
                functional[row, column] = (5,) if row == column else (5, 3)
            elif row != column:
                functional[row, column] = (3,)
    return {"outer": outer, "functional": functional}


def growth(
    layer: Layer,
    X: Sequences,
    Y: Sequences | None = None,
    *,
    scales: Sequence[float] | Tensor | None = None,
    fixed_gradient: bool = False,
    **loss: Any,
) -> Growth:
    """Predicted and fitted exponents of every block that is not zero, for tokens `σ X` over a range of `σ`.

    A law holds where its own term dominates, so the range is part of the answer; the default is σ from 0.01 to 0.1.
    With `fixed_gradient` the gradient at the output stays what it is at σ = 1, so that the functional part shows its
    own growth and not the residual's. `layer` may be any layer with a closed form, `loss` as `hessian` takes it.
    """
    sigma = torch.logspace(-2, -1, 6, dtype=torch.float64) if scales is None else torch.as_tensor(scales)
    sigma = sigma.to(torch.float64)
    if sigma.dim() != 1 or len(sigma) < 2 or bool((sigma <= 0).any()) or bool((sigma.diff() <= 0).any()):
        raise ValueError(f"expected two or more positive scales in ascending order, got {sigma.tolist()}")
    if fixed_gradient:
        at = hessian(layer, X, Y, **loss).loss
        gradient, curvature = at.gradient, at.hessian
        Y, loss = None, {"g": lambda F, Y: gradient, "B": lambda F, Y: curvature}
    norms: dict[tuple[str, str, str], list[Tensor]] = {}
    for scale in sigma.tolist():
        R = hessian(layer, _scaled(X, scale), Y, **loss)
        for part, H in (("outer", R.outer), ("functional", R.functional), ("total", R.total)):
            names = H.codomain.names
            for i, row in enumerate(names):
                for column in names[i:]:
                    norms.setdefault((part, row, column), []).append(frobenius(H.block(row, column)))
    predicted = predicted_exponents(layer)
    return Growth(
        _law(key, sigma, torch.stack(values).to(torch.float64), predicted)
        for key, values in norms.items()
        if float(torch.stack(values).min()) > 0
    )


def _law(
    key: tuple[str, str, str], sigma: Tensor, norms: Tensor, predicted: dict[str, dict[Pair, tuple[int, ...]]]
) -> GrowthLaw:
    part, row, column = key
    x, y = sigma.log(), norms.log().to(sigma.device)
    centred = x - x.mean()
    fitted = float((centred * y).sum() / centred.square().sum())
    known = predicted.get(part, {}).get((row, column))
    return GrowthLaw(part, row, column, known, fitted, sigma, norms, y.diff() / x.diff())


def _scaled(X: Sequences, scale: float) -> Sequences:
    return X * scale if isinstance(X, Tensor) else [x * scale for x in X]
