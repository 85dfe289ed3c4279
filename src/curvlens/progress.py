"""A bar on the terminal for work that takes long; silent in scripts and for work that does not."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

PATIENCE = 2.0  # seconds without a sign of life


class Progress:
    """Shows steps done and time left on stderr, if that is a terminal and more than `PATIENCE` seconds pass."""

    def __init__(self, what: str, total: int):
        self.what, self.total = what, total
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int) -> None:
        if self._bar is None and sys.stderr.isatty() and time.monotonic() - self._started > PATIENCE:
            self._start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.what, total=self.total)
        self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
