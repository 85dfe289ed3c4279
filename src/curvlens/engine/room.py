"""What to do when memory runs out in a product: take smaller steps, and remember them for the landscape."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass, replace

import torch

from curvlens.landscape import Landscape

FEWEST_TOKENS = 16


@dataclass(frozen=True)
class Room:
    """Upper limits of the vectors of a pass, the tokens of a chunk of the head, and the samples at a time."""

    vectors: int | None = None
    tokens: int | None = None
    samples: int | None = None

    def smaller(self, vectors: int, tokens: int | None, samples: int) -> Room | None:
        """The next smaller steps than those given; None if there are none."""
        if vectors > 1:
            return replace(self, vectors=vectors // 2)
        if tokens is not None and tokens > FEWEST_TOKENS:
            return replace(self, tokens=max(FEWEST_TOKENS, tokens // 2))
        if samples > 1:
            return replace(self, samples=samples // 2)
        return None


_rooms: weakref.WeakKeyDictionary[Landscape, Room] = weakref.WeakKeyDictionary()


def room_of(land: Landscape) -> Room:
    return _rooms.get(land, Room())


def remember(land: Landscape, room: Room) -> None:
    _rooms[land] = room
    if land.device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU torch says so by a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def wanted(error: BaseException) -> str:
    """What was asked for when memory ran out, "3.2 GiB"; what the error says where it does not say that."""
    found = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if found is None:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return f"{float(found[1]) / 2**30:,.1f} GiB" if found[2] == "bytes" else f"{found[1]} {found[2]}"
