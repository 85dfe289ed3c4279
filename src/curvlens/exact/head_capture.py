"""What attention layers see in one forward and backward pass: their inputs, queries, keys, values, and gradients.

Queries, keys and values are taken as they enter `torch.nn.functional.scaled_dot_product_attention`, with mask and
scale; where a model writes its attention out, they are computed from the inputs. Either way they are compared with
the projections of the captured inputs and, if written out, with the captured output: what differs (norms of queries
and keys, other maps than softmax, appended keys) is left out, with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlens import guards
from curvlens.batches import Batch
from curvlens.blocks import Block
from curvlens.exact.head_rows import Sequence
from curvlens.families import AttentionSite
from curvlens.families.family import is_linear
from curvlens.landscape import Landscape, Parameters

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Unsupported(Exception):
    """Why the closed forms do not hold for a site."""


@dataclass
class Seen:
    """What passes through one attention layer, still in the graph."""

    calls: list[dict[str, Any]] = field(default_factory=list)  # of scaled_dot_product_attention
    x: Tensor | None = None  # input of the query projection
    y: Tensor | None = None  # input of the key projection
    z: Tensor | None = None  # input of the value projection
    projected: dict[str, Tensor] = field(default_factory=dict)  # outputs of the projections, by path
    mixed: Tensor | None = None  # input of the output projection
    runs: int = 0

    @property
    def head_output(self) -> Tensor | None:
        return self.calls[0]["output"] if self.calls else self.mixed


def capture(
    land: Landscape, piece: Batch, sites: list[AttentionSite], curvatures: dict[str, Tensor]
) -> dict[str, list[Sequence] | Unsupported]:
    """The sequences that each site has seen, by its name; or why it cannot be analysed. Cost: one gradient.

    `curvatures` are those of the loss at the outputs of some sites, `[batch, tokens, o, o]`, kept with the sequences.
    """
    # first derivatives alone
    with guards.undisturbed(land.model, land.device), sdpa_kernel(_BACKENDS):
        parameters = {name: p.requires_grad_() for name, p in land.parameters().items()}
        with _watched(land, sites) as seen:
            value = land.loss.value(land.output(parameters, piece), piece.target) / land.weight
        land.require_finite(value.detach(), "loss")
        # a layer whose weights are all frozen has no graph, and is reported by _sequences
        found = {name: s.head_output for name, s in seen.items()}
        live = {name: o for name, o in found.items() if o is not None and o.requires_grad}
        gradients: dict[str, Tensor] = {}
        if live:
            pulled = torch.autograd.grad(
                value, list(live.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            gradients = dict(zip(live, pulled, strict=True))
        turns: list[Tensor] = []
        results: dict[str, list[Sequence] | Unsupported] = {}
        for site in sites:
            try:
                results[site.name] = _sequences(
                    land,
                    site,
                    seen[site.name],
                    gradients.get(site.name),
                    parameters,
                    turns,
                    curvatures.get(site.name),
                )
            except Unsupported as reason:
                results[site.name] = reason
        return results


# -- watching a forward pass


@contextmanager
def _watched(land: Landscape, sites: list[AttentionSite]) -> Iterator[dict[str, Seen]]:
    seen = {site.name: Seen() for site in sites}
    within: list[str] = []
    handles = []

    def hook(path: str, before: Callable[..., None] | None, after: Callable[..., None] | None) -> None:
        module = land.model.get_submodule(path)
        if before is not None:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(after, with_kwargs=True))

    original = F.scaled_dot_product_attention
    # bound to the signature, since calls name their arguments or do not
    signature = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        output = original(*args, **kwargs)
        if within:
            given = {**dict(zip(signature, args, strict=False)), **kwargs}
            seen[within[-1]].calls.append({**given, "output": output})
        return output

    try:
        for site in sites:
            _hook_site(site, seen[site.name], within, hook, land)
        F.scaled_dot_product_attention = attention
        yield seen
    finally:
        F.scaled_dot_product_attention = original
        for handle in handles:
            handle.remove()


def _hook_site(
    site: AttentionSite, seen: Seen, within: list[str], hook: Callable[..., None], land: Landscape
) -> None:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        within.append(site.name)
        seen.runs += 1

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        within.pop()

    def see_x(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.x = _argument(module, args, kwargs, 0)

    def see_y(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.y = _argument(module, args, kwargs, site.key_argument)
        seen.z = _argument(module, args, kwargs, site.value_argument)

    def see_mixed(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.mixed = _argument(module, args, kwargs, 0)

    def see_projected(path: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.projected[path] = output

        return see

    hook(site.module, enter, leave)
    hook(site.input, see_x, None)
    hook(site.memory, see_y, None)
    if site.output != site.module:
        hook(site.output, see_mixed, None)
    for block in (site.query, site.key, site.value):
        path = _projection_path(land.model, land.blocks[block]) if block in land.blocks else None
        if path is not None:
            hook(path, None, see_projected(path))


def _argument(module: nn.Module, args: Any, kwargs: Any, index: int) -> Tensor | None:
    if len(args) > index:
        return args[index]
    names = list(inspect.signature(module.forward).parameters)
    return kwargs.get(names[index]) if index < len(names) else None


def _projection_path(model: nn.Module, block: Block) -> str | None:
    """The linear module that a block is cut from; None where it is a parameter of the attention itself."""
    assert block.source is not None
    path, _, name = block.source.parameter.rpartition(".")
    return path if name == "weight" and is_linear(model.get_submodule(path)) else None


# -- from what was seen to sequences


def _sequences(
    land: Landscape,
    site: AttentionSite,
    seen: Seen,
    gradient: Tensor | None,
    parameters: Parameters,
    turns: list[Tensor],
    curvature: Tensor | None,
) -> list[Sequence]:
    if seen.runs != 1 or len(seen.calls) > 1:
        raise Unsupported(f"expected one attention in a forward pass, got {max(seen.runs, len(seen.calls))}")
    missing = [name for name in (site.query, site.key, site.value) if name not in land.blocks]
    if missing:
        raise Unsupported(f"expected trainable projections, {', '.join(missing)} is frozen or shared")
    if "linear" in site.between:
        raise Unsupported(
            "expected softmax attention, got linear attention; use exact.SelfAttention for one layer"
        )
    if seen.x is None or seen.y is None or gradient is None:
        raise Unsupported(
            "expected torch's scaled_dot_product_attention or a module for the output projection, found neither; "
            "for nn.MultiheadAttention pass need_weights=False"
        )
    if seen.z is not seen.y and (seen.z is None or not torch.equal(seen.z, seen.y)):
        raise Unsupported("expected keys and values that are projections of one input, got two inputs")
    module = land.model.get_submodule(site.module)
    x, y = batched(seen.x, module), batched(seen.y, module)
    raw = {
        "q": _projected(land, seen, parameters, site.query, x, site.heads),
        "k": _projected(land, seen, parameters, site.key, y, site.kv_heads),
        "v": _projected(land, seen, parameters, site.value, y, site.kv_heads),
    }
    if seen.calls:
        call = seen.calls[0]
        q = call["query"]
        # grouped keys and values may come repeated
        k, v = (part[:, :: part.shape[1] // site.kv_heads] for part in (call["key"], call["value"]))
        mask, causal, scale = call.get("attn_mask"), call.get("is_causal", False), call.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    else:
        q, k, v = raw["q"].values, raw["k"].values, raw["v"].values
        if site.scale is None or site.causal is None:
            raise Unsupported("expected torch's scaled_dot_product_attention, or a known scale and mask")
        mask, causal, scale = None, site.causal, site.scale
        gradient = _by_head(gradient, site.heads)
    if k.shape[2] != y.shape[1] or q.shape[2] != x.shape[1]:
        raise Unsupported(
            f"expected one key for each of {y.shape[1]} inputs, got {k.shape[2]}: keys are appended"
        )
    if not _close(v, raw["v"].values):
        raise Unsupported("expected values that are projections of the layer's input, got others")
    turn_q, turn_k = _turn(q, raw["q"], turns, site), _turn(k, raw["k"], turns, site)
    x, y, q, k, v, gradient = (t.detach() for t in (x, y, q, k, v, gradient))
    found = []
    for b in range(len(x)):
        seen_keys, bias = _mask_of(mask, causal, b, q.shape[2], k.shape[2], q)
        sequence = Sequence(
            x[b],
            y[b],
            q[b],
            k[b],
            v[b],
            gradient[b],
            mask=seen_keys,
            bias=bias,
            scale=scale,
            turn_q=None if turn_q is None else turn_q[b],
            turn_k=None if turn_k is None else turn_k[b],
            curvature=None if curvature is None else curvature[b],
        )
        if not seen.calls:
            _require_output(sequence, _by_head(seen.mixed.detach(), site.heads)[b])  # type: ignore[union-attr]
        if (kept := sequence.pruned()) is not None:
            found.append(kept)
    return found


def batched(x: Tensor, module: nn.Module) -> Tensor:
    """`[batch, tokens, d]`."""
    if x.dim() == 2:
        return x[None]
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return x.transpose(0, 1)
    return x


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """From `[batch, tokens, heads e]` to `[batch, heads, tokens, e]`."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Projected:
    """A projection before anything else is done to it, `[batch, heads, tokens, k]`, and where it lies in `source`."""

    values: Tensor
    source: Tensor | None = None
    features: Tensor | None = None  # [heads, k], the entries of the last dimension of `source`


