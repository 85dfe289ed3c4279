"""What is measured at one point of a training: the curvature of the loss on the held batches, part by part.

Eigenvectors of one measurement start the next (`eigsh`, with its search for what they do not see), and the random
probes are the same ones every time: so a curve over the steps moves when the model does, and not with the probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlens import families
from curvlens.blocks import Blocks
from curvlens.curvature import hessian
from curvlens.estimate import vectors
from curvlens.estimate.lanczos import Eigenpairs, eigsh
from curvlens.estimate.probes import probes_like
from curvlens.estimate.result import jackknife, mean_and_error
from curvlens.estimate.sharpness import Preconditioned, preconditioner_scale
from curvlens.exact.heads import heads
from curvlens.exact.stream import ExtentEstimate, find_steps, stream_propagation
from curvlens.landscape import Landscape, Parameters
from curvlens.operator import Operator, free_memory
from curvlens.report.groups import groups, sums
from curvlens.structured import Diagonal
from curvlens.training.decay import Decay, decay_of
from curvlens.training.record import reason

# part: at every how many-th measurement
PARTS: dict[str, int] = {"eigenvalues": 1, "optimizer": 1, "blocks": 1, "heads": 5, "depth": 5}
MOST_PRODUCTS = 60  # of one eigenvalue search
HEAD_GRADIENTS = 4.0  # what exact norms of heads may cost


def chosen(parts: Mapping[str, int] | Iterable[str]) -> dict[str, int]:
    """The parts that are measured, with at every how many-th measurement."""
    found = dict(parts) if isinstance(parts, Mapping) else dict.fromkeys(parts, 1)
    unknown = set(found) - set(PARTS)
    if unknown:
        raise ValueError(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if any(count < 1 for count in found.values()):
        raise ValueError(f"expected parts at every first, second, … measurement, got {found}")
    return found


def attempt(
    name: str, measure: Callable[[], dict[str, Any]], found: dict[str, Any], failed: dict[str, str]
) -> None:
    """Measure one part into `found`, or say in `failed` why it cannot be; after the point itself, nothing can."""
    if name != "point" and "point" in failed:
        return
    try:
        part = measure()
    except Exception as error:
        failed[name] = reason(error)
        return
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = {**found[key], **value}
        else:
            found[key] = value


class Averaged(Landscape):
    """The landscape at averaged weights: of the same model and data, with the parameters of another module."""

    source: torch.nn.Module

    @classmethod
    def of(cls, land: Landscape, source: torch.nn.Module) -> Averaged:
        found = cls.__new__(cls)
        found.__dict__.update(land.__dict__)
        found.source = source
        missing = [name for name in land.parameters() if name not in dict(source.named_parameters())]
        if missing:
            raise ValueError(
                f"expected averaged weights with the parameters of the model, got none for {missing[0]!r}"
            )
        return found

    def parameters(self) -> Parameters:
        known = dict(self.source.named_parameters())
        return {name: known[name].detach().to(self.device, self.dtype) for name in super().parameters()}


class Gauge:
    """Measures one landscape again and again. `trained` are names of the parameters that the optimizer holds."""

    def __init__(self, land: Landscape, trained: set[str] | None, tol: float, samples: int, seed: int):
        if samples < 1:
            raise ValueError(f"expected at least one sample, got {samples}")
        self.land, self.tol, self.samples, self.seed = land, tol, samples, seed
        self.blocks = _kept(land.blocks, trained)
        whole = len(self.blocks) == len(land.blocks)
        self.H: Operator = hessian(land) if whole else hessian(land).block(self.blocks, self.blocks)
        self.names = dict(land.model.named_parameters())
        self.groups = groups(self.blocks)
        self.members = sums({group.name: group.blocks for group in self.groups}, self.blocks)
        self.ends: Tensor | None = None  # eigenvectors of both ends, [P, 2]
        self.top: Tensor | None = None  # the optimizer's, [P, 1]
        self.products = 0  # with the Hessian, so far

    # -- parts

    def point(self) -> dict[str, Any]:
        """Loss and gradient. Cost: one gradient and a third."""
        loss = self.land.value().item()
        gradient = self.land.gradient()
        if len(self.blocks) != len(self.land.blocks):
            gradient = gradient[self.land.blocks.positions(self.blocks).to(gradient.device)]
        self.gradient = gradient
        weights = self.blocks.from_parameters(self.land.parameters())
        return {
            "loss": loss,
            "gradient": vectors.norm(gradient[None])[0].item(),
            "blocks": {"gradient": self._norms(gradient), "weight": self._norms(weights)},
        }

    def eigenvalues(self) -> dict[str, Any]:
        """Both ends of the spectrum, and where the sharpest direction lies. Cost: some 20 products, once warm."""
        pairs = self._search(self.H, 2 if self.H.domain.size > 1 else 1, "both", self.ends)
        self.ends, self.pairs = pairs.vectors, pairs
        found: dict[str, Any] = {"lambda_max": _pair(pairs, 0)}
        if len(pairs) > 1:
            found["lambda_min"] = _pair(pairs, 1)
        found["blocks"] = {"mass": self._squares(pairs.vectors[:, 0])}
        found["alignment"] = {"top": _cosine2(self.gradient, pairs.vectors[:, 0])}
        return found

    def optimizer(self, optimizer: torch.optim.Optimizer | None, clipped: float) -> dict[str, Any]:
        """`λ_max(P^{-1/2} (H + D) P^{-1/2})` beside the limit of stability, D coupled weight decay.

        `clipped` is the factor by which clipping shortens gradients: it divides the limit. Decoupled decay is added to
        what is compared with the limit, as `Decay` says. Nothing where no rate is above 0, and before the first step of
        an adaptive optimizer, which has no preconditioner yet.
        """
        self.scale: Tensor | None = None
        if optimizer is None or all(float(group["lr"]) == 0 for group in optimizer.param_groups):
            return {}
        adaptive = not isinstance(optimizer, torch.optim.SGD)
        if adaptive and not any(optimizer.state.get(p) for p in self.names.values()):
            return {}
        scale, limit, rule = preconditioner_scale(self.H, optimizer, self.names)
        decay = decay_of(optimizer, self.blocks, self.names)
        operator = self.H
        if decay.coupled.any():
            operator = operator + Diagonal(decay.coupled.to(self.H.device, self.H.dtype), self.H.domain)
        same = scale is None and operator is self.H and self.ends is not None
        self.scale = scale
        if scale is not None:
            operator = Preconditioned(operator, scale)
        pairs = self.pairs if same else self._search(operator, 1, "LA", self.top)
        self.top = pairs.vectors[:, :1]
        found = _pair(pairs, 0)
        limit = limit / clipped
        seen = found["value"] + decay.decoupled
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        found |= {
            "threshold": limit,
            "rule": rule + (f", gradients clipped to {clipped:.3g}" if clipped < 1 else ""),
            "ratio": seen / limit,
            "largest_rate": rate * limit / seen if seen > 0 else None,
        }
        return {
            "preconditioned": found,
            "decay": decay.to_dict(),
            "blocks": {"optimizer_mass": self._squares(self.top[:, 0])},
        }

    def by_blocks(self) -> dict[str, Any]:
        """Traces and norms of the rows of each group, as they are and as the optimizer sees them; `gᵀHg / gᵀg`.

        For signs v, `E v_bᵀ(Hv)_b = tr H_bb` and `E ‖(Hv)_b‖² = ‖H_b·‖_F²`. Cost: `samples` products, as many more with
        a preconditioner, and one along the gradient, of one graph.
        """
        signs = probes_like(self.H, range(self.samples), self.seed, "rademacher")
        stacks = [signs, self.gradient[None]]
        scale = getattr(self, "scale", None)
        if scale is not None:
            scale = scale.to(self.H.device, self.H.dtype)
            stacks.append(scale * signs)
        images = self.H.apply(torch.cat(stacks))
        self.products += len(images)
        plain, along = images[: self.samples], images[self.samples]
        found = self._spread("trace", vectors.block_dots(signs, plain, self.blocks))
        found |= self._roots("row_norm", plain)
        if scale is not None:
            found |= self._roots("optimizer_row_norm", scale * images[self.samples + 1 :])
        square = vectors.dot(self.gradient[None], self.gradient[None])[0].item()
        rayleigh = vectors.dot(self.gradient[None], along[None])[0].item() / square if square else math.nan
        return {"blocks": found, "alignment": {"gradient_curvature": rayleigh}}

    def by_heads(self) -> dict[str, Any]:
        """The exact functional curvature of every attention head, from one gradient."""
        found = heads(
            self.land, budget=HEAD_GRADIENTS, samples=max(2, self.samples), seed=self.seed
        ).to_dict()
        kept = ("layers", "norms", "stderr", "exact", "traces", "omitted")
        return {"heads": {name: _short(found[name]) for name in kept}}

    def by_depth(self) -> dict[str, Any]:
        """What each sublayer passes down of the curvature above it, and what it creates."""
        samples = max(2, self.samples)
        found = stream_propagation(self.land, samples=samples, eigenvalues=False, seed=self.seed)
        self.products += 2 * samples * len(found.sublayers)
        parts = {
            name: _extents([getattr(step, name) for step in found.sublayers])
            for name in ("passed", "created", "total")
        }
        return {"depth": {"names": [step.name for step in found.sublayers], **parts}}

    def averaged(self, source: torch.nn.Module) -> dict[str, Any]:
        """Loss and sharpness at averaged weights."""
        land = Averaged.of(self.land, source)
        H = (
            hessian(land)
            if len(self.blocks) == len(land.blocks)
            else hessian(land).block(self.blocks, self.blocks)
        )
        pairs = self._search(H, 1, "LA", getattr(self, "averaged_top", None))
        self.averaged_top = pairs.vectors
        return {"averaged": {"loss": land.value().item(), "lambda_max": _pair(pairs, 0)}}

    def unsupported(self) -> dict[str, str]:
        """Parts that this model has no answer to, and why."""
        found = {}
        if not families.attention_sites(self.land.model):
            found["heads"] = "no attention of a known family; describe it with families.register"
        try:
            find_steps(self.land.model)
        except ValueError as reason:
            found["depth"] = str(reason)
        return found

    # -- how

    def _search(self, H: Operator, k: int, which: str, start: Tensor | None) -> Eigenpairs:
        # 40 vectors where there is room, and down to 10 where they would take more than a fourth of what is free
        room = int(free_memory(H.device) / 4 / (H.domain.size * H.dtype.itemsize))
        basis = min(H.domain.size, max(10, min(40, room)))
        found = eigsh(
            H, k, which, self.tol, start, self.seed, basis=basis, progress=False, max_products=MOST_PRODUCTS
        )
        self.products += found.products
        return found

    def _squares(self, vector: Tensor) -> list[float]:
        parts = vectors.block_dots(vector[None], vector[None], self.blocks)[0]
        return _short((self.members @ parts).tolist())

    def _norms(self, vector: Tensor) -> list[float]:
        parts = vectors.block_dots(vector[None], vector[None], self.blocks)[0]
        return _short((self.members @ parts).sqrt().tolist())

    def _spread(self, name: str, values: Tensor) -> dict[str, Any]:
        value, error = mean_and_error(values @ self.members.T)
        return {name: _short(value.tolist()), f"{name}_error": _short(error.tolist())}

    def _roots(self, name: str, images: Tensor) -> dict[str, Any]:
        squares = vectors.block_dots(images, images, self.blocks) @ self.members.T
        value, error = jackknife(squares, lambda mean: mean.clamp(min=0).sqrt())
        return {name: _short(value.clamp(min=0).tolist()), f"{name}_error": _short(error.tolist())}


def _kept(blocks: Blocks, trained: set[str] | None) -> Blocks:
    if trained is None:
        return blocks
    kept = [block for block in blocks if block.source and block.source.parameter in trained]
    if not kept:
        raise ValueError("expected an optimizer that holds parameters of the model, got none of them in it")
    return blocks if len(kept) == len(blocks) else Blocks(kept)


def _pair(pairs: Eigenpairs, index: int) -> dict[str, Any]:
    return {
        "value": pairs.values[index].item(),
        "error": pairs.residuals[index].item(),
        "converged": pairs.converged,
        "products": pairs.products,
    }


def _cosine2(a: Tensor, b: Tensor) -> float:
    inner = vectors.gram(a[None], b[None].to(a.dtype))[0, 0].item()
    length = vectors.norm(a[None])[0].item() * vectors.norm(b[None])[0].item()
    return (inner / length) ** 2 if length else math.nan


def _extents(extents: list[ExtentEstimate]) -> dict[str, list[float]]:
    return {
        "trace": _short([e.trace.value for e in extents]),
        "trace_error": _short([e.trace.stderr for e in extents]),
        "frobenius": _short([e.frobenius.value for e in extents]),
        "frobenius_error": _short([e.frobenius.stderr for e in extents]),
    }


def _short(value: Any) -> Any:
    """Seven digits: long lists make the file."""
    if isinstance(value, Mapping):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


__all__ = ["PARTS", "Decay", "Gauge"]
