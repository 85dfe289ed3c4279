"""From a model to its blocks and attention sites: one walk down the tree of modules, joining names."""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from curvlens.blocks import Block, Blocks, Slice
from curvlens.families.family import Attention, Family, Piece, leaf

WRAPPER = Family(
    "wrapper",
    {
        "DistributedDataParallel": {"module": ""},
        "DataParallel": {"module": ""},
        "AveragedModel": {"module": ""},
        "OptimizedModule": {"_orig_mod": ""},  # torch.compile
    },
)
"""Modules that hold a model and name nothing."""
_families: list[Family] = [WRAPPER]
PARAMETERS = Family("parameters")
"""The family of every other model: blocks are parameters, under their own names."""


@dataclass(frozen=True)
class AttentionSite:
    """Where one attention of a model is, and what is known of it without running the model.

    Queries are projections of the first argument of the module at `input`; keys and values are projections of
    the arguments number `key_argument` and `value_argument` of the module at `memory`. The projected output is the
    output of the module at `output`, the first if there are several. Where the projections are modules, `input`,
    `memory` and `output` are these; where they are parameters of the attention module, it stands for all three.

    `between` names what else than `softmax(scale * q @ k.T) @ v` under a mask the attention does: "query_norm",
    "rotary", "position" (a bias by distance), "window" (a mask of distant tokens), "extra" (keys and values of its
    own), "linear" (no softmax), "unknown" (only its code tells).
    """

    layer: str  # "layer.0", "encoder.layer.0", "" for an attention on its own
    name: str  # "layer.0.attn", "decoder.layer.0.cross"
    module: str  # paths in the model, "" the model itself
    input: str
    memory: str
    key_argument: int
    value_argument: int
    output: str
    heads: int
    kv_heads: int
    head_dim: int
    self_attention: bool | None  # None: up to the caller of the module
    causal: bool | None  # None: up to the caller of the module
    scale: float | None  # scores are `scale * q @ k.T`
    between: tuple[str, ...]
    query: str  # names of blocks
    key: str
    value: str
    out: str


def register(family: Family) -> Family:
    """Make a family known. It comes before those registered earlier, and replaces one of the same name."""
    others = [known for known in _families if known.name not in (family.name, WRAPPER.name)]
    _families[:] = [WRAPPER, family, *others]
    return family


def find(model: nn.Module) -> Family:
    """The family of the outermost module that a family knows; `PARAMETERS` if there is none."""
    queue = deque([model])
    while queue:
        module = queue.popleft()
        family = next((family for family in _families if family.knows(module)), None)
        if family is not None and family is not WRAPPER:
            return family
        queue.extend(child for child in module._modules.values() if child is not None)
    return PARAMETERS


def blocks(model: nn.Module, names: Iterable[str] | None = None) -> Blocks:
    """The blocks of the parameters that require a gradient, or of the parameters with the given names.

    Each entry is in exactly one block. Blocks come in the order of `named_parameters`. A tied parameter is a
    block under its first name, with the others as aliases.
    """
    pieces = _walk(model).pieces
    shared: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        shared.setdefault(id(parameter), []).append(name)
    wanted = _wanted(parameters, names)
    found: list[Block] = []
    taken: set[str] = set()
    for identity, (first, *others) in shared.items():
        if identity not in wanted:
            continue
        shape = parameters[first].shape
        cut = _blocks_of(first, shape, pieces.get(first))
        if any(block.name in taken for block in cut):
            cut = _blocks_of(first, shape, None)
        for other in others:
            cut = _with_aliases(cut, _blocks_of(other, shape, pieces.get(other)), taken)
        found.extend(cut)
        taken.update(name for block in cut for name in (block.name, *block.aliases))
    return Blocks(found)


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Every attention of a known kind in a model, in the order of its modules."""
    return _walk(model).sites


def named_modules(model: nn.Module) -> dict[str, str]:
    """What the families call the modules of a model, by their paths."""
    return _walk(model).modules


# -- the walk


class _Walk:
    def __init__(self) -> None:
        self.pieces: dict[str, list[Piece]] = {}  # by parameter, with names from the model on
        self.sites: list[AttentionSite] = []
        self.modules: dict[str, str] = {}  # names from the model on, by path

    def name(self, path: str, name: str, pieces: Iterable[Piece]) -> None:
        pieces = [replace(piece, name=_join(name, piece.name)) for piece in pieces]
        # a parameter that an outer table names keeps that name; without any name it goes by its path
        if path not in self.pieces and all(piece.name for piece in pieces):
            self.pieces[path] = pieces

    def visit(self, module: nn.Module, path: str, name: str, named: bool) -> None:
        """Name what is below the module at `path`, called `name`, by a table (`named`) or by its own path."""
        names = _first(family.names_of(module) for family in _families)
        attention = _first(family.attention_of(module) for family in _families)
        reached: set[str] = set()
        for pattern, role in (names or {}).items():
            for place, stars in _places(module, pattern):
                reached.add(place.split(".")[0])
                self._descend(module, place, path, _join(name, _fill(role, stars)))
        if attention is not None:
            self._attend(attention, path, name or "attn", named)
            reached.update(place.split(".")[0] for place in attention.pieces)
        if names is None and attention is None and named:
            for own, pieces in leaf(module).items():
                self.name(_join(path, own), name, pieces)
        for own, child in module._modules.items():
            if child is not None and own not in reached:
                self.visit(child, _join(path, own), _join(path, own), False)

    def _descend(self, module: nn.Module, place: str, path: str, name: str) -> None:
        owner, _, last = place.rpartition(".")
        holder = module.get_submodule(owner)
        if last in holder._parameters:
            self.name(_join(path, place), name, [Piece("")])
        else:
            self.modules.setdefault(_join(path, place), name)
            self.visit(holder.get_submodule(last), _join(path, place), name, True)

    def _attend(self, attention: Attention, path: str, name: str, named: bool) -> None:
        for place, pieces in attention.pieces.items():
            self.name(_join(path, place), name, pieces)
        layer, _, kind = name.rpartition(".")
        self.sites.append(
            AttentionSite(
                layer=layer,
                name=name,
                module=path,
                input=_join(path, attention.input),
                memory=_join(path, attention.memory),
                key_argument=attention.key_argument,
                value_argument=attention.value_argument,
                output=_join(path, attention.output),
                heads=attention.heads,
                kv_heads=attention.kv_heads,
                head_dim=attention.head_dim,
                self_attention=kind != "cross" if named else None,
                causal=attention.causal,
                scale=attention.scale,
                between=attention.between,
                query=f"{name}.query",
                key=f"{name}.key",
                value=f"{name}.value",
                out=f"{name}.out",
            )
        )


def _walk(model: nn.Module) -> _Walk:
    walk = _Walk()
    walk.visit(model, "", "", False)
    return walk


def _first(found):  # type: ignore[no-untyped-def]
    return next((item for item in found if item is not None), None)


def _places(module: nn.Module, pattern: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Paths of the modules and parameters below that meet a pattern, with what its stars stand for."""
    step, _, rest = pattern.partition(".")
    own: dict[str, nn.Module | nn.Parameter | None] = {**module._modules, **module._parameters}
    for name in list(own) if step == "*" else [step] if own.get(step) is not None else []:
        star = (name,) if step == "*" else ()
        if not rest:
            yield name, star
            continue
        child = module._modules.get(name)
        if child is not None:
            yield from ((f"{name}.{place}", star + stars) for place, stars in _places(child, rest))


