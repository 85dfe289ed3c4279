"""Options that commands share: one meaning, one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str | None, typer.Option(help="What to compute in: float32 or float64.")]
Seed = Annotated[int, typer.Option(help="Seed of all that is random.")]
Out = Annotated[Path | None, typer.Option(help="File or folder to write to.")]
MaxProducts = Annotated[int | None, typer.Option(min=1, help="At most so many products with the Hessian.")]
MaxMinutes = Annotated[float | None, typer.Option(min=0.0, help="At most so many minutes.")]
Resume = Annotated[Path | None, typer.Option(help="Folder with the state of the run: go on from there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, and only what must be said.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Predict time, memory and products, and stop.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 4 when an estimate has not converged.")]
