"""What a tracker writes and how it is read again: JSON lines, only ever appended, each on disk before the next step.

    {"kind": "header", "start": 0, "model": …, "blocks": […], …}      at every start of a run; and where what
                                                                      trains changes, with "start": null
    {"kind": "measurement", "step": 100, "lambda_max": {…}, …}
    {"kind": "event", "step": 120, "words": "the loss spikes"}
    {"kind": "training", "train": {"step": […], "loss": […]}}         what came after the last measurement

A run that goes on from a checkpoint writes a header with the step at which it starts: measurements after that step
that stand before the header belong to what was undone, and are read no more. A line that a crash cut short is dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curvlens.report.data import Finding

SCHEMA = "curvlens-track/1"


class Journal:
    """A file of JSON lines to append to. Without a path it writes nothing."""

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend(self.path)

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Append one line and see it on the disk: what was written survives a killed process and a dead machine."""
        if self.path is None:
            return
        line = json.dumps({"kind": kind, **plain(content)}, allow_nan=False, ensure_ascii=False)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _mend(path: Path) -> None:
    """Cut off a last line without an end."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        keep = size
        while keep:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)


def plain(value: Any) -> Any:
    """For JSON: null for what is not a finite number."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Keeper:
    """The record of a run that is under way: its `Track`, and the same on the disk.

    A header stands before all else that this run writes, and again where what trains has changed; `settings()` is
    what it says of the measurements.
    """

    def __init__(self, path: str | Path | None, settings: Callable[[], Mapping[str, Any]]):
        self.journal, self.settings = Journal(path), settings
        self.track = Track()
        self._start: int | None = 0  # where this run starts; None for a header in its midst
        self._begun = False  # whether the header is written

    @property
    def path(self) -> Path | None:
        return self.journal.path

    def begin(self) -> None:
        """Write the header, if it is not written."""
        if not self._begun:
            self._begun = True
            self._append("header", {"schema": SCHEMA, "start": self._start, **self.settings()})

    def write(self, kind: str, content: dict[str, Any]) -> None:
        self.begin()
        self._append(kind, content)

    def changed(self) -> None:
        """Other parameters train from here on."""
        self._start, self._begun = None, False
        self.begin()

    def restart(self, step: int) -> None:
        """The run starts at a step: after 0, from what the file has."""
        if step and self.path is not None and self.path.exists() and self.path.stat().st_size:
            self.track = Track.read(self.path)
        self._start, self._begun = step, False

    def _append(self, kind: str, content: dict[str, Any]) -> None:
        self.journal.write(kind, content)
        self.track.add(kind, content)


@dataclass
class Track:
    """The record of a run, in the order of steps."""

    header: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # written by the tracker while it ran
    tail: list[dict[str, Any]] = field(
        default_factory=list
    )  # training after a measurement, {"step", "loss", …}

    @classmethod
    def read(cls, path: str | Path) -> Track:
        """From a file of JSON lines, which may still be written to."""
        track, known = cls(), False
        text = Path(path).read_text(encoding="utf-8")
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
                kind = content.pop("kind")
            except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
                if number == len(lines):  # the one being written, or cut short
                    break
                raise ValueError(
                    f"expected lines of JSON as a Tracker writes them, got another in line {number} of {path}"
                ) from None
            known |= kind == "header"
            track.add(kind, content)
        if not known:
            raise ValueError(f"expected the track of a run, got {path} without a header")
        track.measurements.sort(key=lambda measurement: measurement["step"])  # checkpoints in any order
        return track

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """One line more."""
        if kind == "header":
            if content.get("schema") != SCHEMA:
                raise ValueError(f"expected a track of {SCHEMA!r}, got {content.get('schema')!r}")
            if content.get("start") is not None:
                self._go_back(int(content["start"]))
            self.header = content
        elif kind == "measurement":
            self.measurements.append(content)
        elif kind == "event":
            self.marks.append((content["step"], content["words"]))
        elif kind == "training":
            self.tail.append(content["train"])
        # kinds of later versions are passed over

    def _go_back(self, start: int) -> None:
        """Forget what came after a step; at 0, all."""
        self.measurements = [m for m in self.measurements if start and m["step"] <= start]
        self.marks = [mark for mark in self.marks if mark[0] <= start]
        self.tail = self.tail if start else []
        for part in [*(m.get("train") or {} for m in self.measurements), *self.tail]:
            kept = [i for i, step in enumerate(part.get("step", ())) if step <= start]
            for key, values in part.items():
                part[key] = [values[i] for i in kept]

    # -- asking

    @property
    def steps(self) -> list[int]:
        return [m["step"] for m in self.measurements]

    def series(self, *path: str) -> list[Any]:
        """One entry of each measurement, None where it was not measured: `series("lambda_max", "value")`."""
        found = []
        for measurement in self.measurements:
            value: Any = measurement
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            found.append(value)
        return found

    def numbers(self, *path: str) -> list[float]:
        """The same as numbers, NaN where it was not measured."""
        return [math.nan if v is None else float(v) for v in self.series(*path)]

    def training(self, key: str = "loss") -> tuple[list[int], list[float]]:
        """Steps of training and what was handed over of each: "loss", "rate" or "gradient" (its norm)."""
        found: dict[int, float] = {}
        for part in [*(m.get("train") or {} for m in self.measurements), *self.tail]:
            for step, value in zip(part.get("step", ()), part.get(key, ()), strict=False):
                if value is not None:
                    found[step] = float(value)  # "nan" and "inf" too
        steps = sorted(found)
        return steps, [found[step] for step in steps]

    @property
    def events(self) -> list[tuple[int, str]]:
        """Steps with words for what happened there: the tracker's own marks, and what the curves show."""
        from curvlens.training.events import events

        return events(self)

    @property
    def findings(self) -> list[Finding]:
        """What the record says of the run."""
        from curvlens.training.findings import findings

        return findings(self)

    # -- telling

    def to_html(self, path: Any = None, title: str = "Curvature through training") -> str:
        """The page of the run, one file; written to `path` where one is given."""
        from curvlens.report.files import write
        from curvlens.report.page import timeline

        content = timeline(self, self.events, title, self.findings)
        if path is not None:
            write(path, content)
        return content

    def to_dict(self) -> dict[str, Any]:
        from curvlens.report.schema import encode

        return {
            "schema": SCHEMA,
            "header": self.header,
            "measurements": self.measurements,
            "events": [list(event) for event in self.events],
            "findings": encode(self.findings),
        }

    def __str__(self) -> str:
        return "\n".join(_told(self))

    __repr__ = __str__


def _told(track: Track) -> Iterable[str]:
    if not track.measurements:
        yield "a track without a measurement"
        return
    yield (
        f"{len(track.measurements)} measurements of {track.header.get('model', 'a model')}, "
        f"steps {track.steps[0]:,} to {track.steps[-1]:,}"
    )
    columns = {
        "step": [f"{step:,}" for step in track.steps],
        "loss": [_shown(v) for v in track.numbers("loss")],
        "λ_max": [_shown(v) for v in track.numbers("lambda_max", "value")],
        "2/η": [_shown(v) for v in track.numbers("descent_threshold")],
        "λ_min": [_shown(v) for v in track.numbers("lambda_min", "value")],
        "of the limit": [_shown(v) for v in track.numbers("preconditioned", "ratio")],
    }
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    yield "  ".join(name.rjust(width) for name, width in widths.items())
    for row in zip(*columns.values(), strict=True):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True))
    for step, words in track.events:
        yield f"step {step:,}: {words}"
    for finding in track.findings:
        yield f"{finding.severity}: {finding.title}. {finding.text} {finding.action}"


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
