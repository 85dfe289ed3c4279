"""Time and memory of curvature products, beside the peers, in one run: `python benchmarks/engines.py`.

Time is the least of some repeats, each next to a gradient of its own, in one process. Memory is the highest sum of what
torch's allocator handed out and took back during one call, from the profiler's record, each line in a process of its
own; a line that asks for more than the machine has free is reported so. Vectors are made before and not counted,
products are. Everything runs with the same attention, the one that has second derivatives.

Times want an idle machine and memory does not: `--part memory` and `--part time` measure one at a time, and figures are
kept from one call to the next. `--markdown benchmarks/engines.md` writes the tables.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from contenders import PROBLEMS, Line, Run, gradient, lines
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from curvlens.operator import free_memory

# In gradients, each of one pass forward and one backward of two units. From scratch a Hessian product is a gradient (3)
# and its tangent (6), a further one its tangent alone; a Gauss-Newton product is a forward pass (1) with its tangent
# (2) and one backward (2), and a further one does not need the first.
FLOORS = {
    ("Hessian", 1): 3.0,
    ("Hessian", 8): (3 + 7 * 2) / 8,
    ("Gauss-Newton", 1): 5 / 3,
    ("Gauss-Newton", 8): (5 + 7 * 4) / 24,
}
VECTORS = (1, 8)


def measure(problem: str, key: str, count: int) -> int:
    """Peak bytes of one call, above what was there before it."""
    model, ids = PROBLEMS[problem].build()
    stack = torch.randn(count, sum(p.numel() for p in model.parameters()))
    run = _prepared(model, ids)[key]
    with sdpa_kernel(SDPBackend.MATH):
        run(stack[:1])  # what is set up once is not counted
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            found = run(stack)
    del found
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _prepared(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Run]:
    every: dict[str, Callable[..., Run]] = {
        "gradient": gradient,
        **{line.key: line.prepare for line in lines()},
    }

    class Late(dict[str, Run]):
        def __missing__(self, key: str) -> Run:
            self[key] = every[key](model, ids)
            return self[key]

    return Late()


def memories(problem: str, chosen: list[Line], vectors: tuple[int, ...]) -> dict[tuple[str, int], int | None]:
    """Each in a process of its own, within what is free now; None for those that need more."""
    found: dict[tuple[str, int], int | None] = {}
    for key, count in [("gradient", 1), *((line.key, count) for line in chosen for count in vectors)]:
        room = int(0.8 * free_memory("cpu"))
        command = [sys.executable, __file__, "--measure", problem, key, str(count), str(room)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            found[key, count] = json.loads(done.stdout.splitlines()[-1])
        elif "allocate memory" in done.stderr or "MemoryError" in done.stderr or done.returncode < 0:
            found[key, count] = None
        else:
            raise RuntimeError(f"{key} with {count} vectors:\n{done.stderr}")
    return found


def times(
    problem: str, chosen: list[tuple[Line, int]], repeats: int
) -> tuple[float, dict[tuple[str, int], float]]:
    """Seconds of one gradient and of each line: the least of the repeats, which take turns."""
    model, ids = PROBLEMS[problem].build()
    stack = torch.randn(max(VECTORS), sum(p.numel() for p in model.parameters()))
    prepared = _prepared(model, ids)
    unit, found = float("inf"), {(line.key, count): float("inf") for line, count in chosen}
    with sdpa_kernel(SDPBackend.MATH):
        for line, _ in chosen:
            prepared[line.key](stack[:1])
        for _ in range(repeats):
            for line, count in chosen:
                unit = min(unit, _seconds(prepared["gradient"], stack))
                seconds = _seconds(prepared[line.key], stack[:count])
                found[line.key, count] = min(found[line.key, count], seconds)
    return unit, found


def _seconds(run: Run, stack: torch.Tensor) -> float:
    start = time.perf_counter()
    found: Any = run(stack)
    seconds = time.perf_counter() - start
    del found
    return seconds


def measured(problem: str, options: argparse.Namespace) -> dict[str, Any]:
    """`{problem: {"memory": …, "time": …}}` in bytes and seconds; what is not asked for now, as it was kept."""
    chosen = [line for line in lines() if options.only in line.key]
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep.exists() else {}
    found: dict[str, Any] = kept.setdefault(problem, {"memory": {}, "time": {}})
    if options.part in ("memory", "both"):
        peaks = memories(problem, chosen, VECTORS)
        found["memory"].update({f"{key} x {count}": peak for (key, count), peak in peaks.items()})
        _keep(kept, options.keep)
    if options.part in ("time", "both"):
        pairs = [(line, count) for line in chosen for count in VECTORS]
        peak = found["memory"].get
        fits = [(line, count) for line, count in pairs if peak(f"{line.key} x {count}", 0) is not None]
        unit, seconds = times(problem, fits, options.repeats)
        # all ratios of a table are of one run
        found["time"] = {f"{key} x {count}": time for (key, count), time in seconds.items()}
        found["time"]["gradient x 1"] = unit
        _keep(kept, options.keep)
    return kept


def _keep(figures: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1))


def table_of(problem: str, found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """A title, and rows of text: matrix, who, and time a vector and memory for each number of vectors."""
    peaks, seconds, rows = found["memory"], found["time"], []
    for matrix in dict.fromkeys(line.matrix for line in lines()):
        floors = (c for k in VECTORS for c in (f"{FLOORS[matrix, k]:.2f}", ""))
        rows.append([matrix, "floor of the time", *floors])
        for line in (line for line in lines() if line.matrix == matrix):
            cells = [matrix, line.who]
            for count in VECTORS:
                key = f"{line.key} x {count}"
                time, peak = seconds.get(key), peaks.get(key)
                cells.append("-" if time is None else f"{time / seconds['gradient x 1'] / count:.2f}")
                missing = "out of memory" if key in peaks else "-"
                cells.append(missing if peak is None else f"{peak / peaks['gradient x 1']:.2f}")
            rows.append(cells)
    sizes = [f"{1e3 * seconds['gradient x 1']:.0f} ms"] if seconds else []
    sizes += [f"{peaks['gradient x 1'] / 2**20:.0f} MiB"] if peaks else []
    return f"{PROBLEMS[problem].name}; one gradient: {', '.join(sizes)}", rows


def show(title: str, rows: list[list[str]], header: list[str]) -> None:
    table = Table(title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < 2 else "right")
    previous = rows[0][0] if rows else ""
    for row in rows:
        if row[0] != previous:
            table.add_section()
        previous = row[0]
        table.add_row(*row)
    Console().print(table)


def markdown(title: str, rows: list[list[str]], header: list[str]) -> str:
    every = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
    return "\n".join([f"### {title}", "", *("| " + " | ".join(row) + " |" for row in every), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=[*PROBLEMS], action="append", help="all of them by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", choices=["memory", "time", "both"], default="both", help="what to measure")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("out/engines.json"), help="where figures are kept")
    parser.add_argument("--markdown", type=Path, help="a file to write the tables to")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        problem, key, count, room = options.measure
        resource.setrlimit(resource.RLIMIT_DATA, (int(room), int(room)))
        print(measure(problem, key, int(count)))
        return
    header = ["matrix", "who"]
    for count in VECTORS:
        header += [
            f"time, {count} vector" + "s, each" * (count > 1),
            f"memory, {count} vector" + "s" * (count > 1),
        ]
    peers = ("torch", "curvlinops-for-pytorch", "hessian-eigenthings", "PyHessian")
    setting = ", ".join(f"{name} {version(name)}" for name in peers) + f"; {options.threads} threads, float32"
    text = [f"In gradients of the same run. {setting}.\n"]
    for problem in options.problem or PROBLEMS:
        kept = measured(problem, options)
        show(*table_of(problem, kept[problem]), header)
    text += [markdown(*table_of(problem, kept[problem]), header) for problem in PROBLEMS if problem in kept]
    if options.markdown:
        options.markdown.write_text("\n".join(text))


if __name__ == "__main__":
    main()
