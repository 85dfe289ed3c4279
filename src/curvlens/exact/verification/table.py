"""The table of a verification, in 80 columns."""

from __future__ import annotations

import textwrap

from curvlens.exact.verification.claims import TOLERANCE
from curvlens.exact.verification.run import Outcome, Verification, Verified

WIDTH = 80
PAPERS = {
    "A": "What Does It Mean to Be a Transformer? (ICLR 2025)",
    "B": "Closing the Curvature Gap (arXiv 2510.16927)",
}


def table(verification: Verification) -> str:
    """A row a claim; what is corrected, and what failed, below."""
    lines, paper = [], ""
    head = f"{'claim':20}{'checks':>7}  {'worst':18}{'closed':>10}{'autodiff':>10}  "
    for claim in verification.claims:
        if claim.paper != paper:
            paper = claim.paper
            lines += ["", f"Paper {paper}: {PAPERS[paper]}", head.rstrip()]
        lines.append(_row(claim))
        lines += _wrapped(claim.statement, "  ")
        lines += _wrapped(f"note: {claim.note}", "  ") if claim.note else []
        lines += _failed(claim)
    return "\n".join([*lines[1:], "", *_summary(verification)])


def _row(claim: Verified) -> str:
    worst = "-" if claim.worst is None else _shown(claim.worst)
    mark = "ok" if claim.passed else "FAILED"
    times = f"{_seconds(claim.closed_seconds):>10}{_seconds(claim.autodiff_seconds):>10}"
    return f"{claim.number:20}{len(claim.checks):>7}  {worst:18}{times}  {mark}"


def _shown(check: Outcome) -> str:
    if check.kind == "bound":
        return f"bound/true {check.value:.4f}"
    return f"{'slope' if check.kind == 'law' else 'error'} {check.value:.1e}"


def _seconds(seconds: float) -> str:
    return "-" if seconds == 0 else f"{1e3 * seconds:.1f} ms"


def _failed(claim: Verified) -> list[str]:
    lines = []
    for check in claim.checks:
        if not check.passed:
            lines += _wrapped(f"failed: {check.case}: {_shown(check)} {check.message}".rstrip(), "    ")
    return lines + (_wrapped(f"failed: {claim.failure}", "    ") if claim.failure else [])


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _summary(verification: Verification) -> list[str]:
    failed = [claim.name for claim in verification.claims if not claim.passed]
    errors = [claim.largest_error for claim in verification.claims if claim.largest_error is not None]
    count = sum(len(claim.checks) for claim in verification.claims)
    verdict = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "all hold"
    of_all = "" if verification.complete else f" of {verification.asked}, interrupted"
    return _wrapped(
        f"{len(verification.claims)} claims{of_all}, {count} checks, {verdict}; largest relative error "
        f"{max(errors, default=0.0):.1e} of {TOLERANCE:.0e} allowed; seed {verification.seed}, "
        f"{verification.seconds:.1f} s",
        "",
    )
