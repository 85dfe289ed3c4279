"""The main job: what curves, where and why, stage by stage; none that fails or is interrupted loses the rest."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import curvlens
from curvlens import families
from curvlens.engine.room import is_out_of_memory, wanted
from curvlens.landscape import Landscape
from curvlens.report.data import SCHEMA, Group, Meta, Report, Stage
from curvlens.report.files import writable, write
from curvlens.report.findings import findings
from curvlens.report.presets import Preset, named
from curvlens.report.schema import decode, encode
from curvlens.report.stages import STAGES, Context, Interrupted, Outcome, Plan, Skip

Watch = Callable[[int, int, str, "Stage | None"], None]  # index, count, title; the stage once it is done


def analyze(
    land: Landscape,
    preset: str | Preset = "standard",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    max_products: int | None = None,
    max_minutes: float | None = None,
    resume: str | Path | None = None,
    seed: int = 0,
    progress: bool | None = None,
    watch: Watch | None = None,
    title: str = "",
    skip: tuple[str, ...] = (),
) -> Report:
    """All that can be said about the curvature of a model, with errors and findings in words.

    preset       "quick", "standard" or "thorough": how many samples; `presets.PRESETS` lists them
    optimizer    the one in use, after a step: sharpness as it sees it, and the threshold of its learning rate
    max_products, max_minutes   end with what there is; a stage that was cut is marked "partial"
    resume       a folder that keeps the state: started again with the same arguments, the run goes on from there
    progress     bars on stderr; None: on a terminal only. `watch(index, count, title, stage)` is called around stages
    skip         names of stages to leave out, of `STAGES`

    Ctrl-C ends the stage and returns what there is. A model that cannot be analysed at all (NaN weights, ids beyond
    the vocabulary) raises before any stage. With few parameters the whole matrices are formed and all is exact.
    """
    chosen = named(preset)
    unknown = set(skip) - {plan.name for plan in STAGES}
    if unknown:
        raise ValueError(f"expected stages of {', '.join(p.name for p in STAGES)}, got {', '.join(unknown)}")
    began = time.monotonic()
    at = Context(land, chosen, seed, optimizer, max_products=max_products, progress=progress)
    at.deadline = None if max_minutes is None else began + 60 * max_minutes
    at.found["notes"] = [*land.notes, *_unknown(land)]
    with _enough_memory():
        land.probe()
    memory = None if resume is None else Memory(Path(resume), _identity(land, chosen, seed, optimizer))
    at.folder = None if memory is None else memory.folder
    stages: list[Stage] = []
    for index, plan in enumerate(STAGES):
        if watch is not None:
            watch(index, len(STAGES), plan.title, None)
        stage = _run(plan, at, stages, memory, skip)
        stages.append(stage)
        if watch is not None:
            watch(index, len(STAGES), plan.title, stage)
    report = _assemble(at, stages, title, sum(stage.seconds for stage in stages))  # of earlier runs too
    return replace(report, findings=findings(report))


def _run(plan: Plan, at: Context, before: list[Stage], memory: Memory | None, skip: tuple[str, ...]) -> Stage:
    """One stage: what was kept of it, or measured now; its fault is written down, and the next one's turn comes."""
    if plan.name in skip:
        return Stage(plan.name, plan.title, "skipped", "left out as asked")
    if any(stage.why == "interrupted" for stage in before):
        return Stage(plan.name, plan.title, "partial", "not begun: the run was interrupted before")
    if _used_up(at) and plan.name != "point":
        return Stage(plan.name, plan.title, "partial", "not begun: the budget was used up")
    kept = None if memory is None else memory.stage(plan.name)
    if kept is not None:
        stage, fields = kept
        _merge(at.found, fields)
        at.spent += stage.products
        return stage
    began, spent = time.monotonic(), at.spent
    outcome = Outcome({}, "failed", "")
    try:
        with _enough_memory() if plan.name == "point" else nullcontext():
            outcome = plan.measure(at)
    except Skip as reason:
        outcome = Outcome({}, "skipped", str(reason))
    except Interrupted as reason:
        outcome = Outcome({}, "partial", str(reason))
    except KeyboardInterrupt:
        outcome = Outcome({}, "partial", "interrupted")
    except Exception as error:
        if plan.name == "point":
            raise  # without a loss and a gradient there is nothing to say: the input is at fault
        outcome = Outcome({}, "failed", _reason(error))
    _merge(at.found, outcome.fields)
    at.spent += outcome.products
    seconds = time.monotonic() - began
    why = "interrupted" if outcome.why.startswith("interrupted") else outcome.why
    stage = Stage(plan.name, plan.title, outcome.status, why, seconds, at.spent - spent)
    if memory is not None and outcome.status in ("exact", "estimated", "skipped"):
        try:
            memory.keep(stage, outcome.fields)
        except OSError as error:  # a full disk ends the keeping, not the analysis
            at.found["notes"].append(
                f"the state could not be kept in {memory.folder}: {error.strerror or error}"
            )
    return stage


