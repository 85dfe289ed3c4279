from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from curvlens.cli.exits import DONE, FAILED, INCOMPLETE, NOT_CONVERGED, WrongInput, complain, expected_input
from curvlens.cli.options import (
    Data,
    Device,
    DryRun,
    Dtype,
    Json,
    Length,
    Loss,
    MaxMinutes,
    MaxProducts,
    MicroBatch,
    Quiet,
    Resume,
    Seed,
    Sequences,
    Strict,
    Text,
)

if TYPE_CHECKING:
    from curvlens.sources import Subject
    from curvlens.training.checkpoints import Checkpoint
    from curvlens.training.record import Track


def track(
    folder: Annotated[
        Path, typer.Argument(help="Folder of checkpoints: checkpoint-100/ of a Trainer, or step_100.pt.")
    ],
    model: Annotated[
        str | None, typer.Option(help="module:function that builds the model, for checkpoints of one's own.")
    ] = None,
    text: Text = None,
    data: Data = None,
    loss: Loss = None,
    length: Length = None,
    sequences: Sequences = None,
    parts: Annotated[
        str, typer.Option(help="What is measured: eigenvalues, optimizer, blocks, heads, depth.")
    ] = "eigenvalues,optimizer,blocks,heads,depth",
    samples: Annotated[int, typer.Option(min=1, help="Random probes of traces and norms.")] = 2,
    out: Annotated[Path, typer.Option(help="The page to write; the record goes beside it.")] = Path(
        "out/track.html"
    ),
    micro_batch: MicroBatch = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    max_products: MaxProducts = None,
    max_minutes: MaxMinutes = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit with 1 on such a finding: a severity, or names, with commas.")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Curvature through a training that is over, from its checkpoints: sharpness, its limit, blocks, heads, depth.

    Each checkpoint is measured on the same held batches, and written down at once, beside the page or as track.jsonl
    in the folder of --resume: the same command goes on after an interruption, or where --max-products or --max-minutes
    ended it. The optimizer's own state, where it is saved, gives the sharpness that it saw.
    """
    from curvlens.training.checkpoints import checkpoints, track_checkpoints

    with expected_input():
        failing = _failing(fail_on)
        found = checkpoints(folder)
        record = out.with_suffix(".jsonl") if resume is None else resume / "track.jsonl"
        if dry_run:
            typer.echo("\n".join(f"step {c.step:>8,}  {c.path}" for c in found))
            raise typer.Exit(DONE)
        subject = _subject(model, found[0].path, data, text, length, sequences, device, dtype, seed)

        def watch(index: int, checkpoint: Checkpoint) -> None:
            if not quiet and sys.stderr.isatty():
                print(f"[{index + 1}/{len(found)}] step {checkpoint.step:,}", file=sys.stderr)

        try:
            tracker = track_checkpoints(
                found, subject.model, subject.batches, record, watch, loss=loss or subject.loss,
                parts=[name.strip() for name in parts.split(",")], samples=samples, seed=seed,
                dtype=subject.dtype, micro_batch=micro_batch,
                max_products=max_products, max_minutes=max_minutes,
            )  # fmt: skip
        except KeyboardInterrupt:
            complain("interrupted; what was measured is kept, and the same command goes on from there")
            raise typer.Exit(INCOMPLETE) from None
    _tell(tracker.track, out, json, quiet)
    raise typer.Exit(_code(tracker.track, found, failing, strict))


def _code(track: Track, found: list[Checkpoint], failing: set[str], strict: bool) -> int:
    left = sorted({c.step for c in found} - set(track.steps))
    if left:
        complain(
            f"{len(left)} of {len(found)} checkpoints are left, from step {left[0]}; run it again to go on"
        )
    failed = [m["step"] for m in track.measurements if m.get("failed")]
    hit = [f.title for f in track.findings if failing & {f.severity, f.id}]
    if hit:
        complain(f"--fail-on: {'; '.join(hit)}")
        return FAILED
    if failed:
        complain(f"measurements of step {', '.join(map(str, failed))} are not complete; the record says why")
        return INCOMPLETE
    if strict and (left or not _converged(track)):
        complain("--strict: not every checkpoint has its eigenvalues to the tolerance")
        return NOT_CONVERGED
    return DONE


def _tell(track: Track, out: Path, json: bool, quiet: bool) -> None:
    from json import dumps

    from curvlens.training.record import plain

    track.to_html(out)
    if json:
        typer.echo(dumps(plain(track.to_dict()), ensure_ascii=False))
    elif not quiet:
        typer.echo(f"{track}\nThe page: {out}")


def _converged(track: Track) -> bool:
    keys = ("lambda_max", "lambda_min", "preconditioned")
    return all(m[key]["converged"] for m in track.measurements for key in keys if m.get(key))


def _subject(
    model: str | None,
    first: Path,
    data: str | None,
    text: Path | None,
    length: int | None,
    sequences: int | None,
    device: str | None,
    dtype: str | None,
    seed: int,
) -> Subject:
    from curvlens.sources import subject

    if model is None and not first.is_dir():
        raise WrongInput(f"expected --model module:function for checkpoints such as {first.name!r}, got none")
    if data is None and text is None:
        raise WrongInput("expected held batches by --data module:function or --text FILE, got neither")
    return subject(
        model or str(first),
        data,
        text,
        device=device,
        dtype=dtype,
        length=length,
        sequences=sequences,
        seed=seed,
    )


def _failing(text: str | None) -> set[str]:
    """Severities, with the graver ones, and names of findings."""
    from curvlens.report.data import SEVERITIES
    from curvlens.training.findings import NAMES

    found: set[str] = set()
    for word in [] if text is None else [part.strip() for part in text.split(",")]:
        if word in SEVERITIES:
            found.update(SEVERITIES[: SEVERITIES.index(word) + 1])
        elif word in NAMES:
            found.add(word)
        else:
            raise WrongInput(
                f"expected --fail-on {', '.join(SEVERITIES)}, or {', '.join(NAMES)}, got {word!r}"
            )
    return found
