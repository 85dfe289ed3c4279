"""Every attention head of a real model from one gradient: the exact norms and traces of its functional blocks.

The split is at the output of the head's own attention layer `F`: `H_f = Σ_m g_m ∂²F_m/∂W²` with `g = ∂L/∂F` from one
ordinary backward pass (Theorem 3.2 of Ormaniec, Dangel, Singh, 2025, with the key blocks that it leaves out, for any
loss and depth). For the parameters of one layer it is the functional part of
`curvlens.functional(land, at=<path of the layer's output projection>)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from curvlens import families
from curvlens.batches import Batch
from curvlens.engine.chunks import saved_bytes
from curvlens.exact.head_capture import Unsupported, capture
from curvlens.exact.head_grams import BLOCKS, KEY_BLOCKS, QUERY_BLOCKS, Gram, Shared, inner, traces
from curvlens.exact.head_loss import token_curvature
from curvlens.exact.head_products import squared_norms
from curvlens.exact.head_rows import Rows, Sequence, packed
from curvlens.exact.head_turned import turned_inner, turned_traces
from curvlens.families import AttentionSite
from curvlens.landscape import Landscape
from curvlens.operator import free_memory


@dataclass(frozen=True)
class Heads:
    """The functional curvature of every attention head.

    `norms[block]`, `stderr[block]` and `traces[block]` are `[layers, heads]` for QQ, QK and VQ, one number for each
    query head: VQ is the block between the values that the head reads and its query. For KK and VK they are
    `[layers, kv_heads]`: the block of a key head sums over the query heads that share it, cross terms included. VV is
    zero, and so is every block between different query heads. NaN stands where a layer has fewer heads than
    another, and for the trace of a block that is not square.
    """

    layers: tuple[str, ...]
    norms: dict[str, Tensor]  # Frobenius norms
    stderr: dict[str, Tensor]  # standard errors of the norms; 0 where exact
    traces: dict[str, Tensor]  # exact
    exact: dict[str, Tensor]  # [layers], whether a norm is exact or an estimate
    entropy: Tensor  # [layers, heads], of a query's attention, in nats
    moments: dict[str, Tensor]  # [layers, heads]: "first" ‖M1 − mean‖, "second" tr M2, "third" |tr M3[w]|
    sequences: int
    samples: int  # vectors behind each estimate
    omitted: dict[str, str] = field(default_factory=dict)  # layers that have no closed form here, and why

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON; None for NaN."""
        tables = ("norms", "stderr", "traces", "exact", "moments")
        return {
            "layers": list(self.layers),
            **{name: {key: _plain(t) for key, t in getattr(self, name).items()} for name in tables},
            "entropy": _plain(self.entropy),
            "sequences": self.sequences,
            "samples": self.samples,
            "omitted": dict(self.omitted),
        }

    def __str__(self) -> str:
        lines = [
            f"Functional curvature of attention heads, {self.sequences} sequence{'s' if self.sequences != 1 else ''}; "
            f"Frobenius norms, ± where estimated ({self.samples} samples); exact traces",
            _line("layer", "head", [*(f"‖{b}‖" for b in QUERY_BLOCKS), "tr QQ", "entropy"]),
        ]
        for i, layer in enumerate(self.layers):
            for h in range(self.entropy.shape[1]):
                if not self.entropy[i, h].isnan():
                    cells = [self._cell(block, i, h) for block in QUERY_BLOCKS]
                    cells += [f"{self.traces['QQ'][i, h]:.3g}", f"{self.entropy[i, h]:.2f}"]
                    lines.append(_line(layer, str(h), cells))
        lines.append(_line("layer", "key head", [*(f"‖{b}‖" for b in KEY_BLOCKS), "tr KK"]))
        for i, layer in enumerate(self.layers):
            for g in range(self.norms["KK"].shape[1]):
                if not self.norms["KK"][i, g].isnan():
                    cells = [self._cell(block, i, g) for block in KEY_BLOCKS]
                    lines.append(_line(layer, str(g), [*cells, f"{self.traces['KK'][i, g]:.3g}"]))
        return "\n".join([*lines, *(f"left out: {name}: {why}" for name, why in self.omitted.items())])

    def _cell(self, block: str, layer: int, head: int) -> str:
        value = f"{self.norms[block][layer, head]:.3g}"
        return value if self.exact[block][layer] else f"{value} ± {self.stderr[block][layer, head]:.1g}"


