"""The report in a notebook: a compact cell without scripts, and the whole page on demand."""

from __future__ import annotations

import tempfile
import webbrowser
from html import escape
from pathlib import Path

from curvlens.report import html as h
from curvlens.report.data import SEVERITIES, Report
from curvlens.report.figures.words import measured
from curvlens.report.page import LOOKS, html

MOST = 40_000  # bytes of a cell
KEYS = (
    "loss",
    "gradient_norm",
    "lambda_max",
    "lambda_min",
    "trace.H",
    "frobenius.H",
    "frobenius.H_o",
    "frobenius.H_f",
)
MARKS = {"problem": "▲", "warning": "△", "notice": "◇", "info": "·"}


def cell(report: Report) -> str:
    """At most 40 KB of HTML in the notebook's own colours: findings and key numbers."""
    small = "font-size:0.85em;opacity:0.75"
    parts = [
        '<div style="max-width:60em;line-height:1.45">',
        f'<div style="font-size:1.15em;font-weight:600">{escape(report.meta.title)}</div>',
        f'<div style="{small}">{escape(report.meta.model)}, {report.meta.parameters:,} parameters, '
        f"{report.meta.scored_tokens:,.0f} scored tokens; <code>.show()</code> for the whole page</div>",
        _numbers(report),
    ]
    ranked = sorted(report.findings, key=lambda f: SEVERITIES.index(f.severity))
    size, left = sum(map(len, parts)), len(ranked)
    for finding in ranked:
        item = (
            f'<details style="margin:0.35em 0"><summary>{MARKS[finding.severity]} <b>{h.text(finding.title)}</b> '
            f'<span style="{small}">{LOOKS[finding.severity][1].lower()}</span></summary>'
            f'<div style="margin:0.2em 0 0.4em 1.2em">{h.text(finding.text)}<br>'
            f'<span style="{small}">{h.text("; ".join(finding.evidence))}. {h.text(finding.uncertainty)}</span><br>'
            f'{h.text(finding.action)} <span style="{small}">{h.text(finding.source)}</span></div></details>'
        )
        if size + len(item.encode()) > MOST - 2000:
            parts.append(f'<div style="{small}">and {left} more: <code>.findings</code></div>')
            break
        parts.append(item)
        size, left = size + len(item.encode()), left - 1
    missing = [s.title or s.name for s in report.stages if s.status in ("partial", "failed")]
    if missing:
        parts.append(f'<div style="{small}">not complete: {escape(", ".join(missing))[:400]}</div>')
    return "".join([*parts, "</div>"])


def _numbers(report: Report) -> str:
    known = [(report.numbers[key], key) for key in KEYS if key in report.numbers]
    cells = "".join(
        '<span style="display:inline-block;margin:0.4em 1.8em 0.4em 0">'
        f'<span style="font-size:0.85em;opacity:0.75">{h.text(n.label or key)}</span><br>'
        f'<b style="font-variant-numeric:tabular-nums">'
        f"{escape(measured(n.value, 0.0 if n.exact else n.stderr))}</b></span>"
        for n, key in known
    )
    return f"<div>{cells}</div>"


def show(report: Report) -> None:
    """The whole page: in a frame of the notebook's cell, or in the browser."""
    page = html(report)
    if _in_notebook():
        from IPython.display import HTML, display

        frame = f'<iframe srcdoc="{escape(page)}" style="width:100%;height:80vh;border:0" title="curvlens"></iframe>'
        display(HTML(frame))
        return
    folder = Path(tempfile.mkdtemp(prefix="curvlens-"))
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    if not webbrowser.open(path.as_uri()):
        print(f"open {path} in a browser")


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
