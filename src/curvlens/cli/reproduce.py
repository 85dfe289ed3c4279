from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from curvlens.cli.exits import DONE, FAILED, INCOMPLETE, complain, expected_input
from curvlens.cli.options import Device, Json, Quiet


def reproduce(
    name: Annotated[
        str, typer.Argument(help="A study, a shell pattern such as 'A-*', 'all', or 'list'.")
    ] = "list",
    preset: Annotated[
        str, typer.Option(help="smoke: seconds; cpu: minutes; paper: the paper's size.")
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results, from which a run goes on.")] = Path(
        "out/studies"
    ),
    seed: Annotated[
        int | None, typer.Option(help="Seed of all that is random; the study's own if not given.")
    ] = None,
    device: Device = None,
    json: Json = False,
    quiet: Quiet = False,
    figures: Annotated[bool, typer.Option(help="Draw the figure of each study.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is done and what is left, and stop.")
    ] = False,
) -> None:
    """Run the studies of the papers' figures, tables and claims, and judge each against the paper's numbers.

    Finished units of work are kept under --out: the same command goes on after an interruption, and a finished study
    is read and not run again while neither its settings nor its code change. Exits with 1 if a claim is not
    reproduced.
    """
    from curvlens.studies import registry

    if name == "list":
        typer.echo(_listed(registry.names(), json))
        raise typer.Exit(DONE)
    with expected_input():
        chosen = registry.matching(name)
    if dry_run:
        typer.echo("\n".join(_state(study, preset, out, seed, device) for study in chosen))
        raise typer.Exit(DONE)
    _run(chosen, preset, out, seed, device, json, quiet, figures)


def _run(
    chosen: Any, preset: str, out: Path, seed: Any, device: Any, json: bool, quiet: bool, figures: bool
) -> None:
    from curvlens.studies import reproduce
    from curvlens.studies.study import NOT

    failed, texts = False, []
    try:
        for study in chosen:
            with expected_input():
                made = reproduce(
                    study, preset, out=out, seed=seed, device=device, figure=figures, progress=not quiet
                )
            failed = failed or made.verdict == NOT
            texts.append(made.to_json())
            if not json and (not quiet or made.verdict == NOT):
                typer.echo(f"{made}\n  results in {made.folder}\n")
    except KeyboardInterrupt as error:
        complain(f"{error}; the same command goes on from there")
        raise typer.Exit(INCOMPLETE) from error
    if json:
        typer.echo(texts[0] if len(texts) == 1 else "[" + ",\n".join(texts) + "]")
    raise typer.Exit(FAILED if failed else DONE)


def _listed(names: tuple[str, ...], json: bool) -> str:
    from json import dumps

    from curvlens.studies import load

    studies = [load(name) for name in names]
    if json:
        return dumps(
            [{"study": s.name, "title": s.title, "source": s.source, "claim": s.claim} for s in studies]
        )
    width = max(len(study.name) for study in studies)
    return "\n".join(f"{study.name:{width}}  {study.title} ({study.source})" for study in studies)


def _state(name: str, preset: str, out: Path, seed: int | None, device: str | None) -> str:
    from curvlens.studies.run import plan

    with expected_input():
        todo = plan(name, preset, out, seed, device)
    done = sum(path.exists() for path in todo.files.values())
    return f"{name} ({preset}): {done} of {len(todo.files)} units done, in {todo.folder}"
