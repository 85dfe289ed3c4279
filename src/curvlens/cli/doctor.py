from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvlens.cli.exits import DONE, FAILED, expected_input
from curvlens.cli.options import Data, Device, Dtype, Json, Length, Loss, Model, Net, Sequences, Text


def doctor(
    model: Model = None,
    text: Text = None,
    data: Data = None,
    loss: Loss = None,
    length: Length = None,
    sequences: Sequences = None,
    net: Net = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
    folder: Annotated[Path, typer.Option(help="Where results would be written.")] = Path("out"),
) -> None:
    """What is installed and works here; with a model, what was found in it, what will run, and what that takes.

    Exits with 1 where something that an analysis needs does not work.
    """
    from json import dumps

    from curvlens.report.doctor import machine, of_a_model

    parts = machine(folder)
    if model is not None:
        from curvlens.cli.analyze import settings_of_net
        from curvlens.sources import subject

        with expected_input():
            found = subject(
                model,
                data,
                text,
                dtype=dtype,
                device=device,
                length=length,
                sequences=sequences,
                net=settings_of_net(net),
            )
            parts += of_a_model(found.landscape(loss))
    if json:
        typer.echo(dumps([part._asdict() for part in parts]))
    else:
        typer.echo("\n".join(str(part) for part in parts))
    raise typer.Exit(FAILED if any(part.state == "wrong" for part in parts) else DONE)
