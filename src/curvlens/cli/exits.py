"""Exit codes, and the one line on stderr that says what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DONE, FAILED, WRONG_INPUT, INCOMPLETE, NOT_CONVERGED = range(5)
INTERRUPTED = 130  # what typer makes of Ctrl-C


class WrongInput(Exception):
    """What was given cannot be used: expected, got, what to do."""


@contextmanager
def expected_input() -> Iterator[None]:
    """Inside, what raises is the input's fault: one line, and not a traceback."""
    try:
        yield
    except (ValueError, TypeError, KeyError, LookupError, ImportError, OSError, FloatingPointError) as error:
        raise WrongInput(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The message of an error; a KeyError's without the quotes that Python puts around it."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def out_of_memory(error: BaseException) -> str:
    """The line for an error that says that memory ran out, in words of torch or in none; "" for any other."""
    from curvlens.engine.room import is_out_of_memory, wanted

    if not is_out_of_memory(error):
        return ""
    return (
        f"expected memory for the model and its data, got too little for {wanted(error)} more; give --micro-batch 1, "
        "a smaller --length or fewer --sequences where the command has them, or a smaller model"
    )


def complain(message: str) -> None:
    line = " ".join(message.split())
    if line:  # a command line without a command shows the help instead
        print(f"curvlens: {line}", file=sys.stderr)
