"""The command line.

One file a command; `COMMANDS` registers them. Exit codes: 0 done, 1 a check or a finding failed, 2 wrong input, 3 the
run could not be completed and partial results are kept, 4 not converged under `--strict`. Results go to stdout, and
with `--json` nothing else does; progress goes to stderr, on a terminal only. A command's file imports nothing but
typer and `cli`, its function what it needs, so that `--help` and wrong usage answer at once.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import curvlens as package
from curvlens.cli.analyze import analyze
from curvlens.cli.compare import compare
from curvlens.cli.converge import converge
from curvlens.cli.doctor import doctor
from curvlens.cli.exits import (
    DONE,
    INCOMPLETE,
    INTERRUPTED,
    WRONG_INPUT,
    WrongInput,
    complain,
    one_line,
    out_of_memory,
)
from curvlens.cli.reproduce import reproduce
from curvlens.cli.scale import scale
from curvlens.cli.track import track
from curvlens.cli.verify import verify

# in the order of the help
COMMANDS: list[Callable[..., None]] = [analyze, track, verify, reproduce, converge, scale, compare, doctor]

app = typer.Typer(
    name="curvlens",
    help="The curvature of a Transformer: its Hessian, exact and block by block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"curvlens {package.__version__}")
        raise typer.Exit(DONE)


@app.callback()
def curvlens(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The curvature of a Transformer: its Hessian, exact and block by block."""


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line, `sys.argv` unless given. What went wrong is one line on stderr."""
    warnings.formatwarning = _one_line  # type: ignore[assignment]
    try:
        code = app(arguments, prog_name="curvlens", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except WrongInput as error:
        complain(str(error))
        return WRONG_INPUT
    except (MemoryError, OSError) as error:
        complain(one_line(error) if error.args else out_of_memory(error))
        return INCOMPLETE
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line's own, of wrong usage
            complain(_usage(error))
            return WRONG_INPUT
        words = out_of_memory(error)
        if words:
            complain(words)
        else:
            traceback.print_exc()  # ours: to be reported
        return INCOMPLETE
    if code == INTERRUPTED:
        complain("interrupted before it was done")
        return INCOMPLETE
    return code if isinstance(code, int) else DONE


def _one_line(message: Any, *_: Any) -> str:
    """A warning as the other complaints are, without the place in the code."""
    return f"curvlens: {' '.join(str(message).split())}\n"


def _usage(error: Any) -> str:
    """What is wrong with a command line, and where to read what is right."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    path = context.command_path if context else "curvlens"
    return f"{message.rstrip('.')}; see '{path} --help'" if message else ""


def main() -> None:
    sys.exit(run())
