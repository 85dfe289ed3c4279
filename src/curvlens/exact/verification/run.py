"""Runs the claims and shows what came out."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from curvlens.exact.verification import autodiff
from curvlens.exact.verification.claims import CLAIMS, TOLERANCE, Claim, Outcome
from curvlens.exact.verification.problems import Draw
from curvlens.progress import Progress


@dataclass(frozen=True)
class Verified:
    """One claim with the outcomes of its checks."""

    paper: str
    number: str
    statement: str
    note: str
    checks: tuple[Outcome, ...]
    failure: str = ""  # an error that ended the claim's checks

    @property
    def name(self) -> str:
        return f"{self.paper} {self.number}"

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failure and all(check.passed for check in self.checks)

    @property
    def worst(self) -> Outcome | None:
        """The check nearest to failing, failed ones first."""
        if not self.checks:
            return None
        return max(self.checks, key=lambda c: (not c.passed, 1 / c.value if c.kind == "bound" else c.value))

    @property
    def largest_error(self) -> float | None:
        """The largest relative error of the closed form; None for a claim of bounds or laws alone."""
        return max((c.value for c in self.checks if c.kind == "equal"), default=None)

    @property
    def closed_seconds(self) -> float:
        return sum(check.closed_seconds for check in self.checks)

    @property
    def autodiff_seconds(self) -> float:
        return sum(check.autodiff_seconds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "paper": self.paper,
            "number": self.number,
            "statement": self.statement,
            "note": self.note,
            "passed": self.passed,
            "largest_error": self.largest_error,
            "closed_seconds": self.closed_seconds,
            "autodiff_seconds": self.autodiff_seconds,
            "failure": self.failure,
            "checks": [asdict(check) for check in self.checks],
        }


@dataclass(frozen=True)
class Verification:
    """What became of every claim. `print` shows a table."""

    claims: tuple[Verified, ...]
    asked: int  # how many claims were to be checked; more than there are if the run was interrupted
    seed: int
    seconds: float

    @property
    def complete(self) -> bool:
        return len(self.claims) == self.asked

    @property
    def passed(self) -> bool:
        return self.complete and all(claim.passed for claim in self.claims)

    @property
    def tolerance(self) -> float:
        """The largest relative error that passes."""
        return TOLERANCE

    def __getitem__(self, name: str) -> Verified:
        """A claim by its name, `"A Theorem 3.1"`."""
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"expected a claim among {[claim.name for claim in self.claims]}, got {name!r}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "complete": self.complete,
            "seed": self.seed,
            "tolerance": self.tolerance,
            "seconds": self.seconds,
            "claims": [claim.to_dict() for claim in self.claims],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text, written to `path` if given. An infinite number is the string "inf"."""
        text = json.dumps(_finite(self.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        from curvlens.exact.verification.table import table

        return table(self)


def verify(seed: int = 0, claims: str = "*", *, progress: bool = True) -> Verification:
    """Checks the numbered statements of both papers: closed form against autodiff, in float64.

    `claims` is a shell pattern of names, "A Theorem 3.*", "B *" or "Lemma*"; `seed` draws the random problems, the
    same for a claim whichever others run. `progress` shows a bar on a terminal. An interrupt (Ctrl-C) ends it early,
    with what is done until then.

    >>> import curvlens as cl
    >>> cl.verify(claims="A Lemma B.2").passed
    True
    """
    chosen = [claim for claim in CLAIMS.values() if _matches(claim, claims)]
    if not chosen:
        raise ValueError(
            f"expected a pattern of claims such as 'A Theorem 3.1', 'Lemma*' or 'B *', got {claims!r}, which matches "
            f"none of {len(CLAIMS)}; '*' checks all"
        )
    with torch.device("cpu"):
        return _verify(chosen, seed, progress)


def _verify(chosen: list[Claim], seed: int, progress: bool) -> Verification:
    autodiff.first(autodiff.softmax, torch.zeros(2, 2))  # torch loads much at its first derivative: not timed
    start, done = time.perf_counter(), []
    with contextlib.suppress(KeyboardInterrupt), Progress("claims", len(chosen)) as bar:
        for claim in chosen:
            done.append(check(claim, seed))
            if progress:
                bar.update(len(done))
    return Verification(tuple(done), len(chosen), seed, time.perf_counter() - start)


def check(claim: Claim, seed: int) -> Verified:
    """All checks of one claim; an error in one of them fails the claim and leaves the others to run."""
    outcomes, failure = [], ""
    try:
        for item in claim.checks(Draw(zlib.crc32(f"{seed} {claim.name}".encode()))):
            outcomes.append(item.run())
    except Exception as error:  # a closed form that cannot be computed is a claim not verified
        failure = f"{type(error).__name__}: {error}"
    return Verified(claim.paper, claim.number, claim.statement, claim.note, tuple(outcomes), failure)


def _matches(claim: Claim, pattern: str) -> bool:
    pattern = pattern.lower()
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for name in (claim.name, claim.number))


def _finite(value: Any) -> Any:
    """Without infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value
