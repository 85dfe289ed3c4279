"""Certified bounds of the spectral norm of each block, beside the true norm; for the package's own nets."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from curvlens import nets
from curvlens.batches import Batch
from curvlens.exact.block_bounds import block_bounds
from curvlens.exact.chain import Chain
from curvlens.exact.of_net import embedded, of_net
from curvlens.landscape import Landscape
from curvlens.losses import PerToken
from curvlens.report.data import BoundRow
from curvlens.report.stages.context import Context, Outcome, Skip


def measure(at: Context) -> Outcome:
    """Upper bounds from norms of weights and activations (after Theorems 1 and 6 of the block paper)."""
    land = at.land
    if not isinstance(land.model, nets.GPT):
        raise Skip("defined for the package's own nets, whose layers have closed forms")
    pieces = list(land.pieces())
    if len(pieces) > 1 or len(pieces[0].args) != 1:
        raise Skip("defined for a single batch")
    chain, X, g, B = _as_a_chain(land, land.model, pieces[0])
    found = block_bounds(chain, X, None, true=False, g=g, B=B)
    true = _true_norms(at, found.names)
    rows = []
    for i, a in enumerate(found.names):
        for j, b in enumerate(found.names[i:], start=i):
            rows.append(
                BoundRow(
                    a,
                    b,
                    found.outer[i, j].item(),
                    found.functional[i, j].item(),
                    found.total[i, j].item(),
                    true.get((a, b), float("nan")),
                )
            )
    return Outcome({"bounds": rows}, "exact")


def _as_a_chain(land: Landscape, net: nets.GPT, piece: Batch) -> tuple[Chain, Tensor, Tensor, Tensor]:
    """The net above its embeddings, its input, and the loss's derivatives by the logits of every token."""
    ids = piece.args[0]
    F = land.output(land.parameters(), piece).detach()
    n, classes = F[..., 0].numel(), F.shape[-1]
    g = (land.loss.gradient(F, piece.target) / land.weight).reshape(n, classes)
    if isinstance(land.loss, PerToken):
        raise Skip("defined for losses whose curvature at the logits is known")
    unit = (
        torch.eye(classes, dtype=F.dtype)
        .reshape(classes, *([1] * (F.dim() - 1)), classes)
        .expand(classes, *F.shape)
    )
    B = land.loss.hessian_product(F, piece.target, unit) / land.weight
    B = B.reshape(classes, n, classes).permute(1, 2, 0).contiguous()
    net = deepcopy(net).to(land.dtype)
    return of_net(net), embedded(net, ids), g.reshape(*ids.shape, classes), B


def _true_norms(at: Context, names: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """The spectral norms themselves, where the matrix is there."""
    if not at.dense:
        return {}
    H, blocks = at.matrices["H"], at.land.blocks
    found = {}
    for i, a in enumerate(names):
        for b in names[i:]:
            if a in blocks and b in blocks:
                found[a, b] = torch.linalg.matrix_norm(H.block(a, b).dense().double(), ord=2).item()
    return found