def _fill(role: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        role = role.replace("*", star, 1)
    return role


def _join(name: str, rest: str) -> str:
    return f"{name}.{rest}" if name and rest else name or rest


# -- from pieces to blocks


def _blocks_of(parameter: str, shape: torch.Size, pieces: Sequence[Piece] | None) -> list[Block]:
    if pieces is None:
        pieces = [Piece(parameter)]
    cut = []
    for piece in pieces:
        source = Slice.of(parameter, shape, piece.view)
        cut.append(Block(piece.name, piece.shape or source.size, source, heads=piece.heads))
    _require_partition(parameter, shape, cut)
    return cut


def _require_partition(parameter: str, shape: torch.Size, cut: Sequence[Block]) -> None:
    if len(cut) == 1 and _is_whole(cut[0]):
        return
    times = torch.zeros(shape, dtype=torch.uint8, device="cpu")  # models may be made on "meta"
    for block in cut:
        assert block.source is not None
        block.source.view(times).add_(1)
    if not bool((times == 1).all()):
        raise ValueError(
            f"{parameter} {list(shape)}: expected every entry in exactly one block, but "
            f"{', '.join(block.name for block in cut)} leave out {int((times == 0).sum())} entries and take "
            f"{int((times > 1).sum())} more than once; correct the views of its family"
        )


def _is_whole(block: Block) -> bool:
    """Whether a view is the whole parameter with its dimensions split or permuted, told from its strides alone."""
    source = block.source
    assert source is not None
    covered = 1
    for stride, size in sorted(zip(source.stride, source.size, strict=True)):
        if size > 1 and stride != covered:
            return False
        covered *= size
    return source.offset == 0 and covered == math.prod(source.parameter_shape)


def _with_aliases(cut: list[Block], other: list[Block], taken: set[str]) -> list[Block]:
    """The blocks with the names that the same entries have under another name of their parameter."""
    names = {_extent(block): block.name for block in other}
    aliased = []
    for block in cut:
        alias = names.get(_extent(block))
        if alias is not None and alias not in (block.name, *block.aliases) and alias not in taken:
            block = replace(block, aliases=(*block.aliases, alias))
        aliased.append(block)
    return aliased


def _extent(block: Block) -> tuple[object, ...]:
    """What two views of one parameter share if they cover the same entries, in whichever order."""
    source = block.source
    assert source is not None
    return source.offset, frozenset(zip(source.size, source.stride, strict=True))


def _wanted(parameters: Mapping[str, nn.Parameter], names: Iterable[str] | None) -> set[int]:
    if names is None:
        return {id(parameter) for parameter in parameters.values() if parameter.requires_grad}
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise KeyError(f"expected names of parameters of the model, got {name!r}{hint}")
    return {id(parameters[name]) for name in names}
