"""Sharpness: the largest eigenvalue, as gradient descent or an optimizer sees it, beside its stability threshold.

Gradient descent at rate η is unstable where `λ_max(H) > 2/η`; with heavy-ball momentum μ, `(2 + 2μ)/η`. A
preconditioned method steps along `P^{-1} g`, so it sees `P^{-1/2} H P^{-1/2}`; for Adam the threshold is
`(2 + 2β1) / ((1 - β1) η)` (Cohen et al. 2022), 38/η at β1 = 0.9. Weight decay is not part of H here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.operator import Operator


class Preconditioned(Operator):
    """`S H S` for a diagonal S, given as a vector: `P^{-1/2} H P^{-1/2}` with `S = P^{-1/2}`."""

    def __init__(self, H: Operator, scale: Tensor):
        super().__init__(H.codomain, H.domain, H.dtype, H.device, H.symmetric)
        self.H, self.scale = H, scale.to(H.device, H.dtype)

    def apply(self, stack: Tensor) -> Tensor:
        return self.scale * self.H.apply(self.scale * stack)

    def _adjoint(self) -> Operator:
        return Preconditioned(self.H.T, self.scale)


@dataclass(frozen=True, repr=False)
class Sharpness:
    """The largest eigenvalue and what it means for the optimizer; `stderr` is the residual, a bound of the error."""

    value: float
    stderr: float
    threshold: float | None  # None where no rule is known
    rule: str
    preconditioner: str
    pairs: Eigenpairs  # the vector lives in the preconditioned coordinates

    @property
    def ratio(self) -> float | None:
        """Sharpness over threshold: unstable above one."""
        return None if self.threshold is None else self.value / self.threshold

    @property
    def converged(self) -> bool:
        return self.pairs.converged

    @property
    def products(self) -> int:
        return self.pairs.products

    def __repr__(self) -> str:
        head = f"sharpness ({self.preconditioner}): {self.value:.5g} ± {self.stderr:.1g}"
        bound = (
            ""
            if self.threshold is None
            else f", {self.ratio:.3g} of the threshold {self.rule} = {self.threshold:.4g}"
        )
        state = "converged" if self.converged else f"not converged: {self.pairs.stopped}"
        return f"{head}{bound} ({self.products} products, {state})"


def sharpness(
    H: Operator,
    preconditioner: torch.optim.Optimizer | None = None,
    tol: float = 1e-3,
    names: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Sharpness:
    """`λ_max(H)`, or with an optimizer `λ_max(P^{-1/2} H P^{-1/2})` with P from the optimizer's own state.

    SGD has P = 1; RMSprop, Adam and AdamW have a diagonal P; others are refused. The optimizer's parameters are matched
    to the blocks by `names`, `{name: parameter}`; by default `H.landscape.model.named_parameters()`. Beside the raw
    sharpness no threshold stands, as it depends on the optimizer. `settings` are those of `eigsh`.
    """
    if preconditioner is None:
        return _sharpness(eigsh(H, 1, "LA", tol, **settings), None, "", "raw")
    scale, threshold, rule = preconditioner_scale(H, preconditioner, names)
    operator = H if scale is None else Preconditioned(H, scale)
    pairs = eigsh(operator, 1, "LA", tol, **settings)
    return _sharpness(pairs, threshold, rule, f"preconditioned by {type(preconditioner).__name__}")


def _sharpness(pairs: Eigenpairs, threshold: float | None, rule: str, preconditioner: str) -> Sharpness:
    value, error = math.nan, math.inf
    if len(pairs):
        value, error = pairs.values[0].item(), pairs.residuals[0].item()
    return Sharpness(value, error, threshold, rule, preconditioner, pairs)


def preconditioner_scale(
    H: Operator, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor] | None = None
) -> tuple[Tensor | None, float, str]:
    """`P^{-1/2}` over the blocks of H (None for P = 1), the stability threshold and its formula.

    Groups with different learning rates: P carries the ratio, and the threshold is that of the largest rate.
    """
    diagonal, rule = _known(optimizer)
    groups = _groups(H, optimizer, names)
    rate = max(float(group["lr"]) for _, group in groups.values())
    if rate <= 0:
        raise ValueError("expected an optimizer with a positive learning rate, got none for these blocks")
    factors = {rule(group) for _, group in groups.values()}
    if len(factors) > 1:
        raise ValueError(
            f"expected the same momentum in all parameter groups, got {sorted(f[1] for f in factors)}; "
            "take the blocks of one group with H.block(...)"
        )
    factor, formula = factors.pop()
    uniform = diagonal is None and all(float(group["lr"]) == rate for _, group in groups.values())
    if uniform:
        return None, factor / rate, formula
    parts = {}
    for name, (parameter, group) in groups.items():
        P = (
            torch.ones_like(parameter)
            if diagonal is None
            else _diagonal(diagonal, optimizer, name, parameter, group)
        )
        parts[name] = (float(group["lr"]) / rate / P.detach().to(torch.float64)).sqrt()
    return H.domain.from_parameters(parts), factor / rate, formula


def stable_curvature(
    H: Operator, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """`D` and `Λ`, flat over the blocks of H, and the rules behind `D`: the optimizer is stable where `H + Λ ≺ D`.

    `D` is the largest curvature that is stable along each entry: the threshold of its own group's rate and momentum,
    times P. `Λ` is weight decay's own curvature: λ where it is added to the gradient; where it is taken off the weights
    (AdamW), `λ P (1 + β1) / (1 - β1)`, as it passes by the momentum. Rates and momenta may differ between groups: the
    characteristic equation of each optimizer here, `H x + c(z) x = 0` with a diagonal c, has roots on the unit circle
    at `z = ±1` alone, and `c(-1) = -D` (plus Λ).
    """
    diagonal, rule = _known(optimizer)
    limits, decays, rules = {}, {}, []
    for name, (parameter, group) in _groups(H, optimizer, names).items():
        factor, formula = rule(group)
        P = (
            torch.ones_like(parameter)
            if diagonal is None
            else _diagonal(diagonal, optimizer, name, parameter, group)
        )
        P = P.detach().double()
        rate, decay = float(group["lr"]), float(group.get("weight_decay", 0))
        limits[name] = factor * P / rate if rate > 0 else torch.full_like(P, math.inf)
        aside = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
        decays[name] = decay * P * factor / 2 if aside else torch.full_like(P, decay)
        rules += [formula] if formula not in rules else []
    blocks = H.domain
    return blocks.from_parameters(limits), blocks.from_parameters(decays), tuple(rules)


def inverse_root(
    blocks: Blocks, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> Tensor | None:
    """`P^{-1/2}`, flat over the blocks; None for an optimizer without a P that is known.

    Parameters that it has not stepped yet have P = 1.
    """
    try:
        diagonal, _ = _known(optimizer)
    except TypeError:
        return None
    if diagonal is None:
        return None
    homes = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = {}
    for name in blocks.parameters:
        p = names[name]
        state = optimizer.state.get(p)
        P = diagonal(state, homes[id(p)]) if state else torch.ones_like(p, dtype=torch.float64)
        parts[name] = P.rsqrt()
    return blocks.from_parameters(parts)


def _groups(
    H: Operator, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor] | None
) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """For every parameter that the blocks lie in: itself, and its group in the optimizer."""
    if names is None:
        landscape = getattr(H, "landscape", None)
        if landscape is None:
            raise ValueError(
                "expected names={name: parameter}, as an operator without a landscape does not know its parameters; "
                "give dict(model.named_parameters())"
            )
        names = dict(landscape.model.named_parameters())
    homes = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name in H.domain.parameters:
        if name not in names or id(names[name]) not in homes:
            raise ValueError(
                f"expected every parameter of the blocks in the optimizer, got none for {name!r}; "
                "take the blocks that it trains with H.block(...)"
            )
        found[name] = names[name], homes[id(names[name])]
    if not found:
        raise ValueError("expected blocks that lie in a model's parameters, got blocks of no model")
    return found


Diagonal = Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]  # state and group of a parameter to P
Rule = Callable[[Mapping[str, Any]], tuple[float, str]]  # a group to the threshold times η, and its formula


def _known(optimizer: torch.optim.Optimizer) -> tuple[Diagonal | None, Rule]:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        return None, _momentum_rule
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return _adam, _adam_rule
    if isinstance(optimizer, torch.optim.RMSprop):
        return _rmsprop, _momentum_rule
    why = " (it makes each matrix of the update orthogonal: its state holds no P)" if kind == "Muon" else ""
    raise TypeError(
        f"expected SGD, RMSprop, Adam or AdamW as a preconditioner, got {kind}{why}; "
        "for the raw sharpness leave it out"
    )


def _diagonal(
    diagonal: Diagonal,
    optimizer: torch.optim.Optimizer,
    name: str,
    parameter: Tensor,
    group: Mapping[str, Any],
) -> Tensor:
    state = optimizer.state.get(parameter)
    if not state:
        raise ValueError(f"expected an optimizer that has taken a step, got no state for {name!r}")
    return diagonal(state, group)


def _adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """`(1 - β1^t) (sqrt(v / (1 - β2^t)) + ε)`, with both corrections of the bias."""
    t = float(state["step"])
    first, second = (float(beta) for beta in group["betas"])
    average = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double()
    return (1 - first**t) * ((average / (1 - second**t)).sqrt() + group["eps"])


def _rmsprop(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    average = state["square_avg"].double()
    if group["centered"]:
        average = (average - state["grad_avg"].double().square()).clamp(min=0)
    return average.sqrt() + group["eps"]


def _adam_rule(group: Mapping[str, Any]) -> tuple[float, str]:
    beta = float(group["betas"][0])
    return (2 + 2 * beta) / (1 - beta), f"(2 + 2β1) / ((1 - β1) η), β1 = {beta:g}"


def _momentum_rule(group: Mapping[str, Any]) -> tuple[float, str]:
    mu = float(group["momentum"])
    if not mu:
        return 2.0, "2 / η"
    if group.get("nesterov"):
        return (2 + 2 * mu) / (1 + 2 * mu), f"(2 + 2μ) / ((1 + 2μ) η), μ = {mu:g}"
    damping = float(group.get("dampening", 0))
    formula = (
        f"(2 + 2μ) / η, μ = {mu:g}" if not damping else f"(2 + 2μ) / ((1 - d) η), μ = {mu:g}, d = {damping:g}"
    )
    return (2 + 2 * mu) / (1 - damping), formula
