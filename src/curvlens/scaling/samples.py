"""Every sample of a landscape by itself: its loss, and the loss's derivatives along given directions.

The mean loss is `L = Σ w_i ℓ_i / Σ w_i`, `ℓ_i` the mean loss of sample i over its `w_i` scored tokens. One pass over
the data in batches serves all samples: with a weight `u_i` on each, `Σ u_i ℓ_i` is differentiated as often as is needed
with respect to the parameters, and last with respect to `u`, which takes the samples apart again. (A forward-mode
derivative of a forward-mode derivative would do the same, but is wrong through `F.layer_norm`.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvlens import guards
from curvlens.batches import Batch
from curvlens.curvature import hessian
from curvlens.estimate.lanczos import eigsh
from curvlens.landscape import Landscape, Parameters
from curvlens.losses import PerToken
from curvlens.progress import Progress

# Above what summing a batch in another order leaves, below what a loss that mixes its samples shows.
DISAGREEMENT = 1e-3


class Samples:
    """The samples of a landscape that have a scored token, in the order of the data."""

    def __init__(self, land: Landscape):
        self.land = land
        land.probe()
        with guards.twice_differentiable(land.model, land.device), torch.no_grad():
            parameters = land.parameters()
            counts = [_counts(land, parameters, piece) for piece in land.pieces()]
        every = torch.cat(counts)
        self._scored = every > 0
        self.weights = every[self._scored]  # [n], float64: scored tokens of each sample

    def __len__(self) -> int:
        return len(self.weights)

    def losses(self, step: Tensor | None = None) -> Tensor:
        """`ℓ_i(θ + step)` of all samples, `[n]` in float64. Cost: a forward pass over the data."""
        with guards.twice_differentiable(self.land.model, self.land.device), torch.no_grad():
            parameters = self.land.parameters()
            if step is not None:
                for name, change in self._named(step).items():
                    parameters[name] = parameters[name] + change
            rows = [_rows(self.land, parameters, piece) for piece in self.land.pieces()]
        sums = torch.cat(rows)
        if step is None:  # far away a loss may well overflow, and says so by itself
            self.land.require_finite(sums, "loss of every sample")
        return self._means(sums)

    def along(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """`∇ℓ_i · v` and `vᵀ ∇²ℓ_i v` of all samples, `[n]` each. Cost: about six gradients over the data."""
        first, second = self.within(direction[:, None])
        return first[:, 0], second[:, 0, 0]

    def within(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """`Uᵀ ∇ℓ_i` `[n, D]` and `Uᵀ ∇²ℓ_i U` `[n, D, D]` for directions `U [P, D]`, exact.

        Cost: a gradient and `D` Hessian products over the data, and `D (D + 3)/2` products with their graphs.
        """
        if basis.dim() != 2 or basis.shape[0] != self.land.blocks.size:
            raise ValueError(f"expected directions [{self.land.blocks.size}, D], got {list(basis.shape)}")
        D = basis.shape[1]
        directions = [self._named(column) for column in basis.T]
        first, second = [], []
        with guards.twice_differentiable(self.land.model, self.land.device):
            for piece in self.land.pieces():
                one, two = _expansion(self.land, piece, directions)
                first.append(one)
                second.append(two)
        means = [self._means(rows) for rows in torch.cat(first, dim=1)]
        curved = [self._means(rows) for rows in torch.cat(second, dim=2).flatten(0, 1)]
        return torch.stack(means, dim=1), torch.stack(curved, dim=1).unflatten(1, (D, D))

    def gradients(self) -> Iterator[Tensor]:
        """`∇ℓ_i`, flat over the blocks, one sample after the other. Cost: a gradient of each sample."""
        with guards.twice_differentiable(self.land.model, self.land.device):
            leaves = {name: p.requires_grad_() for name, p in self.land.parameters().items()}
            weights = iter(self.weights.tolist())
            for scored, piece in zip(self._scored.tolist(), self._singles(), strict=True):
                if scored:
                    value = self.land.loss.value(self.land.output(leaves, piece), piece.target)
                    found = torch.autograd.grad(
                        value, list(leaves.values()), allow_unused=True, materialize_grads=True
                    )
                    flat = self.land.blocks.from_parameters(dict(zip(leaves, found, strict=True)))
                    yield flat / next(weights)

    def norms(self, count: int | None = None, tol: float = 1e-2) -> Tensor:
        """`‖∇²ℓ_i‖₂` of `count` samples evenly spaced over the data (all of them by default), rounded up by `tol`.

        Each is the largest Ritz value of a Lanczos run with its residual added. Cost: 10 to 40 products a sample.
        """
        count = len(self) if count is None else min(count, len(self))
        if count < 1:
            raise ValueError(f"expected at least one sample to take the norm of, got {count}")
        chosen = {round(i * (len(self) - 1) / max(1, count - 1)) for i in range(count)}
        found: list[float] = []
        number = -1
        with Progress("largest curvature of each sample", len(chosen)) as progress:
            for scored, piece in zip(self._scored.tolist(), self._singles(), strict=True):
                number += scored
                if not scored or number not in chosen:
                    continue
                H = hessian(self._alone(piece))
                pairs = eigsh(H, k=1, tol=tol, copies=False, progress=False)
                found.append((pairs.values.abs() + pairs.residuals).max().item())
                progress.update(len(found))
        return torch.tensor(found, dtype=torch.float64)

    def _alone(self, piece: Batch) -> Landscape:
        """The landscape of one sample."""
        inputs = piece.kwargs if piece.kwargs and not piece.args else piece.args
        return Landscape(self.land.model, [(inputs, piece.target)], self.land.loss, dtype=self.land.dtype)

    def _singles(self) -> Iterator[Batch]:
        for piece in self.land.pieces():
            yield from piece.split(1)

    def _named(self, vector: Tensor) -> Parameters:
        return self.land.blocks.to_parameters(vector.to(self.land.device, self.land.dtype))

    def _means(self, sums: Tensor) -> Tensor:
        return sums.detach().cpu().double()[self._scored] / self.weights


def _rows(land: Landscape, parameters: Parameters, piece: Batch) -> Tensor:
    output = land.output(parameters, piece)
    if len(output) != len(piece.target):
        raise ValueError(
            f"expected one output a sample, got {len(output)} for {len(piece.target)} samples; "
            "let the model return [samples, …]"
        )
    return land.loss.by_sample(output, piece.target)


def _counts(land: Landscape, parameters: Parameters, piece: Batch) -> Tensor:
    """The scored tokens of each sample; and the loss must be a sum over samples."""
    output = land.output(parameters, piece)
    rows, whole = _rows(land, parameters, piece), land.loss.value(output, piece.target)
    if (rows.sum() - whole).abs() > DISAGREEMENT * (rows.abs().sum() + 1e-30):
        raise ValueError(
            f"expected a loss that is a sum over samples, got {whole.item():.6g} for a batch whose samples have "
            f"{rows.sum().item():.6g} together; a loss that compares samples has no landscape of its own for each"
        )
    loss, pairs = land.loss, zip(output.split(1), piece.target.split(1), strict=True)
    if isinstance(loss, PerToken):
        counts: list[float] = [loss.count_terms(own, wanted) for own, wanted in pairs]
    else:
        counts = [loss.count(wanted) for _, wanted in pairs]
    return torch.tensor(counts, dtype=torch.float64)


def _expansion(land: Landscape, piece: Batch, directions: list[Parameters]) -> tuple[Tensor, Tensor]:
    """First `[D, n]` and second `[D, D, n]` derivatives of the samples' sums along directions."""
    leaves = {name: p.requires_grad_() for name, p in land.parameters().items()}
    rows = _rows(land, leaves, piece)
    u = torch.ones_like(rows, requires_grad=True)

    def gradient(scalar: Tensor, keep: bool = True) -> Parameters:
        found = torch.autograd.grad(
            scalar, list(leaves.values()), create_graph=keep, allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))

    def apart(scalar: Tensor) -> Tensor:
        """The derivative with respect to `u`: what each sample adds."""
        if not scalar.requires_grad:
            return torch.zeros_like(rows)
        (found,) = torch.autograd.grad(
            scalar, u, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return found.detach()

    slope = gradient((u * rows).sum())
    D = len(directions)
    first, second = rows.new_zeros(D, len(rows)), rows.new_zeros(D, D, len(rows))
    for a, direction in enumerate(directions):
        along = _dot(slope, direction)
        first[a] = apart(along)
        if not along.requires_grad:
            continue
        curved = gradient(along)
        for b in range(a, D):
            second[a, b] = second[b, a] = apart(_dot(curved, directions[b]))
    return first, second


def _dot(a: Parameters, b: Parameters) -> Tensor:
    return torch.stack([(a[name] * part).sum() for name, part in b.items()]).sum()
