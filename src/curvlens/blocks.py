"""Blocks: ordered, named slices of a model's parameters.

A `Blocks` is the space that vectors and operators live in: a flat vector is the concatenation of its blocks,
each flattened by rows. A block of a linear map is `W` as the papers write it, `X W`, so of shape
`[inputs, outputs]`, whichever way the model stores it; then the matrices of the closed forms and those of
automatic differentiation agree entry by entry. `from_parameters` and `to_parameters` convert.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Where a block lies in one parameter: a strided view of its contiguous storage.

    Strides say at once that a matrix is stored transposed, fused with others or interleaved by heads.
    """

    parameter: str
    parameter_shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(
        cls, parameter: str, shape: Iterable[int], view: Callable[[Tensor], Tensor] | None = None
    ) -> Slice:
        """The slice that `view` cuts from a parameter of the given shape, e.g. `lambda w: w.T[:, :64]`."""
        shape = tuple(shape)
        whole = torch.empty(shape, device="meta")
        part = whole if view is None else view(whole)
        if not part.is_meta or part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            raise ValueError(
                f"expected a view of {parameter} {list(shape)} (view, transpose, slicing), got a copy; "
                "use operations that return views, e.g. unflatten and index instead of reshape"
            )
        return cls(parameter, shape, tuple(part.shape), tuple(part.stride()), int(part.storage_offset()))

    def view(self, tensor: Tensor) -> Tensor:
        """The slice of a parameter-shaped tensor, or of each of a stack of them `[K, *shape]`; a view."""
        stack = tensor.dim() - len(self.parameter_shape)
        if not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor for {self.parameter}, got strides {tensor.stride()}"
            )
        lead, stride = tensor.shape[:stack], tensor.stride()[:stack]
        return tensor.as_strided(
            (*lead, *self.size), (*stride, *self.stride), tensor.storage_offset() + self.offset
        )

    @property
    def transposition(self) -> tuple[int, ...] | None:
        """The order of dimensions that makes the slice the whole parameter; None when it is but a part."""
        order = tuple(sorted(range(len(self.size)), key=lambda dim: -self.stride[dim]))
        whole = torch.empty(self.parameter_shape, device="meta")
        as_whole = (tuple(self.size[dim] for dim in order), tuple(self.stride[dim] for dim in order))
        return order if as_whole == (tuple(whole.shape), whole.stride()) and not self.offset else None

    def entries(self) -> Tensor:
        """The positions in the flattened parameter that the slice covers, in the slice's own order."""
        positions = torch.arange(math.prod(self.parameter_shape)).view(self.parameter_shape)
        return self.view(positions).flatten()


@dataclass(frozen=True)
class Block:
    """One named slice. `source` is None for a matrix that belongs to no model, as in the closed forms."""

    name: str
    shape: tuple[int, ...]
    source: Slice | None = None
    aliases: tuple[str, ...] = ()  # further names of the same numbers: tied weights
    heads: tuple[int, int] | None = None  # (number of heads, dimension of `shape` that they divide)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def split_heads(self) -> tuple[Block, ...]:
        """One block a head, `name.head.0` and so on; the block itself when it has no heads."""
        if self.heads is None:
            return (self,)
        count, dim = self.heads
        width = self.shape[dim] // count
        shape = (*self.shape[:dim], width, *self.shape[dim + 1 :])
        return tuple(
            Block(
                f"{self.name}.head.{head}",
                shape,
                self._head_source(head, count, dim, width),
                tuple(f"{alias}.head.{head}" for alias in self.aliases),
            )
            for head in range(count)
        )

    def _head_source(self, head: int, count: int, dim: int, width: int) -> Slice | None:
        source = self.source
        if source is None:
            return None
        if source.size == self.shape:  # heads are neighbours along one dimension
            size = (*source.size[:dim], width, *source.size[dim + 1 :])
            return replace(source, size=size, offset=source.offset + head * width * source.stride[dim])
        # interleaved with other matrices: the view already has a dimension of heads, at `dim`
        if source.size[dim] != count:
            raise ValueError(f"{self.name}: expected {count} heads in dimension {dim} of {source.size}")
        return replace(
            source,
            size=source.size[:dim] + source.size[dim + 1 :],
            stride=source.stride[:dim] + source.stride[dim + 1 :],
            offset=source.offset + head * source.stride[dim],
        )


