from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from curvlens.cli.exits import (
    DONE,
    FAILED,
    INCOMPLETE,
    NOT_CONVERGED,
    complain,
    expected_input,
)
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
    Model,
    Net,
    Quiet,
    Resume,
    Seed,
    Sequences,
    Strict,
    Text,
)

if TYPE_CHECKING:
    from curvlens.landscape import Landscape
    from curvlens.report.data import Report
    from curvlens.sources import Subject


def analyze(
    model: Model = None,
    text: Text = None,
    data: Data = None,
    loss: Loss = None,
    optimizer: Annotated[
        Path | None,
        typer.Option(
            help="State of the optimizer in use: torch.save of its state_dict, a Trainer's optimizer.pt, a checkpoint."
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="quick, standard or thorough: how much is measured.")
    ] = "standard",
    out: Annotated[
        Path, typer.Option(help="The page to write, or a folder for report.html; the JSON goes beside it.")
    ] = Path("out/report.html"),
    figures: Annotated[
        bool, typer.Option("--figures", help="Write every figure as SVG, PNG and CSV beside the page.")
    ] = False,
    length: Length = None,
    sequences: Sequences = None,
    net: Net = None,
    micro_batch: MicroBatch = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    max_products: MaxProducts = None,
    max_minutes: MaxMinutes = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit with 1 on such a finding: a severity (problem, warning, …), or names, with commas."
        ),
    ] = None,
    strict: Strict = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What curves in a Transformer, where, why, how sure that is, and what to do about it.

    Without --model: trains the one-block GPT of the attention paper on digit addition for some seconds and analyses it.
    Writes one page and its JSON, and prints the findings. Ctrl-C ends the stage and keeps what there is.
    """
    from curvlens.sources import subject

    with expected_input():
        failing = _failing(fail_on)
        page = _page(out)
        if model is None and optimizer is not None:
            raise ValueError(
                "expected --model with --optimizer, got none; the default is trained with its own"
            )
        if model is None and not quiet and sys.stderr.isatty():
            print("training the one-block GPT on digit addition …", file=sys.stderr)
        found = subject(
            model,
            data,
            text,
            dtype=dtype,
            device=device,
            seed=seed,
            length=length,
            sequences=sequences,
            net=settings_of_net(net),
        )
        if optimizer is not None:
            found = _with_optimizer(found, optimizer)
        land = found.landscape(loss, micro_batch)
    if dry_run:
        _forecast(found, land, preset, json)
        raise typer.Exit(DONE)
    report = _analyse(found, land, preset, seed, max_products, max_minutes, resume, quiet)
    try:
        written = _write(report, page, figures)
    finally:  # what the disk has no room for is still said
        _print(report, json, quiet)
    if not quiet and not json:
        typer.echo(f"The page: {written}")
    raise typer.Exit(_code(report, failing, strict, written))


def _with_optimizer(found: Subject, path: Path) -> Subject:
    """The subject as the optimizer of a file sees it."""
    from dataclasses import replace

    from curvlens.training.checkpoints import saved_optimizer

    return replace(found, optimizer=saved_optimizer(found.model, path))


def _analyse(
    found: Subject,
    land: Landscape,
    preset: str,
    seed: int,
    max_products: int | None,
    max_minutes: float | None,
    resume: Path | None,
    quiet: bool,
) -> Report:
    from curvlens.report.analyze import analyze
    from curvlens.report.watch import Announcer

    shown = not quiet and sys.stderr.isatty()
    with expected_input():
        return analyze(
            land,
            preset,
            optimizer=found.optimizer,
            max_products=max_products,
            max_minutes=max_minutes,
            resume=resume,
            seed=seed,
            progress=False if quiet else None,
            watch=Announcer(land, preset, found.optimizer) if shown else None,
            title=found.title,
        )


def _forecast(found: Subject, land: Landscape, preset: str, json: bool) -> None:
    from json import dumps

    from curvlens.report.forecast import forecast

    with expected_input():
        made = forecast(land, preset, found.optimizer)
    typer.echo(dumps(made.to_dict()) if json else f"{land!r}\n\n{made}")


def _print(report: Report, json: bool, quiet: bool) -> None:
    if json:
        typer.echo(report.to_json())
    elif quiet:  # only what must be said
        for finding in report.findings:
            if finding.severity == "problem":
                typer.echo(finding.title)
    else:
        typer.echo(str(report))


def _page(out: Path) -> Path:
    """The path of the page, in a folder that can be written to: tried now, and not after an hour."""
    from curvlens.report.files import writable

    page = out / "report.html" if out.is_dir() or not out.suffix else out
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"expected --out a folder or a page, such as out/report.html, got {str(out)!r}")
    writable(page.parent)
    return page


def _write(report: Report, page: Path, figures: bool) -> Path:
    """The JSON first, then the page; where the disk is full, into the temporary folder."""
    from curvlens.report.files import fallback

    try:
        _write_all(report, page, figures)
    except OSError as error:
        other = fallback() / page.name
        _write_all(report, other, False)
        complain(
            f"could not write to {page.parent}: {error.strerror or error}; the report is in {other.parent} instead"
        )
        raise typer.Exit(INCOMPLETE) from error
    return page


def _write_all(report: Report, page: Path, figures: bool) -> None:
    report.to_json(page.with_suffix(".json"))
    report.to_html(page)
    if figures:
        report.figures(page.parent / "figures")


def _code(report: Report, failing: set[str], strict: bool, written: Path) -> int:
    stopped = [s for s in report.stages if s.status == "failed" or s.why == "interrupted"]
    if stopped:
        what = "interrupted" if any(s.why == "interrupted" for s in stopped) else "not all could be measured"
        complain(f"{what}: {', '.join(s.title for s in stopped)}; {written} has the rest")
        return INCOMPLETE
    hit = [f.title for f in report.findings if failing & {f.severity, f.id}]
    if hit:
        complain(f"--fail-on: {'; '.join(hit)}")
        return FAILED
    if strict and not (report.complete and report.converged):
        complain(
            "--strict: not everything has converged; give more products or minutes, or --preset thorough"
        )
        return NOT_CONVERGED
    return DONE


def _failing(text: str | None) -> set[str]:
    """Severities and names of findings; of a severity, the graver ones too."""
    from curvlens.report.data import SEVERITIES
    from curvlens.report.findings import NAMES

    found: set[str] = set()
    for word in (text or "").split(","):
        word = word.strip()
        if word in SEVERITIES:
            found.update(SEVERITIES[: SEVERITIES.index(word) + 1])
        elif word in NAMES:
            found.add(word)
        elif word or text is not None:
            raise ValueError(
                f"expected --fail-on {', '.join(SEVERITIES)}, or findings of {', '.join(NAMES)}, got {word!r}"
            )
    return found


def settings_of_net(text: str | None) -> dict[str, Any]:
    """`heads=2,attention=linear` as a dictionary of what the words stand for."""
    values: dict[str, Any] = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for part in (text or "").split(",") if text else []:
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected --net name=value, with commas between, got {part!r}")
        number = value.replace(".", "", 1)
        found[name.strip()] = (
            (float(value) if "." in value else int(value))
            if number.isdigit()
            else values.get(value.lower(), value)
        )
    return found
