"""The page of a report: findings first, then the numbers, the figures, and what was done to get them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from curvlens.report import html as h
from curvlens.report.data import NUMBERS, Finding, Number, Report
from curvlens.report.document import Section, document
from curvlens.report.figures import CHAPTERS, chapter, pair, track
from curvlens.report.figures.figure import Table
from curvlens.report.figures.words import measured, number
from curvlens.report.packing import packed
from curvlens.report.schema import decode_report

# of each severity: the look, the word, and what several are called
LOOKS = {
    "problem": ("alarm", "Problem", ("problem", "problems")),
    "warning": ("notice", "Warning", ("warning", "warnings")),
    "notice": ("plain", "Notice", ("notice", "notices")),
    "info": ("fine", "Good to know", ("remark", "remarks")),
}
STATES = {
    "exact": "exact",
    "estimated": "estimated, with errors",
    "partial": "partly done",
    "skipped": "left out",
    "failed": "failed",
}
TERMS = h.text(
    "H is the Hessian of the mean loss over all scored tokens; H_o its outer-product (Gauss-Newton) part, H_f the "
    "functional part, H = H_o + H_f. A number is exact, up to rounding, or an estimate from random probes with one "
    "standard error (68 %); the error of an eigenvalue is its residual: a true one lies at least that near."
)
DIGITS = (
    "The data inside this page keep seven digits of what is exact, four of estimated norms and densities, and two of "
    "errors; the JSON of the report has all."
)
MINUTE, HOUR = 60, 3600


def html(report: Report) -> str:
    """One self-contained page."""
    report = rounded(report)
    sections = [
        Section("findings", "Findings", _findings(report.findings)),
        Section("numbers", "Key numbers", _numbers(report)),
    ]
    for name, title, parts in CHAPTERS:
        pieces = [
            h.figure(part) if not isinstance(part, str) else h.absent(part) for part in chapter(report, parts)
        ]
        sections.append(Section(name, title, "".join(pieces)))
    sections.append(Section("methods", "Methods and trust", _methods(report)))
    return document(report.meta.title, _about(report), sections, packed(report), "curvlens-report")


def rounded(report: Report) -> Report:
    """The report with the digits that a page keeps: so what a page shows is what it holds."""
    return decode_report(json.dumps(packed(report)))


def comparison(a: Report, b: Report, names: tuple[str, str] = ("A", "B")) -> str:
    """Two reports side by side: findings, then differences in units of their errors."""
    a, b = rounded(a), rounded(b)
    pieces = [h.figure(f) if not isinstance(f, str) else h.absent(f) for f in pair.figures(a, b, names)]
    sections = [
        Section("runs", "The two runs", _runs(a, b, names)),
        Section("differences", "Differences", "".join(pieces)),
        Section("findings", "Findings", _both_findings(a, b, names)),
    ]
    about = [(name, r.meta.title) for name, r in zip(names, (a, b), strict=True)]
    data = {"schema": "curvlens-comparison/1", "names": names, "runs": [packed(a), packed(b)]}
    return document(
        f"{a.meta.title} and {b.meta.title}" if a.meta.title != b.meta.title else a.meta.title,
        about,
        sections,
        data,
        "curvlens-comparison",
    )


def timeline(
    run: track.Track,
    events: track.Marks = (),
    title: str = "Curvature through training",
    findings: Sequence[Finding] = (),
) -> str:
    """A page of what a `Tracker` recorded; `events` are steps with words for them."""
    pieces = [h.figure(f) if not isinstance(f, str) else h.absent(f) for f in track.figures(run, events)]
    header, steps = run.header, run.steps
    about = [
        (name, str(header[name]))
        for name in ("model", "optimizer", "loss", "dtype", "device")
        if header.get(name)
    ]
    about.append(("measurements", f"{len(steps):,}" + (f", to step {steps[-1]:,}" if steps else "")))
    listed = "".join(f"<li>step {number(step, 6)}: {h.text(words)}</li>" for step, words in events)
    sections = [Section("training", "Through training", "".join(pieces))]
    if listed:
        sections.insert(0, Section("events", "What happened", f"<ul>{listed}</ul>"))
    if run.measurements:
        sections.insert(0, Section("findings", "Findings", _findings(findings)))
    data = packed({"schema": "curvlens-track/1", "header": header, "measurements": run.measurements})
    return document(title, about, sections, data, "curvlens-track")


def _runs(a: Report, b: Report, names: tuple[str, str]) -> str:
    metas = (a.meta, b.meta)
    rows = [
        ("model", *(m.model for m in metas)),
        ("parameters", *(f"{m.parameters:,}" for m in metas)),
        ("data", *(f"{m.sequences:,} sequences, {m.scored_tokens:,.0f} scored tokens" for m in metas)),
        ("preset, seed", *(f"{m.preset}, {m.seed}" for m in metas)),
        ("precision", *(m.dtype for m in metas)),
        ("measured", *(m.created.replace("T", " ")[:16] for m in metas)),
        ("same weights", *([f"{'yes' if a.meta.weights_sha256 == b.meta.weights_sha256 else 'no'}"] * 2)),
        ("same data", *([f"{'yes' if a.meta.data_sha256 == b.meta.data_sha256 else 'no'}"] * 2)),
    ]
    return f'<div class="sheet">{h.table(Table(("", *names), tuple(rows)), css="plain")}</div>'


def _both_findings(a: Report, b: Report, names: tuple[str, str]) -> str:
    known, later = {f.id: f for f in a.findings}, {f.id: f for f in b.findings}
    groups = (
        (f"Only in {names[1]}", [f for f in b.findings if f.id not in known]),
        (f"Only in {names[0]}", [f for f in a.findings if f.id not in later]),
        (f"In both, as {names[1]} has them", [f for f in b.findings if f.id in known]),
    )
    parts = [
        f'<h3>{escape(title)}</h3><ol class="findings">{"".join(f"<li>{_finding(f)}</li>" for f in found)}</ol>'
        for title, found in groups
        if found
    ]
    return "".join(parts) or '<p class="lead">Neither run has a finding.</p>'


def _about(report: Report) -> list[tuple[str, str]]:
    m = report.meta
    return [
        ("model", m.model + (f" ({m.family})" if m.family and m.family != m.model else "")),
        ("parameters", f"{m.parameters:,}"),
        ("layers", f"{m.layers}"),
        ("heads", f"{m.heads}"),
        ("loss", m.loss),
        ("scored tokens", f"{m.scored_tokens:,.0f}"),
        ("measured", m.created.replace("T", " ")[:16] + " UTC"),
    ]


# -- findings


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="lead">Nothing in the numbers calls for a finding. They follow below.</p>'
    counts = [(sum(f.severity == severity for f in found), names) for severity, (*_, names) in LOOKS.items()]
    listed = ", ".join(f"{count} {names[count != 1]}" for count, names in counts if count)
    items = "".join(f"<li>{_finding(f)}</li>" for f in found)
    return (
        f'<p class="lead">{escape(listed)}; each with what it rests on.</p><ol class="findings">{items}</ol>'
    )


def _finding(f: Finding) -> str:
    look, word, _ = LOOKS[f.severity]
    rows = [("Evidence", "; ".join(f.evidence)), ("Uncertainty", f.uncertainty), ("What to do", f.action)]
    rows += [("Where", ", ".join(f.blocks)), ("Source", f.source)]
    pairs = "".join(f"<dt>{name}</dt><dd>{h.text(words)}</dd>" for name, words in rows if words)
    return (
        f'<article class="finding {look}" id="finding-{escape(f.id)}"><p class="tag">{word}</p>'
        f"<h3>{h.text(f.title)}</h3><p>{h.text(f.text)}</p><dl>{pairs}</dl></article>"
    )


# -- numbers


def _numbers(report: Report) -> str:
    order = [key for key in NUMBERS if key in report.numbers]
    order += [key for key in report.numbers if key not in NUMBERS]
    if not order:
        return h.absent("No number was measured.")
    tiles = "".join(_tile(key, report.numbers[key]) for key in order)
    rows = tuple(
        (
            key,
            n.label,
            n.value,
            0.0 if n.exact else n.stderr,
            "exact" if n.exact else "estimated",
            n.samples,
            n.products,
        )
        for key, n in ((key, report.numbers[key]) for key in order)
    )
    columns = ("key", "what", "value", "±", "kind", "samples", "products")
    return f'<dl class="numbers">{tiles}</dl>' + h.data("numbers-table", "Key numbers", Table(columns, rows))


def _tile(key: str, n: Number) -> str:
    value = number(n.value, 4)
    error = ""
    if not n.exact:
        words = measured(n.value, n.stderr)
        value, _, rest = words.partition(" ± ")
        error = f" <small>± {escape(rest)}</small>" if rest else ""
        if rest.endswith(")") or ")×" in rest:  # (a ± b)×10ⁿ stays together
            value, error = words, ""
    notes = ["exact" if n.exact else f"estimated, {n.samples} samples" if n.samples else "estimated"]
    if not n.converged:
        notes.append("not converged")
    if n.note:
        notes.append(n.note)
    stored = f' data-v="{n.value!r}"' if math.isfinite(n.value) else ""
    return (
        f"<div><dt>{h.text(n.label or NUMBERS.get(key, key))}</dt>"
        f'<dd class="value" data-key="{escape(key)}"{stored}>{escape(value)}{error}</dd>'
        f'<dd class="note">{h.text("; ".join(notes))}</dd></div>'
    )


# -- methods


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "not known"
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    if seconds < HOUR:
        return f"{int(seconds // MINUTE)} min {int(seconds % MINUTE)} s"
    return f"{int(seconds // HOUR)} h {int(seconds % HOUR // MINUTE)} min"


def _count(n: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{n:,} {what}{plural if n != 1 else ''}"


def _methods(report: Report) -> str:
    m = report.meta
    stages = tuple(
        (s.title or s.name, STATES[s.status], s.why or "–", s.products, round(s.seconds, 2))
        for s in report.stages
    )
    pairs = [
        ("engine", m.engine),
        ("precision", m.dtype),
        ("device", m.device),
        ("preset", m.preset),
        ("seed", str(m.seed)),
        (
            "data",
            f"{_count(m.sequences, 'sequence')} in {_count(m.batches, 'batch')}, {m.scored_tokens:,.0f} scored tokens",
        ),
        ("optimizer", m.optimizer or "none given"),
        ("cost", f"{m.products:,} products in {duration(m.seconds)}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in m.versions.items())),
    ]
    rows = "".join(
        f'<tr><th scope="row" class="w">{a}</th><td class="w">{h.text(b)}</td></tr>' for a, b in pairs
    )
    hashes = "".join(
        f'<tr><th scope="row" class="w">{name}</th>'
        f'<td class="w hash"><code>{escape(value or "not taken")}</code></td></tr>'
        for name, value in (
            ("SHA-256 of the weights", m.weights_sha256),
            ("SHA-256 of the data", m.data_sha256),
        )
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in m.notes)
    table = h.table(Table(("part", "how", "remark", "products", "seconds"), stages), css="plain")
    return (
        f"<p>{TERMS}</p>{notes}<h3>What was done</h3>"
        f'<div class="sheet" tabindex="0" role="region" aria-label="Parts of the analysis">{table}</div>'
        f'<h3>With what</h3><div class="sheet"><table class="plain"><tbody>{rows}{hashes}</tbody></table></div>'
        f"<p class=how>{DIGITS}</p>"
    )
