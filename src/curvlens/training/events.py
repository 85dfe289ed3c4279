"""What a record shows: the tracker's own marks, and where the curves turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from curvlens.training import thresholds as t

if TYPE_CHECKING:
    from curvlens.training.record import Track


def events(track: Track) -> list[tuple[int, str]]:
    """Steps with words, in order."""
    found = list(track.marks)
    for step in (sharpening(track), edge(track)):
        if step is not None:
            found.append(step)
    return sorted(found, key=lambda mark: mark[0])


def sharpening(track: Track) -> tuple[int, str] | None:
    """Where λ_max begins a rise to twice its lowest value or more, over at least three measurements."""
    values = track.numbers("lambda_max", "value")
    known = [(step, v) for step, v in zip(track.steps, values, strict=True) if math.isfinite(v) and v > 0]
    if len(known) < t.AGREE + 1:
        return None
    low = min(range(len(known) - t.AGREE), key=lambda i: known[i][1])
    rise = max(v for _, v in known[low:]) / known[low][1]
    grown = sum(b[1] > a[1] for a, b in zip(known[low:], known[low + 1 :], strict=False))
    if rise < t.SHARPENING or grown < t.AGREE or 2 * grown <= len(known) - 1 - low:
        return None
    return known[low][0], f"progressive sharpening begins: λ_max rises {rise:.3g} times"


def edge(track: Track) -> tuple[int, str] | None:
    """Where the sharpness that the optimizer sees reaches its limit and stays about there."""
    ratios = list(zip(track.steps, track.numbers("preconditioned", "ratio"), strict=True))
    inside = [t.EDGE[0] <= ratio <= t.EDGE[1] for _, ratio in ratios]
    for i in range(len(ratios) - t.AGREE + 1):
        if all(inside[i : i + t.AGREE]):
            return ratios[i][0], "the edge of stability is reached"
    return None
