"""A report on the terminal, in 80 columns: what it is of, the key numbers, the findings, and how sure all of it is."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from curvlens.report.data import NUMBERS, Finding, Report
from curvlens.report.figures.words import measured
from curvlens.report.findings.trust import reasons

COLUMNS = 80
MARKS = {"problem": "▲ Problem", "warning": "△ Warning", "notice": "◇ Notice", "info": "· Good to know"}
KEYS = (
    "loss",
    "gradient_norm",
    "lambda_max",
    "lambda_min",
    "trace.H",
    "trace.H_o",
    "trace.H_f",
    "frobenius.H",
    "frobenius.H_o",
    "frobenius.H_f",
    "negative_curvature",
    "effective_rank",
    "gradient_curvature",
)
LABEL = 44  # columns of a number's name
WHERE = 4  # blocks of a finding that are named


def text(report: Report) -> str:
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    m = report.meta
    yield from wrap(m.title, COLUMNS)
    yield from wrap(
        f"{m.model}, {m.parameters:,} parameters in {m.layers} layer{'s' if m.layers != 1 else ''}; {m.loss} over "
        f"{m.scored_tokens:,.0f} scored tokens; {m.dtype}, {m.products:,} products in {m.seconds:.0f} s",
        COLUMNS,
    )
    for note in m.notes:
        yield from wrap(note, COLUMNS)
    yield ""
    yield from _numbers(report)
    yield ""
    if not report.findings:
        yield "No finding: nothing in these numbers calls for one."
    for finding in report.findings:
        yield from _finding(finding)
    missing = [stage for stage in report.stages if stage.status in ("partial", "failed")]
    for reason in reasons(missing):
        yield from wrap(f"not complete: {reason}", COLUMNS, subsequent_indent="  ")


def _numbers(report: Report) -> Iterator[str]:
    """Name, value, and whether that is exact, each on its line."""
    for key in KEYS:
        n = report.numbers.get(key)
        if n is None:
            continue
        kind = "exact" if n.exact else "estimate" if n.converged else "not converged"
        name = NUMBERS.get(key, n.label)
        name = name if len(name) <= LABEL else name[: LABEL - 1] + "…"
        yield f"{name:<{LABEL}} {measured(n.value, 0.0 if n.exact else n.stderr):<21} {kind}".rstrip()
    for row in report.sharpness:
        if row.threshold == row.threshold:  # a threshold is known
            yield f"{'sharpness ' + row.label:<{LABEL}.{LABEL}} {row.value.value:<10.4g} threshold {row.threshold:.4g}"


def _finding(f: Finding) -> Iterator[str]:
    yield from wrap(f"{MARKS[f.severity]}: {f.title}", COLUMNS, subsequent_indent="  ")
    for words in (f.text, f"Evidence: {'; '.join(f.evidence)}. {f.uncertainty}", f"To do: {f.action}"):
        yield from wrap(words, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    if f.blocks:
        rest = len(f.blocks) - WHERE
        named = ", ".join(f.blocks[:WHERE]) + (f" and {rest} more" if rest > 0 else "")
        yield from wrap(f"Where: {named}", COLUMNS, initial_indent="  ", subsequent_indent="  ")
    yield from wrap(f"Source: {f.source}", COLUMNS, initial_indent="  ", subsequent_indent="  ")
    yield ""
