"""What a record says of a training, in words, with what it rests on and what to do.

Ratios are the sharpness that the optimizer sees over its limit of stability; thresholds are in `thresholds.py`. A run
with minibatches lives with ratios about one, where curvature stops to rise (the edge of stability), and Adam's first
steps, whose P is of a few gradients, exceed the limit without harm: so a finding asks for more than a single ratio
above one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from curvlens.report.data import Finding, shown
from curvlens.report.findings import ranked
from curvlens.training import thresholds as t

if TYPE_CHECKING:
    from curvlens.training.record import Track

NAMES = ("warm-up-too-short", "rate-beyond-the-limit", "blocks-differ-by-orders", "spike")
COHEN = "Cohen et al., Adaptive gradient methods at the edge of stability (2022)"
GILMER = "Gilmer et al., A loss curvature perspective on training instabilities (2021)"


def findings(track: Track) -> list[Finding]:
    """All that the record carries, the gravest first."""
    rules: list[Callable[[Track], Finding | None]] = [warmup_too_short, rate_beyond, unlike_blocks, spike]
    return ranked(found for rule in rules if (found := rule(track)) is not None)


def _ratios(track: Track) -> list[tuple[int, float, float]]:
    """Step, ratio and rate of each measurement that has them."""
    columns = zip(track.steps, track.numbers("preconditioned", "ratio"), track.numbers("rate"), strict=True)
    return [row for row in columns if all(map(math.isfinite, row[1:]))]


def _early(track: Track) -> int:
    """The last step of the early phase: three warm-ups, or a share of the run where there was none."""
    ends = [step for step, words in track.events if words == "warm-up ends"]
    steps, _ = track.training("rate")
    last = max([*track.steps[-1:], *steps[-1:]], default=0)
    return max(t.WARM_UPS * ends[0] if ends else 0, int(t.EARLY * last), 4 * t.FIRST)


def _harm(track: Track) -> list[tuple[int, str]]:
    return [event for event in track.events if event[1] in ("the loss spikes", "the loss is not a number")]


def _adaptive(track: Track) -> bool:
    return track.header.get("optimizer") in ("Adam", "AdamW", "RMSprop")


# -- the rate


def _overruns(track: Track) -> list[tuple[int, float, float]]:
    """Measurements beyond the limit in the early phase that count: Adam's very first steps only beside harm."""
    early = _early(track)
    over = [row for row in _ratios(track) if row[0] <= early and row[1] > t.BEYOND]
    if _adaptive(track) and not any(step <= early for step, _ in _harm(track)):
        over = [row for row in over if row[0] > t.FIRST]
    return over


def _allowed_later(track: Track) -> bool:
    """Whether after the early phase rates of at least half the peak lie within the limit."""
    peak = max((rate for _, _, rate in _ratios(track)), default=0.0)
    later = [ratio for step, ratio, rate in _ratios(track) if step > _early(track) and rate >= t.LATER * peak]
    return len(later) >= 2 and median(later) < 1 and max(later) < t.BEYOND


def warmup_too_short(track: Track) -> Finding | None:
    """The rate rose faster than curvature fell: beyond the limit early, within it later at the same rate."""
    over, harm = _overruns(track), [e for e in _harm(track) if e[0] <= _early(track)]
    if not over or not _allowed_later(track) or (len(over) < 2 and not harm):
        return None
    peak = max(rate for _, _, rate in _ratios(track))
    # with a linear warm-up of W steps the ratio at step t is r_t(peak) t/W: it is at most one from W = t r_t(peak) on
    needed = max(step * ratio * peak / rate for step, ratio, rate in over)
    ends = [step for step, words in track.events if words == "warm-up ends"]
    step, ratio, _ = max(over, key=lambda row: row[1])
    later = median(r for s, r, rate in _ratios(track) if s > _early(track) and rate >= t.LATER * peak)
    return Finding(
        "warm-up-too-short",
        "problem" if harm else "warning",
        "The warm-up is too short",
        f"At step {step:,} the sharpness was {shown(ratio, 3)} times what the learning rate allows; later, at no less "
        f"than half the peak rate, it is {shown(later, 3)} times. The rate is fit for the run, but came before the "
        "curvature of the start had gone.",
        [
            f"{len(over)} measurements of the first {_early(track):,} steps lie above {t.BEYOND:g} times the limit",
            f"warm-up ended at step {ends[0]:,}" if ends else "the rate did not rise in steps",
            *(f"step {s:,}: {words}" for s, words in harm),
        ],
        "From the curvature on the held batches; a slower start would have changed the curvature that it met.",
        f"Raise the rate over at least {math.ceil(needed):,} steps, or lower its peak {shown(ratio, 3)} times.",
        GILMER,
    )


