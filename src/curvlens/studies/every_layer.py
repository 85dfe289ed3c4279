"""Exact blocks of every layer of a network, the lower ones too, whose tokens later layers mix.

The outer-product part is `H_o = Cᵀ C` with the rows `C = R_iᵀ J_i`, `R_i R_iᵀ = B_i`, one a scored token and output:
gradients of whole sequences, pulled back in closed form. So its norms cost a gradient an output, not a product a
column: `‖H_o(a, b)‖² = ⟨C_a C_aᵀ, C_b C_bᵀ⟩`. The functional part has no such root; it is taken column by column
where the block is small. For large blocks all three are estimates from products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlens.estimate.norms import frobenius
from curvlens.exact.jet import Layer
from curvlens.exact.result import Result, Tokens, hessian, loss_at
from curvlens.studies.top_layer import IGNORED

SMALL = 4096  # entries of a weight whose block is made dense


def outer_rows(
    model: Layer, x: Tensor, targets: Tensor, names: Sequence[str], loss: str = "cross-entropy"
) -> dict[str, Tensor]:
    """`C_a`, `[rows, weights]`, for each block `a`; `H_o(a, b) = C_aᵀ C_b`."""
    batch, length, _ = x.shape
    tokens = Tokens.of(x)
    outputs = model.at(tokens).output
    wanted = targets.reshape(-1) if loss == "cross-entropy" else targets
    at = loss_at(tokens, wanted, loss)(outputs)
    values, vectors = torch.linalg.eigh(at.curvature())
    roots = (vectors * values.clamp(min=0).sqrt()[:, None, :]).view(batch, length, *at.curvature().shape[1:])
    seen = torch.ones(batch, length, dtype=torch.bool, device=x.device)
    if loss == "cross-entropy":
        seen = wanted.view(batch, length) != IGNORED
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for sequence, root, scored in zip(x, roots, seen, strict=True):
        places = scored.nonzero()[:, 0]
        width = root.shape[-1]
        g = x.new_zeros(len(places), width, length, width)
        for k, i in enumerate(places.tolist()):
            g[k, :, i] = root[i].mT
        pulled = model.at(Tokens(sequence, (length,))).pull(g.flatten(0, 1))
        for name in names:
            rows[name].append(pulled[name].flatten(1))
    return {name: torch.cat(parts) for name, parts in rows.items()}


def outer_norm(a: Tensor, b: Tensor) -> float:
    """`‖C_aᵀ C_b‖_F`, by the smaller of the two products."""
    if len(a) > min(a.shape[1], b.shape[1]):
        return float((a.mT @ b).norm())
    return float(((a @ a.mT) * (b @ b.mT)).sum().clamp(min=0).sqrt())


def diagonal_norms(
    model: Layer,
    x: Tensor,
    targets: Tensor,
    names: Sequence[str],
    loss: str = "cross-entropy",
    samples: int = 20,
    seed: int = 0,
) -> dict[str, list[float]]:
    """`[outer, functional, total]` of each diagonal block; exact for weights of up to `SMALL` entries.

    For larger ones they are estimates from `samples` products. Split at the output.
    """
    R: Result = hessian(model, x, targets, loss=loss)
    exact = [name for name in names if R.blocks[name].size <= SMALL]
    rows = outer_rows(model, x, targets, exact, loss) if exact else {}
    made = {}
    for name in names:
        if name in rows:
            C, H_f = rows[name], R.functional.block(name).dense()
            H_o = C.mT @ C
            made[name] = [float(H.norm()) for H in (H_o, H_f, H_o + H_f)]
        else:
            parts = [part.block(name) for part in (R.outer, R.functional, R.total)]
            made[name] = [
                float(frobenius(H, samples, seed=seed, chunk=samples, progress=False)) for H in parts
            ]
    return made
