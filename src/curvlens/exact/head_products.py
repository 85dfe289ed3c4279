"""Products of the functional blocks of one head with vectors, `O(L k)` each in memory and `O(L² k)` in work.

With a change `Ṡ` of the scores, `∂L/∂S` changes by `Ḋ_i = E_i Ṡ_i = D ∘ (Ṡ − A·Ṡ) − A (D·Ṡ)`, so that

    QQ z:  Ṡ = s q̇ Kᵀ,  q̈ = s Ḋ K                  q̇_i = R_i zᵀ x_i, and the image is Σ_i x_i (R_iᵀ q̈_i)ᵀ
    QK z:  Ṡ = s q k̇ᵀ,  q̈ = s Ḋ K + s D k̇          k̇_j = R_j zᵀ y_j
    KK z:  Ṡ = s q k̇ᵀ,  k̈ = s Ḋᵀ q                 and the image is Σ_j y_j (R_jᵀ k̈_j)ᵀ
    QV z:  u̇ = γ v̇ᵀ,    q̈ = s (A ∘ (u̇ − A·u̇)) K     v̇_j = zᵀ y_j
    KV z:  the same,     k̈ = s (A ∘ (u̇ − A·u̇))ᵀ q

with `R` what stands between projections and softmax, such as rotary positions. The squared norm of a block is the sum
of the squares of its images of all unit vectors: exact, for small blocks. It is also the expectation of the square of
the image of a vector of random signs, of which the mean over some is an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvlens.exact.head_rows import Rows, Sequence

AT_ONCE = 2**22  # entries of the scores' changes that are held at once

Pushed = tuple[Tensor, "Tensor | None", "Tensor | None"]  # changes of q, k and v

# the blocks whose norms the images give, by the matrix that the vector changes: VQ is the adjoint of QV
IMAGES = {"query": ("QQ",), "key": ("KK", "QK"), "value": ("VQ", "VK", "VV")}


def squared_norms(
    sequences: list[Sequence],
    kv_head: int,
    wanted: set[str],
    samples: int | None,
    seed: int,
    out: Tensor | None = None,
) -> dict[str, Tensor]:
    """Squares of images of the blocks of a key and value head and its query heads.

    `samples=None`: `[heads]`, exact, from all unit vectors. Otherwise `[samples, heads]`, from as many vectors of
    random signs; their mean is unbiased. KK, VK and VV have one head, the others one for each query head of the group.

    The blocks are those of the functional part, or with `out = W_O` `[heads, e, o]` those of `Jᵀ B J`, with `J` the
    Jacobian of the layer's output and `B` the sequences' curvature of the loss there, the identity if they have none.
    """
    found: dict[str, list[Tensor]] = {block: [] for block in wanted}
    first = sequences[0]
    shapes = {
        "query": (first.x.shape[1], first.q.shape[2] if first.turn_q is None else first.turn_q.shape[2]),
        "key": (first.y.shape[1], first.k.shape[2] if first.turn_k is None else first.turn_k.shape[2]),
        "value": (first.y.shape[1], first.v.shape[2]),
    }
    longest = max(s.mask[0].numel() for s in sequences)
    for i, (source, blocks) in enumerate(IMAGES.items()):
        if not wanted.intersection(blocks):
            continue
        generator = torch.Generator().manual_seed(seed * 3 + i)
        for stack in _vectors(shapes[source], samples, max(1, AT_ONCE // longest), generator, first.q):
            for block, squares in _images(sequences, kv_head, source, stack, out).items():
                if block in wanted:
                    found[block].append(squares)
    joined = {block: torch.cat(parts) for block, parts in found.items()}
    return {block: each if samples else each.sum(0) for block, each in joined.items()}


def _vectors(
    shape: tuple[int, int], samples: int | None, at_once: int, generator: torch.Generator, like: Tensor
) -> Iterator[Tensor]:
    count = samples or shape[0] * shape[1]
    for start in range(0, count, at_once):
        here = min(at_once, count - start)
        if samples:
            signs = torch.randint(0, 2, (here, *shape), generator=generator) * 2 - 1
            yield signs.to(like.device, like.dtype)
        else:
            units = torch.zeros(here, shape[0] * shape[1], dtype=like.dtype, device=like.device)
            units[torch.arange(here), torch.arange(start, start + here)] = 1
            yield units.unflatten(1, shape)


def _images(
    sequences: list[Sequence], kv_head: int, source: str, stack: Tensor, out: Tensor | None
) -> dict[str, Tensor]:
    """`‖H_b z‖²` for a stack `[K, inputs, width]`, `[K, heads]`, with `H_b` the sum over all sequences."""
    group = sequences[0].group
    heads = range(kv_head * group, (kv_head + 1) * group)
    queries = [torch.zeros(()) for _ in heads]
    keys = values = torch.zeros(())
    for sequence in sequences:
        if out is None:
            pushed: Iterator[Pushed] = (_push(Rows(sequence, h), source, stack) for h in heads)
        else:
            pushed = _push_outer(
                [Rows(sequence, h) for h in heads], source, stack, out[heads.start : heads.stop]
            )
        for h, (q, k, v) in enumerate(pushed):
            queries[h] = queries[h].to(q) + sequence.x.T @ _turned(q, sequence.turn_q)
            if k is not None:
                keys = keys.to(k) + sequence.y.T @ _turned(k, sequence.turn_k)
            if v is not None:
                values = values.to(v) + sequence.y.T @ v
    found = {
        {"query": "QQ", "key": "QK", "value": "VQ"}[source]: torch.stack(list(map(_squares, queries)), 1)
    }
    if keys.dim():
        found["KK" if source == "key" else "VK"] = _squares(keys)[:, None]
    if values.dim():
        found["VV"] = _squares(values)[:, None]
    return found


def _push(rows: Rows, source: str, stack: Tensor) -> Pushed:
    """`q̈` and `k̈`, `[K, tokens, k]` each; the functional part has no VV."""
    sequence, s = rows.sequence, rows.s
    if source == "value":
        change = _weights(rows, rows.g @ (sequence.y @ stack).mT)
        return s * change @ rows.k, s * change.mT @ rows.q, None
    if source == "query":
        change = _scores(rows, s * _turn(sequence.x @ stack, sequence.turn_q) @ rows.k.T)
        return s * change @ rows.k, None, None
    moved = _turn(sequence.y @ stack, sequence.turn_k)
    change = _scores(rows, s * rows.q @ moved.mT)
    return s * (change @ rows.k + rows.D @ moved), s * change.mT @ rows.q, None


def _push_outer(heads: list[Rows], source: str, stack: Tensor, out: Tensor) -> Iterator[Pushed]:
    """Changes of the outputs, `ȯ = (A ∘ (Ṡ − A·Ṡ)) v + A v̇`, through `W_O B_i W_Oᵀ`, and back to `q`, `k` and `v`."""
    sequence, s = heads[0].sequence, heads[0].s
    moved = sequence.y @ stack if source == "value" else None
    turned = _turn(sequence.y @ stack, sequence.turn_k) if source == "key" else None
    # a query head's own weights change its own output alone; keys and values change that of all that share them
    one_by_one = source == "query"
    changes = []
    for rows, W in zip(heads, out, strict=True):
        if moved is not None:
            change = rows.A @ moved
        else:
            scores = (
                s * rows.q @ turned.mT
                if turned is not None
                else s * _turn(sequence.x @ stack, sequence.turn_q) @ rows.k.T
            )
            change = _weights(rows, scores) @ rows.v
        changes.append(change @ W)
    if one_by_one:
        received = [_through_loss(sequence, change) for change in changes]
    else:
        received = [_through_loss(sequence, torch.stack(changes).sum(0))] * len(heads)
    for rows, W, gradient in zip(heads, out, received, strict=True):
        back = gradient @ W.T
        scores = _weights(rows, back @ rows.v.T)
        k, v = s * scores.mT @ rows.q, rows.A.T @ back
        yield s * scores @ rows.k, None if one_by_one else k, v if source == "value" else None


def _through_loss(sequence: Sequence, moved: Tensor) -> Tensor:
    """`B_i Ḟ_i`, `[K, n, o]`."""
    if sequence.curvature is None:
        return moved
    return (moved.transpose(0, 1) @ sequence.curvature).transpose(0, 1)


def _weights(rows: Rows, change: Tensor) -> Tensor:
    """`F_i Ṡ_i`."""
    return rows.A * (change - (rows.A * change).sum(-1, keepdim=True))


def _scores(rows: Rows, change: Tensor) -> Tensor:
    """`E_i Ṡ_i`."""
    mean, slope = ((part * change).sum(-1, keepdim=True) for part in (rows.A, rows.D))
    return rows.D * (change - mean) - rows.A * slope


def _turn(vectors: Tensor, turn: Tensor | None) -> Tensor:
    return vectors if turn is None else torch.einsum("nac,znc->zna", turn, vectors)


def _turned(vectors: Tensor, turn: Tensor | None) -> Tensor:
    return vectors if turn is None else torch.einsum("nac,zna->znc", turn, vectors)


def _squares(image: Tensor) -> Tensor:
    return image.double().square().sum((-2, -1))
