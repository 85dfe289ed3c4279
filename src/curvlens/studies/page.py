"""The page of all results: claim, the paper's number, ours with its interval, verdict, figure.

`python -m curvlens.studies.page keep RESULT.json …` puts results into `docs/reproduction/`, rounded to twelve digits;
`python -m curvlens.studies.page` renders `docs/reproduction.md` and its figures from what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvlens.studies.plot import save
from curvlens.studies.registry import names
from curvlens.studies.run import Reproduction, accepted, read, reasons, shown, write

DOCS = Path("docs")
KEPT = "reproduction"
DIGITS = 12  # a finding on an exact law, judged to 1e-9, must be judged alike from what is kept
KEYS = ("study", "preset", "config", "code", "seconds", "machine", "measured")  # the rest follows from them

HEAD = """# What was reproduced

Every figure, table and claim of the papers that `curvlens reproduce` runs, with the paper's number, ours and a
verdict. Exact norms from closed forms wherever one fits. A verdict follows from ranges that each study states, with
reasons, and not from its results; intervals are 95 %, over repeats with other weights and other data. *Reproduced
with a difference*: the claim stands, and a number beside it is another one. *Undecided*: the interval is wider than
the range. Rendered by `make reproduction` from the measurements in `docs/reproduction/`. Each carries the hash of
the code that measured it; that later code gives the same is what the `smoke` runs of all studies test, against
stored numbers.
"""


def keep(result: Path, docs: Path = DOCS) -> Path:
    """Put a result's measurements, rounded, among the page's."""
    kept = json.loads(result.read_text())
    path = docs / KEPT / f"{kept['study']}.json"
    write(path, json.dumps(_rounded({key: kept[key] for key in KEYS}), separators=(",", ":")) + "\n")
    return path


def render(docs: Path = DOCS) -> Path:
    """The page and its figures."""
    results = [read(path) for name in names() if (path := docs / KEPT / f"{name}.json").exists()]
    lines = [HEAD, "| study | claim | verdict |", "|---|---|---|"]
    lines += [
        f"| [{made.study.name}](#{_anchor(made)}) | {_cell(made.study.claim)} | **{made.verdict}** |"
        for made in results
    ]
    left = [name for name in names() if name not in {made.study.name for made in results}]
    if left:
        lines += ["", f"Not on this page yet, though `curvlens reproduce` runs them: {', '.join(left)}."]
    for made in results:
        name = made.study.name
        save(made.figure(), docs / KEPT / f"{name}.png")
        lines += ["", *_section(made)]
    path = docs / "reproduction.md"
    write(path, "\n".join(lines) + "\n")
    return path


def _section(made: Reproduction) -> list[str]:
    study = made.study
    lines = [
        f"## {study.name}: {study.title}",
        "",
        f"*{study.source}.* {study.claim}",
        "",
        f"**{made.verdict.capitalize()}** (preset `{made.preset}`, {_time(made.seconds)} of a core; "
        f"{made.machine}; code `{made.code}`).",
        "",
        f"![{study.title}]({KEPT}/{study.name}.png)",
        "",
        "| | paper | ours | accepted | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {_cell(f.what)} | {_cell(f.paper)} | {shown(f.ours, f.error)} | {accepted(f)} | {f.outcome} |"
        for f in made.findings
    ]
    said = [f"- {f.what}: {f.said}" for f in made.findings if f.said and f.outcome == "does not hold"]
    if said:
        lines += ["", *said]
    if study.remarks:
        lines += ["", study.remarks]
    lines += ["", "Why these ranges:", "", *(f"- {line}" for line in reasons(made.findings))]
    return lines


def _anchor(made: Reproduction) -> str:
    text = f"{made.study.name}: {made.study.title}".lower()
    return "".join(c for c in text if c.isalnum() or c in " -_").strip().replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["keep"]:
        for result in arguments[1:]:
            print(keep(Path(result)))
    print(render())


if __name__ == "__main__":
    main(sys.argv[1:])