@contextmanager
def _enough_memory() -> Iterator[None]:
    """For loss and gradient, without which there is nothing to say: where memory runs out, what takes less of it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"expected memory for the loss and its gradient, got too little for {wanted(error)} "
            "more; take fewer samples at a time (micro_batch=1, or --micro-batch 1), shorter sequences, or float32"
        ) from error


def _used_up(at: Context) -> bool:
    late = at.deadline is not None and time.monotonic() >= at.deadline
    return late or (at.max_products is not None and at.spent >= at.max_products)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _merge(found: dict[str, Any], fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        if key in ("numbers", "notes") and key in found:
            found[key] = {**found[key], **value} if key == "numbers" else [*found[key], *value]
        else:
            found[key] = value


# -- the state on disk


class Memory:
    """The finished stages of a run, in a folder; each estimator keeps its own state beside them."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self.path = folder, folder / "stages.json"
        writable(folder)
        self.content: dict[str, Any] = {"identity": identity, "stages": {}}
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            wrong = [key for key, value in identity.items() if kept["identity"].get(key) != value]
            if wrong:
                raise ValueError(
                    f"expected the state of this run in {str(folder)!r}, got one with another {', '.join(wrong)}; "
                    "delete the folder, or give another"
                )
            self.content = kept

    def keep(self, stage: Stage, fields: dict[str, Any]) -> None:
        self.content["stages"][stage.name] = {"stage": encode(stage), "fields": encode(fields)}
        write(self.path, json.dumps(self.content))

    def stage(self, name: str) -> tuple[Stage, dict[str, Any]] | None:
        kept = self.content["stages"].get(name)
        if kept is None:
            return None
        from typing import get_type_hints

        hints = get_type_hints(Report)
        fields = {key: decode(hints[key], value, key) for key, value in kept["fields"].items()}
        return decode(Stage, kept["stage"], "stage"), fields


def _identity(
    land: Landscape, preset: Preset, seed: int, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "preset": preset.name,
        "seed": seed,
        "weights": weights_hash(land),
        "data": data_hash(land),
        "dtype": str(land.dtype),
        "loss": land.loss.name,
        "optimizer": "" if optimizer is None else optimizer_hash(optimizer),
    }


# -- what was analysed


def weights_hash(land: Landscape) -> str:
    """SHA-256 of names, shapes and values of all parameters, in the order of names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(land.model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def data_hash(land: Landscape) -> str:
    """SHA-256 of all tensors of all batches."""
    digest = hashlib.sha256()
    for piece in land.pieces():
        for tensor in piece.tensors():
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def optimizer_hash(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of an optimizer's kind, settings and state."""
    saved = optimizer.state_dict()
    digest = hashlib.sha256(f"{type(optimizer).__name__}{saved['param_groups']}".encode())
    for index, kept in sorted(saved["state"].items()):
        for name, value in sorted(kept.items()):
            digest.update(f"{index}{name}".encode())
            digest.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def family_of(land: Landscape) -> str:
    """The family that named the blocks; that of parameter names where none is known."""
    return families.find(land.model).name


def _unknown(land: Landscape) -> list[str]:
    if families.find(land.model) is not families.PARAMETERS:
        return []
    return [
        "no family of models is known for this one: blocks carry the names of parameters, and layers and heads "
        "are not "
        "told apart; families.register describes it in a few lines"
    ]


def versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "curvlens": curvlens.__version__,
    }
    for package in ("transformers", "numpy", "scipy"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _assemble(at: Context, stages: list[Stage], title: str, seconds: float) -> Report:
    land = at.land
    fields = {key: value for key, value in at.found.items() if key not in ("numbers", "groups", "notes")}
    groups: list[Group] = at.found.get("groups", at.groups)
    layers = {group.layer for group in groups if group.layer is not None}
    sequences = sum(len(piece.target) for piece in land.pieces())
    model = type(land.model).__name__
    meta = Meta(
        title=title or f"{model}, {land.blocks.size:,} parameters",
        model=model,
        family=family_of(land),
        parameters=land.blocks.size,
        layers=len(layers),
        heads=max((group.heads for group in groups), default=0),
        loss=land.loss.name,
        scored_tokens=float(land.weight),
        sequences=sequences,
        batches=sum(1 for _ in land.batches),
        engine=_engines(at),
        dtype=str(land.dtype).removeprefix("torch."),
        device=device_name(land.device),
        preset=at.preset.name,
        seed=at.seed,
        seconds=seconds,
        products=at.spent,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        weights_sha256=weights_hash(land),
        data_sha256=data_hash(land),
        notes=at.found["notes"],
        optimizer="" if at.optimizer is None else type(at.optimizer).__name__,
    )
    return Report(meta, stages, at.found.get("numbers", {}), [], groups, **fields)


def _engines(at: Context) -> str:
    from curvlens.curvature import functional, gauss_newton, hessian

    names = {
        label: kind(at.land).engine
        for label, kind in (("H", hessian), ("H_o", gauss_newton), ("H_f", functional))
    }
    return ", ".join(f"{label} by {engine}" for label, engine in names.items())


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    return str(device)