def heads(
    land: Landscape,
    *,
    budget: float = 50.0,
    samples: int = 16,
    seed: int = 0,
    outer: float | str | None = None,
) -> Heads:
    """Norms and traces of the functional blocks QQ, KK, QK, VQ, VK of every attention head.

    Traces are exact. Norms are exact where their arithmetic costs at most `budget` gradients of the landscape, all
    layers together: a norm over many sequences has cross terms between every two of them. Beyond that the square of a
    norm is an unbiased estimate from `samples` products with random signs, and the norm carries its standard error.
    With rotary positions QQ is as cheap; the other norms cost about as many times more as a key has entries, and QK,
    one product a column of the block: they are exact for short sequences or small heads only.

    `outer = b` adds norms of the outer-product blocks `Jᵀ B J` under a loss curvature `B_i = b I` at the layer's
    output, the same for all tokens that the loss depends on, as "outer QQ" and so on, "outer VV" too; `J` is the exact
    Jacobian of the layer. The curvature of the whole network's loss is not of this form, nor local to a token below the
    last attention, so this measures the layer and not the loss. `outer = "loss"` adds those under the loss's own
    curvature `B_i = ∂²L/∂F_i²`, where it is local to a token, as at the top attention of a model: then they are the
    blocks of `curvlens.gauss_newton(land, at=...)` at the layer's output. Elsewhere they are NaN and `Heads.omitted`
    says why; it takes one product with what follows the layer a column of `B_i`, and the room for all `B_i`. Both are
    exact for small blocks only, by a product a column.

    Softmax attention with any mask, grouped heads, biases, cross-attention, rotary positions; not with norms of
    queries and keys, see `Heads.omitted`. Means of entropy and moments are over the queries that the loss depends on.
    Cost: one gradient, and for one sequence of L tokens about `6 L³` multiplications a head.
    """
    if not isinstance(land, Landscape):
        raise TypeError(
            f"expected a Landscape, got {type(land).__name__}; give cl.Landscape(model, batches, loss=...)"
        )
    sites = families.attention_sites(land.model)
    if not sites:
        raise ValueError(
            f"expected a model with attention of a known family, found none in {type(land.model).__name__}; "
            "describe it with families.register"
        )
    if samples < 2:
        raise ValueError(f"expected at least 2 samples, for a standard error, got {samples}")
    if isinstance(outer, str) and outer != "loss":
        raise ValueError(f'expected outer as a number, the curvature of the loss, or "loss", got {outer!r}')
    seen: dict[str, _Layer] = {}
    omitted: dict[str, str] = {}
    without: dict[str, str] = {}  # layers whose outer part has no closed form here, and why
    count = 0
    for group in _groups(land, sites):
        found = _capture(land, group, omitted, without if outer == "loss" else None)
        allowed = budget * len(group) / len(sites) * _gradient_flops(land, found)
        plans = _plan(found, allowed)
        for site in group:
            if site.name in found:
                count = max(count, len(found[site.name]))
                layer = _measure(site, found[site.name], plans[site.name], samples, seed)
                if outer is not None:
                    # in place of b times the identity, sequences bring the loss's own curvature
                    b = math.nan if site.name in without else 1.0 if isinstance(outer, str) else outer
                    share = allowed / len(found)
                    _measure_outer(land, site, found[site.name], layer, b, share, samples, seed)
                seen[site.name] = layer
    chosen = [site for site in sites if site.name in seen]
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in omitted.items())
        raise ValueError(f"expected attention with a closed form, got none: {reasons}")
    omitted |= {f"outer blocks of {name}": why for name, why in without.items() if name in seen}
    return _assemble(chosen, [seen[site.name] for site in chosen], count, samples, omitted)