def rate_beyond(track: Track) -> Finding | None:
    """Ratios far above one, or for long, or before the loss was no number, where warm-up is not at fault."""
    if warmup_too_short(track) is not None:
        return None
    rows = _ratios(track)
    settled = [row for row in rows if row[0] > t.FIRST] if _adaptive(track) else rows
    runs = [min(row[1] for row in settled[i : i + t.AGREE]) for i in range(len(settled) - t.AGREE + 1)]
    far = max((row[1] for row in settled), default=0.0)
    lost = [step for step, words in _harm(track) if words == "the loss is not a number"]
    before = [row[1] for row in rows if lost and row[0] <= lost[0]]
    diverged = bool(before) and max(before) > 1
    if not diverged and far < t.FAR and max(runs, default=0.0) < t.BEYOND:
        return None
    step, ratio, rate = max(settled if not diverged else rows, key=lambda row: row[1])
    over = sum(row[1] > 1 for row in rows)
    return Finding(
        "rate-beyond-the-limit",
        "problem" if diverged or far >= t.FAR else "warning",
        "The learning rate is beyond its limit of stability",
        f"At step {step:,} the sharpness that {track.header.get('optimizer') or 'the optimizer'} sees was "
        f"{shown(ratio, 3)} times the limit of its rate {shown(rate, 3)}"
        + (f", and from step {lost[0]:,} the loss is not a number." if diverged else "."),
        [
            f"above the limit at {over} of {len(rows)} measurements",
            *(f"{w} at step {s:,}" for s, w in _harm(track)),
        ],
        "The limit is that of a quadratic without noise; beyond it the step along the sharpest direction grows.",
        f"Lower the learning rate to {shown(rate / ratio, 2)} or less where curvature is as it was there.",
        COHEN,
    )


# -- blocks


def _curvature_of_blocks(measurement: dict[str, Any], sizes: list[int]) -> list[tuple[float, float]]:
    """`‖H_b·‖_F / √n_b` and its error of each group, as the optimizer sees it: the curvature of one parameter."""
    blocks = measurement.get("blocks") or {}
    name = "optimizer_row_norm" if "optimizer_row_norm" in blocks else "row_norm"
    values, errors = blocks.get(name), blocks.get(f"{name}_error")
    if values is None or errors is None or len(values) != len(sizes):
        return []
    number = [math.nan if v is None else v for v in values]
    error = [math.inf if e is None else e for e in errors]
    return [(v / n**0.5, e / n**0.5) for v, e, n in zip(number, error, sizes, strict=True)]


