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
Model = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face folder or id, module:function, or the weights of one of curvlens.nets."
    ),
]
Text = Annotated[Path | None, typer.Option(help="A text file, for a Hugging Face model.")]
Data = Annotated[
    str | None, typer.Option(help="Batches: module:function; for curvlens.nets also digits or grammar.")
]
Loss = Annotated[
    str | None, typer.Option(help="next-token, cross-entropy, mse; by default told by the batches.")
]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sequence of the text; at most 128 by default.")
]
Sequences = Annotated[int | None, typer.Option(min=1, help="Sequences of the text; 8 by default.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Samples at a time, for less memory.")]
Net = Annotated[
    str | None, typer.Option(help="What the weights of curvlens.nets do not tell: heads=2,attention=linear.")
]
