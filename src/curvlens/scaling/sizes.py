"""Curvature over a family of models and data sizes, and the power laws that it follows or does not.

A family is a function `family(size, data, seed)` that makes a `Landscape`: what `size` means (width, depth), how the
model is trained on the `data` samples and what the curvature is measured on is the family's own matter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curvlens.curvature import gauss_newton, hessian
from curvlens.estimate import eigsh, frobenius, sharpness, trace
from curvlens.estimate.result import Estimate, pm, table
from curvlens.landscape import Landscape
from curvlens.progress import Progress
from curvlens.scaling import law
from curvlens.scaling.law import PowerLaw

Measure = Callable[[Landscape, int], "Estimate | float"]
Family = Callable[[int, int, int], Landscape]


def _loss(land: Landscape, seed: int) -> float:
    return land.value().item()


def _gradient(land: Landscape, seed: int) -> float:
    return land.gradient().double().norm().item()


def _sharpness(land: Landscape, seed: int) -> Estimate:
    made = sharpness(hessian(land), tol=1e-2, copies=False, seed=seed, progress=False)
    return Estimate("sharpness", made.value, made.stderr, 0, made.products, made.converged)


def _trace(land: Landscape, seed: int) -> Estimate:
    return trace(hessian(land), samples=16, seed=seed, progress=False)


def _frobenius(land: Landscape, seed: int) -> Estimate:
    return frobenius(hessian(land), samples=16, seed=seed, progress=False)


def _condition(land: Landscape, seed: int) -> float:
    """`λ_max / λ_10` of the Gauss-Newton matrix: the full condition number of a singular matrix is no number."""
    values = eigsh(
        gauss_newton(land), k=10, which="LA", tol=1e-2, copies=False, seed=seed, progress=False
    ).values
    return (values[0] / values[-1]).item()


MEASURES: dict[str, Measure] = {
    "loss": _loss,
    "gradient": _gradient,
    "sharpness": _sharpness,
    "trace": _trace,
    "frobenius": _frobenius,
    "condition": _condition,
}
DEFAULT = ("loss", "sharpness", "trace", "frobenius")
AXES = ("parameters", "data")


@dataclass(frozen=True)
class Point:
    """One model: what was asked for, and what was measured, `{measure: (value, stderr)}`."""

    size: int
    data: int
    seed: int
    parameters: int
    scored: float
    values: dict[str, tuple[float, float]]


@dataclass(frozen=True, repr=False)
class Scaling:
    """All points, and the law of each measure along each axis that has at least three sizes."""

    points: tuple[Point, ...]
    laws: dict[tuple[str, str], PowerLaw]  # (measure, axis)
    refused: dict[tuple[str, str], str]  # why there is none
    missing: int = 0  # models that the time did not suffice for

    def law(self, measure: str, axis: str = "parameters") -> PowerLaw:
        """The law of a measure along "parameters" (at the largest data size) or "data" (at the largest model)."""
        if (measure, axis) in self.refused:
            raise ValueError(f"no law of {measure} against {axis}: {self.refused[measure, axis]}")
        if (measure, axis) not in self.laws:
            known = ", ".join(f"({m!r}, {a!r})" for m, a in self.laws)
            raise KeyError(f"expected a measure and an axis of {known}, got ({measure!r}, {axis!r})")
        return self.laws[measure, axis]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        laws = [{"measure": m, "axis": a, **found.to_dict()} for (m, a), found in self.laws.items()]
        refused = [{"measure": m, "axis": a, "why": why} for (m, a), why in self.refused.items()]
        return {
            "points": [asdict(point) for point in self.points],
            "laws": laws,
            "refused": refused,
            "missing": self.missing,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The numbers as JSON; also written to a file if a path is given."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __repr__(self) -> str:
        names = list(self.points[0].values)
        rows = [["size", "data", "seed", "parameters", *names]]
        for p in self.points:
            numbers = [
                pm(*p.values[name]) if p.values[name][1] else f"{p.values[name][0]:.4g}" for name in names
            ]
            rows.append([f"{p.size}", f"{p.data}", f"{p.seed}", f"{p.parameters:,}", *numbers])
        said = [f"  {found.statement}" for found in self.laws.values()]
        said += [f"  no law of {m} against {a}: {why}" for (m, a), why in self.refused.items()]
        left = f", {self.missing} more not measured: the time was up" if self.missing else ""
        return "\n".join([f"scaling, {len(self.points)} models{left}", table(rows), *said])


def scaling(
    family: Family,
    sizes: Sequence[int],
    data: Sequence[int] = (1,),
    seeds: int | Sequence[int] = 3,
    measures: Sequence[str] | Mapping[str, Measure] = DEFAULT,
    *,
    path: str | Path | None = None,
    confidence: float = 0.95,
    max_minutes: float | None = None,
) -> Scaling:
    """Measure curvature for every size, data size and seed, and fit power laws.

    `family(size, data, seed)` makes the landscape. `measures`: names of `MEASURES`, or `{name: function(landscape,
    seed)}` with a number or an Estimate. `path`: a file of JSON lines that keeps every point when it is measured; a run
    that was broken off goes on from there. Laws against the number of parameters are fitted at the largest data size,
    those against data for the largest model; the largest size is also left out and predicted.
    After `max_minutes` no further model is begun: `missing` says how many are left.
    """
    functions = _functions(measures)
    every = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    wanted = [(size, amount, seed) for size in sizes for amount in data for seed in every]
    if not wanted:
        raise ValueError("expected at least one size, one data size and one seed, got none")
    if len(set(wanted)) < len(wanted):
        raise ValueError("expected distinct sizes, data sizes and seeds, got one twice")
    kept = _read(path, list(functions))
    points: list[Point] = []
    began = time.monotonic()
    with Progress("scaling", len(wanted)) as progress:
        for number, (size, amount, seed) in enumerate(wanted):
            if points and max_minutes is not None and time.monotonic() - began > 60 * max_minutes:
                break
            if (size, amount, seed) not in kept:
                point = _measure(family(size, amount, seed), size, amount, seed, functions)
                kept[size, amount, seed] = point
                _append(path, point)
            points.append(kept[size, amount, seed])
            progress.update(number + 1)
    laws: dict[tuple[str, str], PowerLaw] = {}
    refused: dict[tuple[str, str], str] = {}
    for axis in AXES:
        along = _along(points, axis)
        if len({x for x, _ in along}) < 3:
            continue
        for name in functions:
            try:
                laws[name, axis] = law.fit(
                    [x for x, _ in along], [p.values[name][0] for _, p in along], axis, name, confidence
                )
            except ValueError as error:
                refused[name, axis] = str(error)
    return Scaling(tuple(points), laws, refused, len(wanted) - len(points))


def _functions(measures: Sequence[str] | Mapping[str, Measure]) -> dict[str, Measure]:
    if isinstance(measures, Mapping):
        return dict(measures)
    unknown = [name for name in measures if name not in MEASURES]
    if unknown or not measures:
        raise ValueError(f"expected measures of {', '.join(MEASURES)}, got {', '.join(unknown) or 'none'}")
    return {name: MEASURES[name] for name in measures}


def _measure(land: Landscape, size: int, data: int, seed: int, functions: Mapping[str, Measure]) -> Point:
    values = {}
    for name, function in functions.items():
        found = function(land, seed)
        error = float(found.stderr) if isinstance(found, Estimate) else 0.0
        values[name] = float(found), error
    return Point(size, data, seed, land.blocks.size, float(land.weight), values)


def _along(points: Sequence[Point], axis: str) -> list[tuple[float, Point]]:
    """The points of one axis, the other at its largest."""
    if axis == "parameters":
        most = max(p.data for p in points)
        return [(p.parameters, p) for p in points if p.data == most]
    largest = max(p.size for p in points)
    return [(p.data, p) for p in points if p.size == largest]


def _read(path: str | Path | None, measures: list[str]) -> dict[tuple[int, int, int], Point]:
    if path is None or not Path(path).exists():
        return {}
    kept = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            raw = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while it wrote
        if list(raw["values"]) != measures:
            raise ValueError(
                f"the points in {path} belong to another run: expected the measures {', '.join(measures)}, got "
                f"{', '.join(raw['values'])} in line {number}; delete it, or give another path"
            )
        raw["values"] = {name: (value, error) for name, (value, error) in raw["values"].items()}
        point = Point(**raw)
        kept[point.size, point.data, point.seed] = point
    return kept


def _append(path: str | Path | None, point: Point) -> None:
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with open(path, "a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(point)) + "\n")
        file.flush()