def unlike_blocks(track: Track) -> Finding | None:
    """Blocks whose curvature differs by orders over the last measurements, and the rates that level them."""
    names, sizes = track.header.get("blocks") or [], track.header.get("sizes") or []
    rows = [found for m in track.measurements[-3:] if (found := _curvature_of_blocks(m, sizes))]
    if len(rows) < 2 or len(names) < 2:
        return None
    size = [median(row[b][0] for row in rows) for b in range(len(names))]
    error = [median(row[b][1] for row in rows) for b in range(len(names))]
    known = [b for b in range(len(names)) if math.isfinite(size[b]) and size[b] > 0 and error[b] < size[b]]
    if len(known) < 2:
        return None
    top, low = max(known, key=lambda b: size[b]), min(known, key=lambda b: size[b])
    if size[top] - error[top] < t.ORDERS * (size[low] + error[low]):
        return None
    ordered = sorted(known, key=lambda b: -size[b])
    chosen = ordered if len(ordered) <= 8 else [*ordered[:4], *ordered[-4:]]
    rates = [f"{names[b]}: {shown(size[top] / size[b], 2)}" for b in chosen]
    return Finding(
        "blocks-differ-by-orders",
        "warning",
        "Curvature differs by orders between blocks",
        f"A parameter of {names[top]} sees {shown(size[top] / size[low], 2)} times the curvature of one of "
        f"{names[low]}, as the optimizer scales them. The sharpest block sets the rate for all, and the flattest "
        "hardly moves.",
        [f"{names[b]}: ‖H_b·‖_F/√n = {shown(size[b], 3)} ± {shown(error[b], 2)}" for b in (top, low)],
        f"Medians of the last {len(rows)} measurements, each from {track.header.get('samples', 'few')} probes.",
        "Rates that level the blocks, in times that of the sharpest: " + "; ".join(rates) + ".",
        "Zhang et al., Why Transformers need Adam (2024)",
        [names[b] for b in (ordered[0], ordered[-1])],
    )


# -- spikes


def spike(track: Track) -> Finding | None:
    """The first spike of the loss, and the block that stands out in the measurements around it."""
    harm = _harm(track)
    if not harm:
        return None
    step, words = harm[0]
    before = [m for m in track.measurements if m["step"] < step and m.get("blocks")]
    after = [m for m in track.measurements if m["step"] >= step and m.get("blocks")]
    names = track.header.get("blocks") or []
    block, evidence = _cause(before, after, names)
    text = f"At step {step:,} {words}."
    return Finding(
        "spike",
        "warning" if words == "the loss spikes" else "problem",
        f"The loss spikes, and {block} stands out" if block else "The loss spikes, and no block stands out",
        text
        + (
            f" {block} is where it comes from." if block else " Curvature and weights do not tell where from."
        ),
        evidence,
        "Told from the measurements just before and at the spike; in between more may have happened.",
        f"Look at the rate, the gradients and the scale of {block} before step {step:,}."
        if block
        else f"Look at the data of step {step:,}: a batch unlike the others leaves no trace in the curvature before.",
        GILMER,
        [block] if block else [],
    )


def _cause(
    before: list[dict[str, Any]], after: list[dict[str, Any]], names: list[str]
) -> tuple[str, list[str]]:
    """The block whose weights have jumped, or in which the sharpest direction lies, with the evidence."""
    if before and after:
        jumps = _changes(before[-1], after[0], "weight")
        ordered = sorted(range(len(jumps)), key=lambda b: -jumps[b])
        if len(ordered) > 1 and jumps[ordered[0]] > max(math.log(t.JUMP), t.APART * jumps[ordered[1]]):
            first, second = (math.exp(jumps[b]) for b in ordered[:2])
            return names[ordered[0]], [
                f"from step {before[-1]['step']:,} to {after[0]['step']:,} the norm of its weights changed {first:.3g} "
                f"times; that of any other block at most {second:.3g} times"
            ]
    for m in (*after[:1], *before[-1:]):
        ratio = (m.get("preconditioned") or {}).get("ratio") or 0.0
        mass = m["blocks"].get("optimizer_mass") or []
        if mass and max(mass) > t.CONCENTRATED and ratio > 1:
            first = max(range(len(mass)), key=lambda b: mass[b])
            return names[first], [
                f"at step {m['step']:,} {mass[first]:.0%} of the sharpest direction that the optimizer sees lie in it, "
                f"at {ratio:.3g} times the limit"
            ]
    return "", []


def _changes(before: dict[str, Any], after: dict[str, Any], key: str) -> list[float]:
    """How many e-folds each block's number changed, up or down."""
    old, new = before["blocks"].get(key) or [], after["blocks"].get(key) or []
    if len(old) != len(new):
        return []
    return [
        abs(math.log(b / a)) if a and b and a > 0 and b > 0 else 0.0 for a, b in zip(old, new, strict=True)
    ]
