"""The command line.

Exit codes: 0 done, 1 a check failed, 2 wrong input, 3 the run could not be completed. Results go to stdout, and with
`--json` nothing else does; progress goes to stderr, on a terminal only. Commands import what they need themselves, so
that `--help` and wrong input answer at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import curvlens as package

DONE, FAILED, WRONG_INPUT, INCOMPLETE = 0, 1, 2, 3
INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    name="curvlens",
    help="The curvature of a Transformer: its Hessian, exact and block by block.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Seed = Annotated[int, typer.Option(help="Seed of all that is random.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress, and no table unless a check fails.")
]


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


@app.command()
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
        _complain(f"interrupted after {len(result.claims)} of {result.asked} claims")
        raise typer.Exit(INCOMPLETE)
    raise typer.Exit(DONE if result.passed else FAILED)


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line, `sys.argv` unless given. What went wrong is one line on stderr."""
    try:
        code = app(arguments, prog_name="curvlens", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (MemoryError, OSError) as error:
        _complain(str(error))
        return INCOMPLETE
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line's own, of wrong usage
            _complain(_usage(error))
            return WRONG_INPUT
        traceback.print_exc()  # ours: to be reported
        return INCOMPLETE
    if code == INTERRUPTED:
        _complain("interrupted before it was done")
        return INCOMPLETE
    return code if isinstance(code, int) else DONE


def _usage(error: Any) -> str:
    """What is wrong with a command line, and where to read what is right."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    path = context.command_path if context else "curvlens"
    return f"{message.rstrip('.')}; see '{path} --help'" if message else ""


def _complain(message: str) -> None:
    line = " ".join(message.split())
    if line:  # a command line without a command shows the help instead
        print(f"curvlens: {line}", file=sys.stderr)


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
