from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvlens.cli.exits import DONE, expected_input
from curvlens.cli.options import Json, Out, Quiet


def compare(
    a: Annotated[Path, typer.Argument(help="The JSON or the page of a report.", metavar="A.json")],
    b: Annotated[
        Path, typer.Argument(help="Another: later, of another seed, of another model.", metavar="B.json")
    ],
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Two analyses side by side: before and after, two seeds, two checkpoints.

    Differences come in units of their error: below two of them they may be chance. --out writes a page (.html) or JSON.
    """
    from curvlens.report.compare import compare as side_by_side

    with expected_input():
        made = side_by_side(a, b)
        if out is not None and out.suffix not in (".html", ".htm", ".json"):
            raise ValueError(f"expected --out a page or JSON (.html, .json), got {str(out)!r}")
    if out is not None:
        (made.to_json if out.suffix == ".json" else made.to_html)(out)
    if json:
        typer.echo(made.to_json())
    elif not quiet:
        typer.echo(str(made))
    raise typer.Exit(DONE)
