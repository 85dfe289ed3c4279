from __future__ import annotations

from typing import Annotated

import typer

from curvlens.cli.exits import DONE, FAILED, INCOMPLETE, complain
from curvlens.cli.options import Json, Quiet, Seed


def verify(
    json: Json = False,
    seed: Seed = 0,
    claims: Annotated[
        str, typer.Option(help="Only claims of this shell pattern: 'A Theorem 3.1', 'Lemma*', 'B *'.")
    ] = "*",
    quiet: Quiet = False,
) -> None:
    """Check every theorem, lemma and remark of both papers against automatic differentiation.

    Prints a table with the largest relative error of each and the time of both ways. Exits with 1 if one fails.
    """
    from curvlens.exact.verification import verify

    try:
        result = verify(seed, claims, progress=not quiet)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--claims") from error
    if json:
        typer.echo(result.to_json())
    elif not quiet or not result.passed:
        typer.echo(str(result))
    if not result.complete:
        complain(f"interrupted after {len(result.claims)} of {result.asked} claims")
        raise typer.Exit(INCOMPLETE)
    raise typer.Exit(DONE if result.passed else FAILED)