# -- data


def _groups(land: Landscape, sites: list[AttentionSite]) -> Iterator[list[AttentionSite]]:
    """As many layers at a time as what they see of all sequences fits in a quarter of the free memory."""
    pieces = sum(1 for _ in land.pieces())
    if pieces == 1:  # what a forward pass keeps fits anyway
        yield sites
        return
    each = pieces * saved_bytes(land, next(iter(land.pieces()))) // len(sites)
    step = max(1, free_memory(land.device) // 4 // max(each, 1))
    for start in range(0, len(sites), step):
        yield sites[start : start + step]


def _capture(
    land: Landscape, sites: list[AttentionSite], omitted: dict[str, str], without: dict[str, str] | None
) -> dict[str, list[Sequence]]:
    """The sequences of each layer; unless `without` is None, with the loss's curvature, or there the reason why not."""
    found: dict[str, list[Sequence]] = {site.name: [] for site in sites}
    for piece in land.pieces():
        curvatures = {} if without is None else _curvatures(land, piece, sites, without)
        for name, sequences in capture(land, piece, sites, curvatures).items():
            if isinstance(sequences, Unsupported):
                omitted[name] = str(sequences)
            elif name in found:
                found[name].extend(sequences)
    return {name: sequences for name, sequences in found.items() if name not in omitted}


def _curvatures(
    land: Landscape, piece: Batch, sites: list[AttentionSite], without: dict[str, str]
) -> dict[str, Tensor]:
    """The loss's curvature at the output of each layer where it is local to a token; `without` gets the others."""
    found = {}
    for site in sites:
        if site.name not in without:
            try:
                found[site.name] = token_curvature(land, piece, site)
            except Unsupported as reason:
                without[site.name] = str(reason)
    return found


# -- what is exact


def _gradient_flops(land: Landscape, found: dict[str, list[Sequence]]) -> float:
    tokens = max((sum(len(s.x) for s in sequences) for sequences in found.values()), default=0)
    return 6.0 * land.blocks.size * tokens


def _plan(found: dict[str, list[Sequence]], allowed: float) -> dict[str, set[str]]:
    """The blocks of each layer whose norms are exact: the cheapest kinds first, as long as they are affordable."""
    costs = {
        (name, kind): _cost(sequences, kind)
        for name, sequences in found.items()
        for kind in ((("QQ",), ("VQ",), ("KK", "VK"), ("QK",)) if _is_turned(sequences) else (BLOCKS,))
    }
    plans: dict[str, set[str]] = {name: set() for name in found}
    for kind in dict.fromkeys(kind for _, kind in sorted(costs, key=lambda key: costs[key])):
        cost = sum(c for (_, k), c in costs.items() if k == kind)
        if cost <= allowed:
            allowed -= cost
            for name, k in costs:
                if k == kind:
                    plans[name].update(kind)
    return plans


def _cost(sequences: list[Sequence], kind: tuple[str, ...], by_gram: bool = True) -> float:
    """Floating point operations of the exact norms, all heads of a layer."""
    if not sequences:
        return 0.0
    first = sequences[0]
    heads, width, rows = len(first.q), first.q.shape[2], sum(len(s.x) for s in sequences)
    keys = sum(len(s.y) for s in sequences)
    if kind == BLOCKS:
        # products of L × L matrices, for every pair of sequences and of heads of a group
        return 12.0 * heads * first.group * rows * keys * max(rows, keys) / len(sequences)
    if kind == ("QQ",) and by_gram:
        return 4.0 * heads * rows * max(rows, keys) * width**2
    if by_gram and kind != ("QK",):
        return (
            (4.0 if kind == ("VQ",) else 16.0 * first.group) * heads * width * rows * keys * max(rows, keys)
        )
    inputs = first.x.shape[1] if "QQ" in kind else first.y.shape[1]
    columns = inputs * (first.v.shape[2] if kind[0].startswith("V") else width)
    cost = 12.0 * heads * columns * width * sum(float(s.mask[0].numel()) for s in sequences)
    if not by_gram:  # the outer part goes through the loss's curvature
        cost += 2.0 * heads * columns * sum(s.curvature.numel() for s in sequences if s.curvature is not None)
    return cost


def _is_turned(sequences: list[Sequence]) -> bool:
    return any(s.turn_q is not None or s.turn_k is not None for s in sequences)


# -- one layer


@dataclass
class _Layer:
    norms: dict[str, Tensor]  # [heads or kv_heads]
    stderr: dict[str, Tensor]
    traces: dict[str, Tensor]
    exact: set[str]
    about: dict[str, Tensor]  # entropy and moments, [heads]


def _measure(
    site: AttentionSite, sequences: list[Sequence], exact: set[str], samples: int, seed: int
) -> _Layer:
    counts = {b: site.kv_heads if b in KEY_BLOCKS else site.heads for b in BLOCKS}
    zeros = {b: torch.zeros(n, dtype=torch.float64) for b, n in counts.items()}
    squares, errors, trace = ({b: z.clone() for b, z in zeros.items()} for _ in range(3))
    about = {
        name: torch.zeros(site.heads, dtype=torch.float64) for name in ("entropy", "first", "second", "third")
    }
    turned = _is_turned(sequences)
    by_gram = exact - {"QK"} if turned else exact
    known: dict[str, set[int]] = {b: set() for b in BLOCKS}  # heads whose trace is defined
    for a, b in combinations_with_replacement(sequences if turned else packed(sequences), 2):
        if a is not b and not by_gram:
            continue
        shared = Shared.of(a, b)
        for rows, other in _pairs(a, b):
            place = {name: rows.head // a.group if name in KEY_BLOCKS else rows.head for name in BLOCKS}
            if rows is not other and not by_gram:
                continue
            gram = Gram.over_tokens(rows, other, shared.y) if rows is other or not turned else None
            if rows is other and gram is not None:
                found = turned_traces(rows) if turned else traces(rows, shared, gram)
                for block, value in found.items():
                    trace[block][place[block]] += value.cpu()
                    known[block].add(place[block])
                _describe(rows, gram, about)
            products = {}
            if by_gram:
                products = (
                    turned_inner(rows, other, shared, by_gram)
                    if gram is None or turned
                    else inner(rows, other, shared, gram)
                )
            for block in by_gram.intersection(products):
                squares[block][place[block]] += (1 if rows is other else 2) * products[block].cpu()
    queries = max(sum(len(s.x) for s in sequences), 1)
    _multiply(sequences, exact - by_gram, None, seed, squares, errors)
    _multiply(sequences, set(BLOCKS) - exact, samples, seed, squares, errors)
    for block in BLOCKS:
        for index in set(range(counts[block])) - known[block] if sequences else ():
            trace[block][index] = math.nan
    norms, stderr = _roots(squares, errors)
    return _Layer(norms, stderr, trace, exact, {name: total / queries for name, total in about.items()})


def _measure_outer(
    land: Landscape,
    site: AttentionSite,
    sequences: list[Sequence],
    layer: _Layer,
    b: float,
    allowed: float,
    samples: int,
    seed: int,
) -> None:
    """Norms of `b Jᵀ B J`, by products with all unit vectors or with random signs, added to those of the layer."""
    blocks = (*BLOCKS, "VV")
    counts = {block: site.heads if block in QUERY_BLOCKS else site.kv_heads for block in blocks}
    squares, errors = (
        {block: torch.zeros(n, dtype=torch.float64) for block, n in counts.items()} for _ in "12"
    )
    if site.out in land.blocks and not math.isnan(b):
        out = land.blocks.select(site.out)
        parameters = land.parameters()
        W = out.from_parameters({name: parameters[name] for name in out.parameters}).view(out[0].shape)
        exact = sum(_cost(sequences, (kind,), False) for kind in ("QQ", "KK", "VV")) <= allowed
        by_head = W.unflatten(0, (site.heads, -1))
        _multiply(sequences, set(blocks), None if exact else samples, seed, squares, errors, by_head)
        layer.exact.update(f"outer {block}" for block in blocks if exact)
    else:  # a frozen output projection is no block; or there is no curvature at the layer's output
        squares = {block: torch.full_like(square, math.nan) for block, square in squares.items()}
    norms, stderr = _roots(squares, errors)
    layer.norms.update({f"outer {block}": abs(b) * norm for block, norm in norms.items()})
    layer.stderr.update({f"outer {block}": abs(b) * error for block, error in stderr.items()})


def _roots(
    squares: dict[str, Tensor], errors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Norms and their standard errors, from those of their squares: `dn = d(n²) / 2n`."""
    norms = {block: square.clamp(min=0).sqrt() for block, square in squares.items()}
    return norms, {
        block: torch.where(norm > 0, errors[block] / (2 * norm), 0.0) for block, norm in norms.items()
    }


def _pairs(a: Sequence, b: Sequence) -> Iterator[tuple[Rows, Rows]]:
    """All pairs of query heads that share a key head; each unordered pair of rows once."""
    for group in range(len(a.k)):
        members = range(group * a.group, (group + 1) * a.group)
        left = [Rows(a, h) for h in members]
        right = left if a is b else [Rows(b, h) for h in members]
        for i, rows in enumerate(left):
            for other in right[i if a is b else 0 :]:
                yield rows, other


def _multiply(
    sequences: list[Sequence],
    wanted: set[str],
    samples: int | None,
    seed: int,
    squares: dict[str, Tensor],
    errors: dict[str, Tensor],
    out: Tensor | None = None,
) -> None:
    """Squared norms by products: with all unit vectors, or with random signs and then the error of their mean."""
    if not wanted or not sequences:
        return
    group = sequences[0].group
    for kv_head in range(len(sequences[0].k)):
        for block, each in squared_norms(sequences, kv_head, wanted, samples, seed + kv_head, out).items():
            index = slice(kv_head, kv_head + 1)
            if block in QUERY_BLOCKS:
                index = slice(kv_head * group, (kv_head + 1) * group)
            squares[block][index] = (each.mean(0) if samples else each).cpu()
            if samples:
                errors[block][index] = (each.std(0) / math.sqrt(samples)).cpu()


def _describe(rows: Rows, gram: Gram, about: dict[str, Tensor]) -> None:
    """Sums over queries of the entropy of attention and of the sizes of its moments of the key inputs."""
    norms, MM = gram.keys.diagonal(), gram.MM.diagonal()
    sums = {
        "entropy": -torch.xlogy(rows.A, rows.A).sum(),
        "first": MM.clamp(min=0).sqrt().sum(),
        "second": (rows.A @ norms - MM).sum(),
        "third": (rows.D @ norms - 2 * gram.HM.diagonal()).abs().sum(),
    }
    for name, value in sums.items():
        about[name][rows.head] += value.double().cpu()


# -- all layers


def _assemble(
    sites: list[AttentionSite], layers: list[_Layer], sequences: int, samples: int, omitted: dict[str, str]
) -> Heads:
    def table(rows: list[Tensor]) -> Tensor:
        width = max(len(row) for row in rows)
        return torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row)), value=math.nan) for row in rows]
        )

    about = {name: table([layer.about[name] for layer in layers]) for name in layers[0].about}
    names = list(layers[0].norms)
    return Heads(
        layers=tuple(site.name for site in sites),
        norms={b: table([layer.norms[b] for layer in layers]) for b in names},
        stderr={b: table([layer.stderr[b] for layer in layers]) for b in names},
        traces={b: table([layer.traces[b] for layer in layers]) for b in BLOCKS},
        exact={b: torch.tensor([b in layer.exact for layer in layers]) for b in names},
        entropy=about.pop("entropy"),
        moments=about,
        sequences=sequences,
        samples=samples,
        omitted=omitted,
    )


def _plain(tensor: Tensor) -> Any:
    if tensor.dim() > 0:
        return [_plain(part) for part in tensor]
    value = tensor.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def _line(layer: str, head: str, cells: list[str]) -> str:
    return f"{layer:<22}{head:>9}" + "".join(f"{cell:>17}" for cell in cells)
