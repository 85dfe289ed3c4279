"""A long estimation: its budget, its progress on a terminal, and its state on disk.

An estimator works in steps and calls `Run.step` after each, when its state is consistent. Only there it can be
saved, and only there it ends: by its own criterion, because products or minutes are used up, or by Ctrl-C.
The first Ctrl-C ends the estimation at the next step and the partial result is returned with
`stopped="interrupted"`; a second one raises KeyboardInterrupt at once, as anywhere else.

The state file is replaced atomically, so at every instant it is a complete earlier state: a run that is killed
and started again with the same arguments goes on from there, and ends with the digits of an undisturbed run.
Saving takes at most a twentieth of the time (`SAVE_INTERVAL`). A finished run that is started again returns its
result without a product; with more samples or a smaller tolerance it goes on. The operator itself is not stored:
give the same.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from curvlens.operator import Operator

SAVE_INTERVAL = 20  # the time between two saves, in times the last one took


class Run:
    """The products, minutes and state of one estimation; a context manager."""

    def __init__(
        self,
        what: str,
        identity: Mapping[str, Any],
        max_products: int | None = None,
        max_minutes: float | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ):
        """`identity` says what a saved state belongs to; `progress` None: shown when stderr is a terminal."""
        self.what, self.identity = what, {"what": what, **identity}
        self.max_products, self.max_minutes = max_products, max_minutes
        self.path = None if checkpoint is None else Path(checkpoint)
        self._check()
        self.products = 0
        self.stopped = ""
        self._progress = _bar(what, progress)
        self._started = time.monotonic()
        self._next_save = 0.0
        self._counted = 0  # products at the latest step: what comes after is done again
        self._unsaved: Callable[[], Mapping[str, Any]] | None = None
        self._interrupted = False
        self._handler: Any = None

    def _check(self) -> None:
        for name, allowed in (("max_products", self.max_products), ("max_minutes", self.max_minutes)):
            if allowed is not None and not allowed >= 0:
                raise ValueError(f"expected {name} of at least 0, got {allowed}")
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise ValueError(
                f"expected the path of a file in an existing folder as checkpoint, got {self.path}"
            )

    @property
    def shows(self) -> bool:
        """Whether somebody looks: a value that costs something is formed only then."""
        return self._progress is not None

    # -- the budget

    def apply(self, operator: Operator, stack: Tensor) -> Tensor:
        """Products with a stack, counted one a vector."""
        images = operator.apply(stack)
        if not images.sum().isfinite():  # one pass; NaN and infinity survive in a sum
            raise ValueError(
                f"expected finite products, got NaN or infinity from {operator}; look whether the loss is finite, "
                "or take a dtype of a wider range"
            )
        self.products += len(stack)
        return images

    def affordable(self, count: int, cost: int = 1) -> int:
        """How many of `count` further units of `cost` products may be started; if none, `stopped` says why."""
        if self._interrupted:
            self.stopped = "interrupted"
            return 0
        if self.max_minutes is not None and time.monotonic() - self._started >= 60 * self.max_minutes:
            self.stopped = "max_minutes"
            return 0
        if self.max_products is not None and self.products + count * cost > self.max_products:
            self.stopped = "max_products"
            return max(0, self.max_products - self.products) // cost
        return count

    # -- the state

    def restore(self) -> dict[str, Any] | None:
        """The state of an earlier run with the same identity, None where there is none."""
        if self.path is None or not self.path.exists():
            return None
        saved = _read(self.path)
        if saved["identity"] != self.identity:
            wrong = {
                key: (value, saved["identity"].get(key))
                for key, value in self.identity.items()
                if value != saved["identity"].get(key)
            }
            raise ValueError(
                f"the state in {self.path} belongs to another run; (expected, got): {wrong}; "
                "delete it, or give another checkpoint path"
            )
        self.products = saved["products"]
        return saved["state"]

    def step(
        self,
        state: Callable[[], Mapping[str, Any]],
        total: float | None = None,
        value: str = "",
    ) -> None:
        """After each step: show progress, and save the state when that costs little of the time."""
        self._unsaved, self._counted = state, self.products
        if self._progress is not None:
            total = total if self.max_products is None else min(total or self.max_products, self.max_products)
            self._progress.update(completed=self.products, total=total, value=value)
        if self.path is not None and time.monotonic() >= self._next_save:
            self._save()

    def _save(self) -> None:
        if self.path is None or self._unsaved is None:
            return
        begun = time.monotonic()
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        content = {"identity": self.identity, "products": self._counted, "state": dict(self._unsaved())}
        try:
            with open(temporary, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:  # a full disk: what is measured is not lost, only the way back
            warnings.warn(f"the state is not kept in {self.path}: {error.strerror or error}", stacklevel=2)
            self.path = None
        except RuntimeError as error:  # the same, as torch.save puts it
            if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
                raise
            warnings.warn(f"the state is not kept in {self.path}: is the disk full?", stacklevel=2)
            self.path = None
        finally:
            temporary.unlink(missing_ok=True)
        self._unsaved = None
        self._next_save = time.monotonic() + SAVE_INTERVAL * (time.monotonic() - begun)

    # -- as a context

    def __enter__(self) -> Run:
        if threading.current_thread() is threading.main_thread():
            current = signal.getsignal(signal.SIGINT)
            if current is signal.default_int_handler:  # a handler of the caller's own keeps its say
                self._handler = current
                signal.signal(signal.SIGINT, self._interrupt)
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._progress is not None:
            self._progress.stop()
        if kind is None:  # after an error the state may be half a step on: the last saved one stands
            self._save()

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(
            f"expected the state of an estimation in {path}, got a file that cannot be read; "
            "delete it, or give another checkpoint path"
        ) from error
    if not isinstance(saved, dict) or not {"identity", "products", "state"} <= saved.keys():
        raise ValueError(f"expected the state of an estimation in {path}, got another file of torch")
    return saved


class _Bar:
    """Products done, the current value and the time left, on stderr."""

    def __init__(self, what: str):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("products  {task.fields[value]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task(what, total=None, value="")

    def start(self) -> None:
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def update(self, completed: int, total: float | None, value: str) -> None:
        self._bar.update(self._task, completed=completed, total=total, value=value)


def _bar(what: str, progress: bool | None) -> _Bar | None:
    shown = sys.stderr.isatty() if progress is None else progress
    return _Bar(what) if shown else None


def identity(operator: Operator, *, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """What a saved state belongs to: the operator's space and numbers, and the settings of the estimator."""
    if not isinstance(seed, int):
        raise ValueError(f"expected a whole number as seed, got {seed!r}")
    shapes = [[block.name, list(block.shape)] for block in operator.domain]
    rows = [[block.name, list(block.shape)] for block in operator.codomain]
    return {"domain": shapes, "codomain": rows, "dtype": str(operator.dtype), "seed": seed, **settings}
