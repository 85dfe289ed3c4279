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
    seconds: float  # of measuring, without what was found on disk ready
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
            f"{self.study.name}  {self.study.title}: {self.verdict} ({self.preset}, {self.seconds:.0f} s)"
        ]
        lines += [f"  claim: {self.study.claim}"]
        lines += [f"  {line}" for f in self.findings for line in _lines(f)]
        return "\n".join(lines)


def _lines(finding: Finding) -> list[str]:
    made = f"{shown(finding.ours, finding.error)}  (paper: {finding.paper})"
    said = [f"    {finding.said}"] if finding.said and finding.outcome == "does not hold" else []
    return [f"{finding.outcome:>13}  {finding.what}: {made}", *said]


def shown(value: float, error: float = 0.0) -> str:
    """`1.23 ± 0.05`, a 95 % interval, or the number alone where it is exact for its seed."""
    if not error:
        return f"{value:.4g}"
    if not math.isfinite(error) or not math.isfinite(value) or not value:
        return f"{value:.4g} ± {error:.2g}" if math.isfinite(error) else f"{value:.4g} ± ?"
    digits = 2 + max(0, math.floor(math.log10(abs(value) / error)))
    return f"{value:.{min(digits, 6)}g} ± {error:.2g}"


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


def _measure(study: Study, config: Config, unit: str, path: Path) -> None:
    began = time.perf_counter()
    measured = study.measure(config, unit)
    write(path, json.dumps(_plain({"seconds": time.perf_counter() - began, "measured": measured})))


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