def _projected(
    land: Landscape, seen: Seen, parameters: Parameters, name: str, x: Tensor, heads: int
) -> Projected:
    block = land.blocks[name]
    path = _projection_path(land.model, block)
    if path is not None and path in seen.projected:
        source = seen.projected[path]
        module = land.model.get_submodule(path)
        assert block.source is not None
        shape = block.source.parameter_shape
        stored_out = isinstance(module, nn.Linear)
        order = torch.arange(shape[0 if stored_out else 1])
        grid = (order[:, None] if stored_out else order[None]).expand(shape).contiguous()
        features = block.source.view(grid).reshape(block.shape)[0].unflatten(0, (heads, -1)).to(source.device)
        values = source[..., features.flatten()]
        return Projected(_by_head(values, heads), source, features)
    names = [name, *([f"{name}.bias"] if f"{name}.bias" in land.blocks else [])]
    chosen = land.blocks.select(*names)
    own = {source: parameters[source] for source in chosen.parameters}
    parts = list(chosen.split(chosen.from_parameters(own)).values())
    weight, bias = (parts[0], parts[1:]) if parts[0].dim() == 2 else (parts[1], parts[:1])
    return Projected(_by_head(x.detach() @ weight + (bias[0] if bias else 0), heads))


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: told from what is structurally different, so the tolerance may be wide."""
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    return bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max())


def _turn(after: Tensor, before: Projected, turns: list[Tensor], site: AttentionSite) -> Tensor | None:
    """The linear map `[batch, tokens, k, k]` from projections to what enters the softmax; None for the identity.

    It is read off by one vector-Jacobian product for each entry of a head, once for all layers that share it.
    """
    if _close(after, before.values):
        return None
    for turn in turns:
        if _turned(turn, before.values, after):
            return turn
    if before.source is not None and before.features is not None:
        turn = _read_off(after, before.source, before.features[0])
        if _turned(turn, before.values, after):
            turns.append(turn)
            return turn
    between = ", ".join(site.between) or "unknown"
    raise Unsupported(
        f"expected a linear map such as rotary positions between projection and softmax, got another: {between}"
    )


def _turned(turn: Tensor, before: Tensor, after: Tensor) -> bool:
    if turn.shape[1:] != (before.shape[2], after.shape[3], before.shape[3]) or len(turn) != len(before):
        return False
    return _close(torch.einsum("blac,bhlc->bhla", turn, before.detach()), after)


def _read_off(after: Tensor, source: Tensor, features: Tensor) -> Tensor:
    rows = []
    for entry in range(after.shape[-1]):
        unit = torch.zeros_like(after)
        unit[:, 0, :, entry] = 1
        (pulled,) = torch.autograd.grad(after, source, unit, retain_graph=True)
        rows.append(pulled[..., features])
    return torch.stack(rows, 2)


def _mask_of(
    mask: Tensor | None, causal: bool, sample: int, rows: int, keys: int, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Which keys a row attends to, `[1 or heads, rows, keys]`, and what is added to the scores."""
    seen = torch.ones(1, rows, keys, dtype=torch.bool, device=like.device)
    if causal:
        seen = seen.tril()
    if mask is None:
        return seen, None
    mask = mask.detach()
    mask = mask[None] if mask.dim() == 3 else mask.reshape(1, 1, *mask.shape) if mask.dim() == 2 else mask
    own = mask[sample if len(mask) > 1 else 0].expand(-1, rows, keys)
    if own.dtype == torch.bool:
        return seen & own, None
    kept = own > torch.finfo(own.dtype).min / 2
    # a row whose keys are all masked by a large finite number attends to them nevertheless
    kept = kept | (~kept.any(-1, keepdim=True) & ~own.isneginf())
    bias = own.masked_fill(~kept, 0)
    return seen & kept, bias if bool(bias.any()) else None


def _require_output(sequence: Sequence, output: Tensor) -> None:
    """Where a model writes its attention out: it must be the softmax attention that is taken for it."""
    for head in range(len(sequence.q)):
        if not _close(sequence.weights(head) @ sequence.v[head // sequence.group], output[head]):
            raise Unsupported(
                "expected softmax attention with the family's scale and mask, the output shows another (a padding "
                'mask, a bias, another map); with Hugging Face, call model.set_attn_implementation("sdpa")'
            )
