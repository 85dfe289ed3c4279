"""Groups: what a report shows as one row, a weight together with its bias, the parts of a norm together.

Hierarchy: a model has layers, a layer has sublayers ("layer.0.attn"), a sublayer has groups ("layer.0.attn.query").
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from curvlens.blocks import Blocks
from curvlens.report.data import Group

LAYER = re.compile(r"^(?P<stack>.*?)layer\.(?P<layer>\d+)(?:\.(?P<rest>.*))?$")
ROLES = ("query", "key", "value", "out", "up", "gate", "down")


def groups(blocks: Blocks) -> list[Group]:
    """The groups of a model's blocks, in their order."""
    members: dict[str, list[str]] = {}
    for name in blocks.names:
        members.setdefault(_base(name, blocks), []).append(name)
    return [_group(name, inside, blocks) for name, inside in members.items()]


def _base(name: str, blocks: Blocks) -> str:
    """A block's group: its name without ".bias" or ".weight", where that leaves a name to share."""
    for suffix in (".bias", ".weight"):
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return name


def _group(name: str, inside: list[str], blocks: Blocks) -> Group:
    place = LAYER.match(name)
    layer = int(place["layer"]) if place else None
    heads = max((blocks[b].heads[0] for b in inside if blocks[b].heads is not None), default=0)  # type: ignore[index]
    return Group(
        name=name,
        label=label(name),
        layer=layer,
        role=_role(name),
        size=sum(blocks[b].size for b in inside),
        blocks=inside,
        heads=heads,
    )


def label(name: str) -> str:
    """ "layer.0.attn.query" as "0 query", "encoder.layer.3.cross.key" as "enc 3 cross key"."""
    place = LAYER.match(name)
    if place is None:
        return name
    rest = (place["rest"] or "").replace("attn.", "").replace("mlp.", "").replace(".", " ")
    stack = {"encoder.": "enc ", "decoder.": "dec "}.get(place["stack"], "")
    return f"{stack}{place['layer']} {rest}".strip()


def _role(name: str) -> str:
    parts = name.split(".")
    if "norm" in parts[-1]:
        return "norm"
    if parts[-1] in ROLES and ({"attn", "cross", "mlp"} & set(parts)):
        return parts[-1]
    if parts[0] == "embed" or "embed" in parts[:2]:
        return "embed"
    return "head" if parts[0] == "head" else "other"


def sublayer(name: str) -> str:
    """The sublayer of a group: "layer.0.attn" of "layer.0.attn.query", "layer.0.norms" of its norms."""
    place = LAYER.match(name)
    if place is None or not place["rest"]:
        return name.split(".")[0] if place is None else name
    first = place["rest"].split(".")[0]
    return f"{place['stack']}layer.{place['layer']}.{'norms' if 'norm' in first else first}"


def layer_name(name: str) -> str:
    place = LAYER.match(name)
    return name.split(".")[0] if place is None else f"{place['stack']}layer.{place['layer']}"


def rows_of_a_map(found: list[Group], most: int) -> dict[str, list[str]]:
    """The rows of a map with at most `most` of them, as fine as that allows: name and blocks.

    Groups, or sublayers, or layers.
    """
    rows: dict[str, list[str]] = {}
    for coarse in (lambda name: name, sublayer, layer_name):
        rows = {}
        for group in found:
            rows.setdefault(coarse(group.name), []).extend(group.blocks)
        if len(rows) <= most:
            break
    return rows


def sums(rows: dict[str, list[str]], blocks: Blocks) -> Tensor:
    """`[rows, blocks]` of zeros and ones: which blocks a row adds up."""
    matrix = torch.zeros(len(rows), len(blocks), dtype=torch.float64)
    place = {name: i for i, name in enumerate(blocks.names)}
    for i, inside in enumerate(rows.values()):
        matrix[i, [place[name] for name in inside]] = 1
    return matrix