class Blocks:
    """An ordered collection of disjoint blocks: the domain or codomain of an operator."""

    def __init__(self, blocks: Iterable[Block]):
        self._blocks = tuple(blocks)
        self._index: dict[str, int] = {}
        for i, block in enumerate(self._blocks):
            for name in (block.name, *block.aliases):
                if name in self._index:
                    raise ValueError(f"expected distinct block names, got {name!r} twice")
                self._index[name] = i

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> Blocks:
        """Blocks that belong to no model: `Blocks.of({"query": (16, 8), "key": (16, 8)})`."""
        return cls(Block(name, tuple(shape)) for name, shape in shapes.items())

    # -- as a sequence of blocks

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str | int) -> Block:
        if isinstance(name, int):
            return self._blocks[name]
        if name not in self._index:
            raise KeyError(self._unknown(name))
        return self._blocks[self._index[name]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self._blocks == other._blocks

    def __hash__(self) -> int:
        return hash(self._blocks)

    def __repr__(self) -> str:
        shown = ", ".join(self.names[:4]) + (", …" if len(self) > 4 else "")
        return f"Blocks({len(self)} blocks, {self.size:,} entries: {shown})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self._blocks)

    @cached_property
    def size(self) -> int:
        """The length of a flat vector."""
        return sum(block.size for block in self._blocks)

    @cached_property
    def ranges(self) -> dict[str, slice]:
        """The part of the flat vector that each block takes."""
        ranges, start = {}, 0
        for block in self._blocks:
            ranges[block.name] = slice(start, start + block.size)
            start += block.size
        return ranges

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter of the model that a block lies in."""
        return {b.source.parameter: b.source.parameter_shape for b in self._blocks if b.source is not None}

    # -- choosing

    def select(self, *patterns: str) -> Blocks:
        """The blocks that a name, alias, head, dotted prefix or shell pattern names, in their own order.

        `select("layer.*.attn.query")`, `select("layer.0")`, `select("layer.0.attn.query.head.3")`.
        """
        heads = self.heads()
        chosen: dict[str, Block] = {}
        for pattern in patterns:
            found = _matching(self, pattern) or _matching(heads, pattern)
            if not found:
                raise KeyError(self._unknown(pattern))
            chosen.update((block.name, block) for block in found)
        parents = {head.name: block.name for block in self for head in block.split_heads()}
        for name in chosen:
            if parents.get(name, name) != name and parents[name] in chosen:
                raise ValueError(f"expected disjoint blocks, got {parents[name]!r} and its head {name!r}")
        order = {name: i for i, block in enumerate(self) for name in (block.name, *_head_names(block))}
        return Blocks(sorted(chosen.values(), key=lambda block: order[block.name]))

    def heads(self) -> Blocks:
        """The same entries with every attention matrix split into its heads."""
        return Blocks(head for block in self._blocks for head in block.split_heads())

    def positions(self, other: Blocks) -> Tensor:
        """Where the entries of `other`, blocks or heads of these, lie in a flat vector of these blocks."""
        homes = {
            head.name: (block, i) for block in self._blocks for i, head in enumerate(block.split_heads())
        }
        found = []
        for part in other:
            if part.name in self._index:
                block = self[part.name]
                span = self.ranges[block.name]
                found.append(torch.arange(span.start, span.stop))
            elif part.name in homes:
                block, i = homes[part.name]
                count, dim = block.heads or (1, 0)
                span = self.ranges[block.name]
                entries = torch.arange(span.start, span.stop).view(block.shape)
                found.append(entries.unflatten(dim, (count, -1)).select(dim, i).flatten())
            else:
                raise KeyError(self._unknown(part.name))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    def _unknown(self, name: str) -> str:
        close = self.close_to(name)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(self.names)}"
        )
        return f"expected the name or pattern of a block, got {name!r}; {hint}"

    def close_to(self, name: str) -> list[str]:
        """Up to three names of blocks or heads that may be meant."""
        known = [*self._index, *(head for block in self for head in _head_names(block))]
        return difflib.get_close_matches(name, known, n=3)

    # -- between flat vectors, blocks and parameters

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector `[size]` or a stack `[K, size]` as one view a block, each in the block's shape."""
        return {
            block.name: vector[..., self.ranges[block.name]].unflatten(-1, block.shape or (1,))
            for block in self._blocks
        }

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The flat vector with the given blocks or heads (by name or alias), zero where none is given."""
        some = next(iter(parts.values()))
        vector = some.new_zeros(self.size)
        heads = None if all(name in self for name in parts) else self.select(*parts)
        for name, part in parts.items():
            block = self[name] if heads is None or name in self else heads[name]
            if tuple(part.shape) != block.shape:
                raise ValueError(
                    f"block {name!r}: expected shape {list(block.shape)}, got {list(part.shape)}"
                )
            where = self.ranges[block.name] if name in self else self.positions(Blocks([block]))
            vector[where] = part.reshape(-1)
        return vector

    def from_parameters(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Gather these blocks from parameter-shaped tensors (or stacks of them) into a flat vector or stack."""
        name, shape = next(iter(self.parameters.items()))
        some = parameters[name]
        lead = some.shape[: some.dim() - len(shape)]
        missing = [name for name in self.parameters if name not in parameters]
        if missing:
            raise KeyError(f"expected all parameters of the blocks, got none for {missing[0]!r}")
        vector = some.new_empty((*lead, self.size))
        self.gather(parameters, vector)
        return vector

    def gather(self, parameters: Mapping[str, Tensor], vector: Tensor, add: bool = False) -> None:
        """`from_parameters` into a given vector or stack, or added to it; parameters not given change nothing."""
        for name, part in self.split(vector).items():
            source = _source(self[name])
            if source.parameter not in parameters:
                continue
            found = source.view(parameters[source.parameter].detach().contiguous())
            if source.size != self[name].shape:
                found = found.reshape(part.shape)
            part.add_(found) if add else part.copy_(found)

    def to_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """Scatter a flat vector `[size]` or a stack `[K, size]` into parameter-shaped tensors.

        The parameters are those the blocks lie in; entries outside of the blocks are zero. A parameter that is
        one block, transposed or not, is a view of the vector.
        """
        lead = vector.dim() - 1
        tensors: dict[str, Tensor] = {}
        covered = dict.fromkeys(self.parameters, 0)
        for block in self._blocks:
            covered[_source(block).parameter] += block.size
        for name, part in self.split(vector).items():
            source = _source(self[name])
            if (order := source.transposition) is not None and source.size == self[name].shape:
                tensors[source.parameter] = part.permute(*range(lead), *(lead + dim for dim in order))
                continue
            if source.parameter not in tensors:
                complete = covered[source.parameter] == math.prod(source.parameter_shape)
                new = vector.new_empty if complete else vector.new_zeros
                tensors[source.parameter] = new((*vector.shape[:-1], *source.parameter_shape))
            target = source.view(tensors[source.parameter])
            target.copy_(part.reshape(target.shape))
        return tensors


def _source(block: Block) -> Slice:
    if block.source is None:
        raise ValueError(f"block {block.name!r} belongs to no model, so it has no parameters")
    return block.source


def _head_names(block: Block) -> tuple[str, ...]:
    if block.heads is None:
        return ()
    return tuple(f"{name}.head.{i}" for name in (block.name, *block.aliases) for i in range(block.heads[0]))


def _matching(blocks: Blocks, pattern: str) -> list[Block]:
    if pattern in blocks:
        return [blocks[pattern]]

    def names(block: Block) -> tuple[str, ...]:
        return (block.name, *block.aliases)

    found = [b for b in blocks if any(fnmatchcase(name, pattern) for name in names(b))]
    return found or [b for b in blocks if any(name.startswith(pattern + ".") for name in names(b))]
