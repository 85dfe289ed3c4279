"""Two reports side by side: differences in units of their error, and findings that came or went.

A difference is that of two independent estimates, with the error `√(σ_a² + σ_b²)`; two exact numbers differ by what
they differ. Reports of the same weights, data and seed share their probes: then only rounding is between them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from curvlens.report.data import NUMBERS, Finding, Report
from curvlens.report.figures.pair import CLEAR, change, shared
from curvlens.report.figures.words import measured
from curvlens.report.terminal import COLUMNS, MARKS

SCHEMA = "curvlens-comparison/1"


@dataclass(frozen=True)
class Difference:
    """Of one number; `ratio` is that over its error, None where both are exact or an error is not known."""

    key: str
    label: str
    a: float
    b: float
    difference: float
    stderr: float | None
    ratio: float | None

    @property
    def clear(self) -> bool:
        """More than chance: `CLEAR` errors, or any difference of exact numbers beyond rounding."""
        if self.ratio is not None:
            return abs(self.ratio) >= CLEAR
        return self.stderr == 0 and abs(self.difference) > 1e-9 * max(abs(self.a), abs(self.b))


@dataclass(frozen=True)
class Comparison:
    a: Report
    b: Report
    names: tuple[str, str]
    numbers: list[Difference]
    gone: list[Finding]  # findings of a that b has not
    come: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "names": list(self.names),
            "same_weights": self.a.meta.weights_sha256 == self.b.meta.weights_sha256,
            "same_data": self.a.meta.data_sha256 == self.b.meta.data_sha256,
            "numbers": [{**asdict(n), "clear": n.clear} for n in self.numbers],
            "gone": [f.id for f in self.gone],
            "come": [f.id for f in self.come],
        }

    def to_json(self, path: Any = None) -> str:
        from curvlens.report.files import write

        content = json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)
        if path is not None:
            write(path, content)
        return content

    def to_html(self, path: Any = None) -> str:
        """One page: both runs, differences as figures, findings of both."""
        from curvlens.report.files import write
        from curvlens.report.page import comparison

        content = comparison(self.a, self.b, self.names)
        if path is not None:
            write(path, content)
        return content

    def __str__(self) -> str:
        a, b = (name if len(name) <= NAME else "…" + name[1 - NAME :] for name in self.names)
        lines = wrap(f"{self.names[0]}: {self.a.meta.title}", COLUMNS)
        lines += wrap(f"{self.names[1]}: {self.b.meta.title}", COLUMNS)
        lines += wrap(_what_is_alike(self.a, self.b), COLUMNS)
        lines += ["", f"{'':<30} {a:>15} {b:>15}  difference"]
        for n in self.numbers:
            how = "" if n.ratio is None else f" ({n.ratio:+.1f} σ)"
            mark = "*" if n.clear else " "
            lines.append(
                f"{_short(n.label):<30} {measured(n.a, 0):>15} {measured(n.b, 0):>15} "
                f"{mark}{measured(n.difference, 0)}{how}"
            )
        lines += ["", f"* differs by {CLEAR:g} errors σ or more, or is exact and differs"]
        for words, found in (
            (f"only in {self.names[0]}", self.gone),
            (f"only in {self.names[1]}", self.come),
        ):
            for f in found:
                lines += wrap(f"{words}: {MARKS[f.severity]}: {f.title}", COLUMNS, subsequent_indent="  ")
        return "\n".join(lines)


NAME = 15


def compare(
    a: Report | str | Path, b: Report | str | Path, names: tuple[str, str] | None = None
) -> Comparison:
    """Two reports, or the paths of their JSON or pages."""
    if names is None:
        names = (_name(a, "A"), _name(b, "B"))
        if names[0] == names[1]:
            names = ("A", "B")
    first, second = (r if isinstance(r, Report) else Report.from_json(r) for r in (a, b))
    numbers = []
    for key in shared(first, second):
        n, m = first.numbers[key], second.numbers[key]
        difference, error, ratio = change(n, m)
        if not math.isfinite(difference):
            continue
        numbers.append(
            Difference(
                key,
                NUMBERS.get(key, n.label),
                n.value,
                m.value,
                difference,
                error if math.isfinite(error) else None,
                ratio if math.isfinite(ratio) else None,
            )
        )
    known, later = {f.id for f in first.findings}, {f.id for f in second.findings}
    return Comparison(
        first,
        second,
        names,
        numbers,
        [f for f in first.findings if f.id not in later],
        [f for f in second.findings if f.id not in known],
    )


def _name(source: Report | str | Path, otherwise: str) -> str:
    return otherwise if isinstance(source, Report) else Path(source).stem


def _short(label: str) -> str:
    return label if len(label) <= 30 else label[:29] + "…"


def _what_is_alike(a: Report, b: Report) -> str:
    weights = "the same weights" if a.meta.weights_sha256 == b.meta.weights_sha256 else "other weights"
    data = "the same data" if a.meta.data_sha256 == b.meta.data_sha256 else "other data"
    return f"{weights}, {data}"
