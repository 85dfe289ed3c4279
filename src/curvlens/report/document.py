"""One self-contained page: style, data and script inside, nothing asked for from outside.

The Content-Security-Policy allows this very style and this very script, by their hashes, and pictures in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import Any

import curvlens
from curvlens.report.figures.scene import definitions
from curvlens.report.figures.style import page_sheet
from curvlens.report.html import facts, switch_rules

DATA = re.compile(r'<script type="application/json" id="report"[^>]*>(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Section:
    name: str  # its place in the address
    title: str
    body: str  # HTML


def document(
    title: str,
    about: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    data: Any,
    version: int | str = "",
) -> str:
    """The page. `data` is kept in it, once, for the script and for `stored`; NaN must be None there."""
    style, script = _style(), _script()
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    contents = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(
        f'<section id="{s.name}" aria-labelledby="{s.name}-title">'
        f'<h2 id="{s.name}-title">{escape(s.title)}</h2>{s.body}</section>'
        for s in sections
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<meta name="generator" content="curvlens {curvlens.__version__}">'
        f"<title>{escape(title)} · curvlens</title><style>{style}</style></head><body>{definitions()}"
        '<a class="skip" href="#main">To the contents</a><div class="page">'
        f'<header><div class="mark">curvlens</div><h1>{escape(title)}</h1>{facts(about)}</header>'
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav><main id="main">{body}</main>'
        f"<footer>Made by curvlens {curvlens.__version__}. This file is whole: it asks for nothing from outside, and "
        "its data are inside it as JSON.</footer></div>"
        f'<script type="application/json" id="report" data-version="{version}">{_inert(text)}</script>'
        f"<script>{script}</script></body></html>"
    )


def stored(page: str) -> Any:
    """The data in a page that `document` made."""
    found = DATA.search(page)
    if found is None:
        raise ValueError("expected a page made by curvlens, with its data inside, got one without")
    return json.loads(found[1])


def _inert(text: str) -> str:
    """JSON that no browser takes for markup; the same to a reader of JSON."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return files("curvlens.report").joinpath(name).read_text(encoding="utf-8")


@lru_cache(1)
def _style() -> str:
    sheet = re.sub(r"/\*.*?\*/", "", _file("page.css"), flags=re.DOTALL)
    return page_sheet() + re.sub(r"\s*\n\s*", "", sheet) + switch_rules()


@lru_cache(1)
def _script() -> str:
    """Without comments and indentation; no text in it spans lines."""
    lines = (line.strip() for line in _file("page.js").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
