"""Running a study: unit by unit, each kept on disk when it is done, so that an interrupted run goes on.

A run's folder is named by the hash of its config and of the code it can reach: `out/A-3a/cpu-3f0c…/`. There every
finished unit is a file, written whole or not at all; the result beside them is `result.json`, with `figure.png`.
A run that is started again with nothing changed reads what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from curvlens.progress import Progress
from curvlens.studies.code import code_hash
from curvlens.studies.plot import require_matplotlib, save
from curvlens.studies.registry import load, module
from curvlens.studies.study import Config, Finding, Study, verdict

FOLDER = Path("out") / "studies"


@dataclass(frozen=True)
class Reproduction:
    """A study's outcome. All of it follows from `measured`, the numbers that the units of work left."""

    study: Study
    preset: str
    config: Config
    code: str
    measured: Mapping[str, Any]
    seconds: float  # of a core's time, in all units: the same on a machine that others use, too
    machine: str
    folder: Path | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        return self.study.numbers(self.config, self.measured)

    @property
    def findings(self) -> list[Finding]:
        return self.study.judge(self.config, self.numbers)

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def figure(self) -> Any:
        """The plot in the paper's form, a matplotlib figure."""
        return self.study.plot(self.config, self.numbers)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; `read` makes a Reproduction of them again."""
        findings = [{**asdict(f), "outcome": f.outcome} for f in self.findings]
        return {
            "study": self.study.name,
            "title": self.study.title,
            "source": self.study.source,
            "claim": self.study.claim,
            "preset": self.preset,
            "verdict": self.verdict,
            "findings": findings,
            "numbers": self.numbers,
            "config": asdict(self.config),
            "code": self.code,
            "seconds": self.seconds,
            "machine": self.machine,
            "measured": dict(self.measured),
        }

    def to_json(self) -> str:
        return json.dumps(_plain(self.to_dict()))

    def __str__(self) -> str:
        lines = [
            f"{self.study.name}  {self.study.title}: {self.verdict} ({self.preset}, {self.seconds:.0f} s of a core)"
        ]
        lines += [f"  claim: {self.study.claim}"]
        findings = self.findings
        lines += [f"  {line}" for f in findings for line in _lines(f)]
        lines += ["  why these ranges:", *(f"    {line}" for line in reasons(findings))]
        return "\n".join(lines)


def _lines(finding: Finding) -> list[str]:
    made = f"{shown(finding.ours, finding.error)}  (paper: {finding.paper}; accepted: {accepted(finding)})"
    said = [f"    {finding.said}"] if finding.said and finding.outcome == "does not hold" else []
    return [f"{finding.outcome:>13}  {finding.what}: {made}", *said]


def reasons(findings: list[Finding]) -> list[str]:
    """The reasons of the accepted ranges, each once."""
    return list(dict.fromkeys(finding.why for finding in findings))


def accepted(finding: Finding) -> str:
    """The range in which a finding holds."""
    low, high = (f"{end:.4g}" for end in (finding.low, finding.high))
    if low == high:
        return low
    if math.isinf(finding.low):
        return f"≤ {high}"
    return f"≥ {low}" if math.isinf(finding.high) else f"{low} … {high}"


def shown(value: float, error: float = 0.0) -> str:
    """`1.23 ± 0.05`, a 95 % interval, or the number alone where it is exact for its seed."""
    if not error:
        return f"{value:.4g}"
    if not math.isfinite(error) or not math.isfinite(value):
        return f"{value:.4g} ± ?"
    digits = 2 + max(0, math.floor(math.log10(abs(value) / error))) if value else 2
    return f"{_rounded(value, min(digits, 6))} ± {_rounded(error, 2)}"


def _rounded(value: float, digits: int) -> str:
    """`210` and not `2.1e+02`."""
    return f"{float(f'{value:.{digits}g}'):.6g}"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what is kept."""


class Plan(NamedTuple):
    """What a run consists of: a file a unit of work, there when it is done."""

    study: Study
    config: Config
    code: str
    folder: Path
    files: dict[str, Path]


def plan(
    name: str, preset: str, out: str | Path = FOLDER, seed: int | None = None, device: str | None = None
) -> Plan:
    study = load(name)
    config = study.config(preset)
    config = replace(
        config,
        seed=config.seed if seed is None else seed,
        device=config.device if device is None else device,
    )
    code = code_hash(module(name))
    folder = Path(out) / name / f"{preset}-{_hash(config, code)}"
    files = {unit: folder / "units" / f"{unit}.json" for unit in study.units(config)}
    return Plan(study, config, code, folder, files)


def reproduce(
    name: str,
    preset: str = "cpu",
    *,
    out: str | Path = FOLDER,
    seed: int | None = None,
    device: str | None = None,
    figure: bool = True,
    progress: bool = True,
) -> Reproduction:
    """Run a study, or go on where an earlier run with the same config and code stopped, and judge it.

    Ctrl-C ends it at once; the units that are done are kept.

    >>> reproduce("A-table1", "smoke", figure=False).verdict
    'reproduced'
    """
    study, config, code, folder, files = plan(name, preset, out, seed, device)
    _require_device(config.device)
    if figure:
        require_matplotlib()
    measured, seconds = {}, 0.0
    with Progress(f"{name} ({preset})", len(files)) if progress else contextlib.nullcontext() as bar:
        for done, (unit, path) in enumerate(files.items()):
            if not path.exists():
                try:
                    _measure(study, config, unit, path)
                except KeyboardInterrupt:
                    raise Interrupted(f"interrupted after {done} of {len(files)} units of {name}") from None
            kept = json.loads(path.read_text())
            measured[unit] = kept["measured"]
            seconds += kept["seconds"]
            if bar is not None:
                bar.update(done + 1)
    made = Reproduction(study, preset, config, code, measured, seconds, _machine(config), folder)
    write(folder / "result.json", made.to_json())
    if figure:
        save(made.figure(), folder / "figure.png")
    return made


def _require_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"expected a device that computes in float64, cpu or cuda, got {device!r}: {first}"
        ) from error


def _measure(study: Study, config: Config, unit: str, path: Path) -> None:
    began = time.process_time()
    measured = study.measure(config, unit)
    write(path, json.dumps(_plain({"seconds": time.process_time() - began, "measured": measured})))


def read(path: str | Path) -> Reproduction:
    """A result again, judged by the code of today."""
    kept = json.loads(Path(path).read_text())
    study = load(kept["study"])
    kind = type(study.config(kept["preset"]))
    config = kind(**{key: _tuples(value) for key, value in kept["config"].items()})
    return Reproduction(
        study, kept["preset"], config, kept["code"], kept["measured"], kept["seconds"], kept["machine"],
        Path(path).parent,
    )  # fmt: skip


def write(path: Path, text: str) -> None:
    """The whole file or none: a process that is killed leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _hash(config: Config, code: str) -> str:
    text = json.dumps(asdict(config), sort_keys=True) + code
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: infinities and NaN become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _machine(config: Config) -> str:
    import torch

    if config.device.startswith("cuda"):
        where = torch.cuda.get_device_name(config.device)
    else:
        where = f"{torch.get_num_threads()} threads, {platform.machine()}"
    return f"torch {torch.__version__}, {where}"
