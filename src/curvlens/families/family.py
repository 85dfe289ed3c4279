"""Family: what the parts of a kind of model are called, written as tables of names.

A family says, for each kind of module, what its children are: `{"wte": "embed.token", "h.*": "layer.*"}`. Names
are joined on the way down from the model to its parameters, so a table is short and holds wherever such a module
stands. An attention module is described by an `Attention`, which says how its projections divide into heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

View = Callable[[Tensor], Tensor]
Kind = str | type[nn.Module] | Callable[[nn.Module], bool]
"""Which modules: a pattern of the class name (or of that of a base class), a class, or a question to the module."""


@dataclass(frozen=True)
class Piece:
    """A block cut from one parameter. Its name is relative to the module that it is described for."""

    name: str
    view: View | None = None  # from the parameter to the block, as a view; None: the parameter as it is
    shape: tuple[int, ...] | None = None  # of the block, where the view keeps a dimension of heads more
    heads: tuple[int, int] | None = None  # as in `Block`


@dataclass(frozen=True)
class Attention:
    """One attention module: its heads, its parameters cut into blocks, and where its input and output pass.

    `pieces` maps the parameter names within the module to the blocks "query", "key", "value", "out" and their
    biases, `[inputs, outputs]` each. `input`, `memory` and `output` are paths within the module, "" the module
    itself; see `AttentionSite`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    pieces: Mapping[str, Sequence[Piece]]
    input: str = ""
    memory: str = ""
    key_argument: int = 0
    value_argument: int = 0
    output: str = ""
    scale: float | None = None  # scores are `scale * q @ k.T`; None: not known
    causal: bool | None = None  # None: up to the caller, or not known
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Names for the children of each kind of module, and the attention of each kind of attention module.

    `names[kind]` maps paths below the module, of modules or parameters, to their names; `*` stands for one
    element of the path and of the name, and the name "" passes through. The first kind that a module meets counts.
    """

    name: str
    names: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)
    attention: Mapping[Kind, Callable[[Any], Attention | None]] = field(default_factory=dict)

    def names_of(self, module: nn.Module) -> Mapping[str, str] | None:
        return next((names for kind, names in self.names.items() if is_kind(module, kind)), None)

    def attention_of(self, module: nn.Module) -> Attention | None:
        describe = next((of for kind, of in self.attention.items() if is_kind(module, kind)), None)
        return None if describe is None else describe(module)

    def knows(self, module: nn.Module) -> bool:
        return self.names_of(module) is not None or self.attention_of(module) is not None

    def __repr__(self) -> str:
        return f"Family({self.name!r})"


def is_kind(module: nn.Module, kind: Kind) -> bool:
    if isinstance(kind, str):
        return any(fnmatchcase(cls.__name__, kind) for cls in type(module).__mro__)
    if isinstance(kind, type):
        return isinstance(module, kind)
    return kind(module)


def has(*paths: str) -> Callable[[nn.Module], bool]:
    """The kind of a module that has submodules at all of these paths."""
    return lambda module: all(submodule(module, path) is not None for path in paths)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for step in path.split(".") if path else []:
        found = None if found is None else found._modules.get(step)
    return found


def is_linear(module: nn.Module | None) -> bool:
    """Whether a module maps `x` to `x W + b`: `nn.Linear`, or `Conv1D` of Transformers, which stores `W` itself."""
    if module is None or module._parameters.get("weight") is None:
        return False
    return isinstance(module, nn.Linear) or is_kind(module, "Conv1D")


def linear_view(module: nn.Module) -> View | None:
    """From the stored weight of a linear map to `W [inputs, outputs]`."""
    if isinstance(module, nn.Linear):
        return lambda w: w.T
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):  # patches are linear maps of flattened pixels
        return lambda w: w.flatten(1).T
    return None


def leaf(module: nn.Module) -> dict[str, tuple[Piece, ...]]:
    """The blocks of a module without further structure: "" for its weight, "bias", and so on."""
    view = linear_view(module)
    return {
        name: (Piece("", view),) if name == "weight" else (Piece(name),)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def projections(
    module: nn.Module,
    head_dim: int | None,
    query: str = "q_proj",
    key: str = "k_proj",
    value: str = "v_proj",
    out: str = "o_proj",
    interleaved: bool = False,
    pieces: Mapping[str, Sequence[Piece]] | None = None,
    **site: Any,
) -> Attention | None:
    """The attention whose projections are linear modules at these paths; None if they, or `head_dim`, are not there.

    Projections at the same path are fused, one behind the other in the order query, key, value, or
    `interleaved`: query, key and value of the first head, of the second head, and so on. Key and value may have
    fewer heads than the query. `pieces` adds blocks, `site` further fields of `Attention`.
    """
    linears = {path: submodule(module, path) for path in (query, key, value, out)}
    if not head_dim or not all(is_linear(linear) for linear in linears.values()):
        return None
    shapes = {path: _inputs_outputs(linear) for path, linear in linears.items() if linear is not None}
    together = [role for role, path in (("query", query), ("key", key), ("value", value)) if path == key]
    heads = shapes[out][0] // head_dim
    shared = shapes[key][1] // head_dim - heads * ("query" in together)
    kv_heads = shared // (len(together) - ("query" in together))
    roles: dict[str, dict[str, int]] = {}
    for path, role, count in ((query, "query", heads), (key, "key", kv_heads), (value, "value", kv_heads)):
        roles.setdefault(path, {})[role] = count
    if any(sum(counts.values()) * head_dim != shapes[path][1] for path, counts in roles.items()):
        return None
    found: dict[str, Sequence[Piece]] = dict(pieces or {})
    for path, counts in roles.items():
        linear = module.get_submodule(path)
        found[f"{path}.weight"] = _cut(counts, head_dim, shapes[path][0], linear_view(linear), interleaved)
        found[f"{path}.bias"] = _cut(counts, head_dim, None, None, interleaved)
    found[f"{out}.weight"] = (Piece("out", linear_view(module.get_submodule(out)), heads=(heads, 0)),)
    found[f"{out}.bias"] = (Piece("out.bias"),)
    found = {path: cut for path, cut in found.items() if has_parameter(module, path)}
    site = {"scale": getattr(module, "scaling", None), "causal": getattr(module, "is_causal", None), **site}
    return Attention(heads, kv_heads, head_dim, found, input=query, memory=key, output=out, **site)


def _cut(
    counts: Mapping[str, int], head_dim: int, inputs: int | None, orient: View | None, interleaved: bool
) -> tuple[Piece, ...]:
    """Blocks of the given numbers of heads along the last dimension of a weight, or of a bias (no `inputs`)."""
    lead, suffix = ((inputs,), "") if inputs is not None else ((), ".bias")
    pieces, start = [], 0
    for i, (role, count) in enumerate(counts.items()):
        stop = start + count * head_dim
        shape = (*lead, stop - start)
        if len(counts) == 1:
            view = orient
        elif interleaved:
            view = _along_last(orient, _every(i, len(counts), count, head_dim))
        else:
            view = _along_last(orient, _between(start, stop))
        pieces.append(Piece(role + suffix, view, shape, (count, len(lead))))
        start = stop
    return tuple(pieces)


def _along_last(orient: View | None, cut: View) -> View:
    return cut if orient is None else lambda w: cut(orient(w))


def _between(start: int, stop: int) -> View:
    return lambda w: w[..., start:stop]


def _every(i: int, among: int, heads: int, head_dim: int) -> View:
    return lambda w: w.unflatten(-1, (heads, among, head_dim))[..., i, :]


def _inputs_outputs(linear: nn.Module) -> tuple[int, int]:
    rows, columns = linear._parameters["weight"].shape  # type: ignore[union-attr]
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def has_parameter(module: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    holder = submodule(module, owner)
    return holder is not None and holder._parameters.get(name) is not None


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path, None if there is none."""
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None
