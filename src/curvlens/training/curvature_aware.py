"""An optimizer whose rate is scaled, block by block, by the curvature that it meets there.

A block b of the parameters moves by `m_b` times what the wrapped optimizer would move it, with

    m_b = (c̄ / c_b)^power, held between 1/limit and limit,

`c_b` the mean diagonal of the Gauss-Newton matrix over the block, as the optimizer sees it (`P^{-1/2} G P^{-1/2}` where
it has a P), and `c̄` their geometric mean, weighted by the entries. For SGD, Adam and all others whose step is in
proportion to the rate and whose state does not depend on it, that is a rate of its own for every block.

`c_b` comes from one gradient a measurement, at targets that the model draws itself (for a loss that cannot be drawn
from, from one Gauss-Newton product). A running mean over measurements smooths it, a wild one counts at most `limit`
times the mean, and nothing is scaled before the third.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvlens import guards
from curvlens.blocks import Blocks
from curvlens.curvature import gauss_newton
from curvlens.estimate.probes import probes
from curvlens.estimate.result import table
from curvlens.estimate.sharpness import inverse_root
from curvlens.landscape import Landscape

FEWEST = 3  # measurements before anything is scaled
FIRST = 2.0  # steps that the first measurement is taken to cost, before one is known
KEY = "curvature_aware"


class CurvatureAware(Optimizer):
    """Wraps any optimizer whose step is in proportion to its rate: `CurvatureAware(AdamW(...), land)`.

    `land` is the model that is trained, on a held batch about as large as a training batch. Parameter groups are those
    of the wrapped optimizer, so schedulers act on them as ever; weight decay that is taken off the weights is scaled as
    the rate is. Parameters that the landscape's blocks do not cover keep their rate.

    share     of the time between steps that measurements and scaling may take; kept by the clock
    every     measure at every so many steps instead, whatever it costs: then runs repeat bit for bit
    power     1 levels the blocks' curvature in the update, 0 changes nothing
    limit     no block's rate is multiplied or divided by more
    memory    of the running mean, from one measurement to the next

    Memory: a copy of the parameters during a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        land: Landscape,
        *,
        share: float = 0.05,
        every: int | None = None,
        power: float = 0.5,
        limit: float = 4.0,
        memory: float = 0.9,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        _check(optimizer, share, every, power, limit, memory)
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.land, self.share, self.every = land, share, every
        self.power, self.limit, self.memory = power, limit, memory
        self.seed, self.clock = seed, clock
        self.curvature: dict[str, float] = {}  # the running mean of each block, and of how many measurements
        self.measured: dict[str, int] = {}
        self.steps = self.measurements = self.failed = 0
        self.spent = self.trained = self.cost = 0.0  # seconds: on curvature, on training, by one measurement
        self._left: float | None = None  # when the last step ended
        self._scaled: list[Tensor] = []  # parameters, and what their steps are multiplied by
        self._scales: list[Tensor] = []
        self._share_groups()
        self._names()  # that there is something to scale

    # -- a step

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """A step of the wrapped optimizer, each block's part scaled; now and then, a measurement before it."""
        began = self.clock()
        if self._left is not None:
            self.trained += began - self._left
        if self._due():
            self.measure()
            self.spent += self.cost
            began += self.cost  # what else passed was a device's wait for training to catch up
        start = self.clock()
        before = _multiplied(self._scaled, 1.0)  # copies
        ready = self.clock()
        value = self.optimizer.step(closure)
        moved = self.clock()
        if before:
            with torch.no_grad():  # in fused calls, as torch's optimizers do
                torch._foreach_sub_(self._scaled, before)
                torch._foreach_mul_(self._scaled, self._scales)
                torch._foreach_add_(self._scaled, before)
        self._left = self.clock()
        self.spent += (ready - start) + (self._left - moved)
        self.trained += (start - began) + (moved - ready)
        self.steps += 1
        return value

    def _due(self) -> bool:
        if self.every is not None:
            return self.steps % self.every == 0 and self.steps > 0
        if self.steps < 2:
            return False
        expected = self.cost or FIRST * self.trained / self.steps
        return self.spent + expected <= self.share * (self.trained + self.spent)

    # -- the curvature

    def measure(self) -> None:
        """One measurement, and the factors that follow. What is not finite is dropped, and counted in `failed`."""
        self._synchronise()
        began = self.clock()
        self._follow_frozen()
        try:
            with torch.enable_grad():
                found = self._curvatures()
        except FloatingPointError:
            found = {}
        self.failed += not found
        for name, value in found.items():
            self._take_in(name, value)
        self.measurements += 1
        if found:
            self._set_scales()
        self._synchronise()
        self.cost = self.clock() - began

    def _curvatures(self) -> dict[str, float]:
        """The mean diagonal of `P^{-1/2} G P^{-1/2}` over each block that the optimizer trains, measured once."""
        names = self._names()
        blocks = Blocks(b for b in self.land.blocks if b.source is not None and b.source.parameter in names)
        root = inverse_root(blocks, self.optimizer, names)
        S = torch.ones((), dtype=torch.float64) if root is None else root.cpu()
        try:
            diagonal = self._from_drawn(blocks, S)
        except NotImplementedError:  # the loss is no likelihood that could be drawn from
            diagonal = self._from_product(blocks, S)
        found = {name: part.mean().item() for name, part in blocks.split(diagonal).items()}
        return found if all(map(math.isfinite, found.values())) else {}

    def _from_drawn(self, blocks: Blocks, S: Tensor) -> Tensor:
        """`S² (∇ℓ)² n`, ∇ℓ the gradient of the mean loss over n tokens with targets drawn from the model itself.

        Drawn so, the tokens' gradients are independent with mean zero, and `E n ∇ℓ ∇ℓᵀ = G` (Bartlett).
        """
        land, generator = self.land, torch.Generator().manual_seed(self.seed + self.measurements)
        total = torch.zeros(blocks.size, dtype=torch.float64)
        with guards.twice_differentiable(land.model, land.device):
            leaves = {name: p.requires_grad_() for name, p in land.parameters().items()}
            wanted = [leaves[name] for name in blocks.parameters]
            for piece in land.pieces():
                output = land.output(leaves, piece)
                drawn = land.loss.sample(output.detach(), piece.target, generator)
                slope = land.loss.gradient(output.detach(), drawn)
                found = torch.autograd.grad(output, wanted, slope, allow_unused=True, materialize_grads=True)
                total += (
                    blocks.from_parameters(dict(zip(blocks.parameters, found, strict=True))).double().cpu()
                )
        return (S * total).square() / land.weight

    def _from_product(self, blocks: Blocks, S: Tensor) -> Tensor:
        """`v ∘ (S G S v)` for a probe v of random signs: its expectation is the diagonal."""
        G = gauss_newton(self.land).block(blocks, blocks)
        v = probes(blocks, [self.measurements], self.seed, "rademacher", torch.float64)[0]
        return v * S * (G @ (S * v).to(G.device, G.dtype)).double().cpu()

    def _take_in(self, name: str, value: float) -> None:
        """Into the running mean; a wild value counts as `limit` times the mean, or a `limit`th of it."""
        count = self.measured.get(name, 0)
        mean = self.curvature.get(name, 0.0)
        if count and mean > 0:
            value = min(max(value, mean / self.limit), mean * self.limit)
        weight = (1 - self.memory) / (1 - self.memory ** (count + 1))  # so that the first ones count alike
        self.curvature[name] = mean + weight * (value - mean)
        self.measured[name] = count + 1

    @property
    def factors(self) -> dict[str, float]:
        """`m_b` by the name of the block; 1 for blocks that have not been measured often enough."""
        found = dict.fromkeys(self.land.blocks.names, 1.0)
        known = {n: c for n, c in self.curvature.items() if n in found and self.measured[n] >= FEWEST}
        sizes = {name: self.land.blocks[name].size for name, c in known.items() if c > 0}
        if not sizes:
            return found
        centre = sum(size * math.log(known[name]) for name, size in sizes.items()) / sum(sizes.values())
        for name, c in known.items():
            ratio = math.exp(self.power * (centre - math.log(c))) if c > 0 else self.limit
            found[name] = min(max(ratio, 1 / self.limit), self.limit)
        return found

    def factor(self) -> Tensor:
        """The factors as a vector over the landscape's blocks, float64."""
        parts = [
            torch.full((self.land.blocks[n].size,), m, dtype=torch.float64) for n, m in self.factors.items()
        ]
        return torch.cat(parts)

    def _set_scales(self) -> None:
        """The factors by parameter; an entry outside of all blocks has 1."""
        names, factors = self._names(), self.factors
        self._scaled, self._scales = [], []
        if all(m == 1 for m in factors.values()):
            return
        for name, extra in self.land.blocks.to_parameters(self.factor() - 1).items():
            if name in names:
                p = names[name]
                alike = bool((extra == extra.flatten()[0]).all())
                self._scaled.append(p)
                self._scales.append((1 + (extra.flatten()[0] if alike else extra)).to(p.device, p.dtype))

    def _names(self) -> dict[str, Tensor]:
        """The parameters that the landscape and the optimizer share, by name."""
        held = {id(p) for group in self.param_groups for p in group["params"]}
        named: dict[str, Tensor] = {
            n: p for n, p in self.land.model.named_parameters() if id(p) in held and p.requires_grad
        }
        if not named:
            raise ValueError(
                "expected an optimizer of the landscape's model, got one that shares no parameter with it; was the "
                "model copied after one of them was made?"
            )
        return named

    def _follow_frozen(self) -> None:
        """Parameters may be frozen or thawed during training: the landscape is then made anew."""
        trainable = {n for n, p in self.land.model.named_parameters() if p.requires_grad}
        if trainable != set(self.land.blocks.parameters):
            self.land = self.land.renewed()

    def _synchronise(self) -> None:
        if self.land.device.type == "cuda":
            torch.cuda.synchronize(self.land.device)

    # -- as an optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        if "land" in self.__dict__:
            self.optimizer.add_param_group(group)
        else:  # the base class collects the groups that the wrapped optimizer has
            super().add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, and what is known of the curvature."""
        own = {name: getattr(self, name) for name in _KEPT}
        return {
            **self.optimizer.state_dict(),
            KEY: {**own, "curvature": dict(self.curvature), "measured": dict(self.measured)},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From a state of its own, or of the wrapped optimizer alone: then the curvature is measured anew."""
        own = state_dict.get(KEY, {})
        self.optimizer.load_state_dict({name: part for name, part in state_dict.items() if name != KEY})
        self._share_groups()
        for name in _KEPT:
            setattr(self, name, own.get(name, 0))
        self.curvature, self.measured = dict(own.get("curvature", {})), dict(own.get("measured", {}))
        self._left = None
        self._set_scales()

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __repr__(self) -> str:
        whole = self.trained + self.spent
        used = f"{self.spent / whole:.1%} of the time" if whole else "no time yet"
        head = (
            f"CurvatureAware({type(self.optimizer).__name__}): {self.measurements} measurements in {self.steps} steps, "
            f"{used}"
        )
        rows = [["block", "curvature", "factor"]]
        factors = self.factors
        rows += [
            [name, f"{self.curvature[name]:.3g}", f"{factors[name]:.3g}"]
            for name in factors
            if name in self.curvature
        ]
        return head + ("\n" + table(rows) if len(rows) > 1 else "")


def _multiplied(tensors: list[Tensor], factor: float) -> list[Tensor]:
    with torch.no_grad():
        return list(torch._foreach_mul(tensors, factor)) if tensors else []


_KEPT = ("steps", "measurements", "failed", "spent", "trained", "cost")


def _check(
    optimizer: Optimizer, share: float, every: int | None, power: float, limit: float, memory: float
) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, (torch.optim.LBFGS, CurvatureAware)):
        raise TypeError(
            f"expected an optimizer whose step is in proportion to its rate, got {type(optimizer).__name__}; "
            "wrap SGD, RMSprop, Adam, AdamW or the like"
        )
    if not 0 < share < 1:
        raise ValueError(f"expected a share of the time between 0 and 1, got {share}")
    if every is not None and every < 1:
        raise ValueError(f"expected a measurement every so many steps, at least 1, got {every}")
    if not 0 <= power <= 1:
        raise ValueError(f"expected a power from 0 to 1, got {power}")
    if not limit > 1:
        raise ValueError(f"expected a limit above 1, got {limit}")
    if not 0 <= memory < 1:
        raise ValueError(f"expected a memory from 0 to below 1, got {memory}")
