"""Pieces of a page: tables that sort, figures with their switches. Text is escaped here and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from itertools import product

from curvlens.report.figures.figure import NARROW, WIDE, Cell, Figure, Table
from curvlens.report.figures.scene import Common, Dot, Path, Rect, Scene
from curvlens.report.figures.words import indexed

TWICE = 200  # cells of a map that is drawn for both widths
QUOTED = re.compile(r'="([A-Za-z0-9_.,-]+)"([ >])')
SWITCHES, PAIRED = 12, 4  # options of a switch that the style knows, and of one of two


def table(content: Table, css: str = "") -> str:
    """A table in the notation of machines, to be sorted and copied as it stands. HTML lets end tags go unsaid."""
    words = [any(isinstance(row[j], str) for row in content.rows) for j in range(len(content.columns))]
    head = "".join(f"<th{_class(words[j])}>{text(name)}" for j, name in enumerate(content.columns))
    body = "".join(
        "<tr>"
        + "".join(f"<th>{text(c)}" if j == 0 and isinstance(c, str) else _cell(c) for j, c in enumerate(row))
        for row in content.rows
    )
    return f"<table{f' class={css}' if css else ''}><thead><tr>{head}<tbody>{body}</table>"


def text(words: str) -> str:
    """Escaped, with indices set low: `H_o`, `λ_max`, `‖H‖_F`."""
    return "".join(f"<sub>{escape(part)}</sub>" if low else escape(part) for part, low in indexed(words))


def _class(words: bool) -> str:
    return ' class="w"' if words else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td class=w>{text(cell)}"
    if isinstance(cell, bool):
        return f"<td>{'yes' if cell else 'no'}"
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "<td>"
    return (
        f"<td>{cell}"
        if isinstance(cell, int)
        else "<td>" + f"{cell:.4g}".replace("e-0", "e-").replace("e+0", "e")
    )


def figure(content: Figure) -> str:
    """A figure that can be read and switched without scripts."""
    name = content.name
    kind = ("none", "one", "two")[len(content.switches)]
    switches = "".join(
        f'<fieldset class="switch"><legend>{text(legend)}</legend>'
        + "".join(
            f'<label><input type="radio" name="{name}-{s}" id="{name}-{s}-{k}" class="s{s}-{k}"'
            f"{' checked' if k == 0 else ''}><span>{text(option)}</span></label>"
            for k, option in enumerate(options)
        )
        + "</fieldset>"
        for s, (legend, options) in enumerate(content.switches)
    )
    wides, smalls = ([panel.draw(width) for panel in content.panels] for width in (WIDE, NARROW))
    for scene in smalls:  # a phone has no pointer
        scene.marks = [replace(m, tip="") if isinstance(m, (Path, Dot, Rect)) else m for m in scene.marks]
    shared = _shared(f"{name}-wide", wides), _shared(f"{name}-small", smalls)
    drawn = [
        _panel(content, k, (wides[k], smalls[k]), (shared[0][k], shared[1][k])) for k in range(len(wides))
    ]
    used = {common for pair in shared for common in pair if common and f'#{common.name}"' in "".join(drawn)}
    panels = "".join(_lean(common.svg()) for common in sorted(used, key=lambda c: c.name)) + "".join(drawn)
    return (
        f'<figure id="{name}" class="{kind}"><h3>{text(content.title)}</h3>'
        f'<p class="lead">{text(content.lead)}</p><p class="how">{text(content.how)}</p>'
        f'{switches}{panels}<output class="readout" aria-live="polite"></output>'
        f"{data(content.name, content.title, content.table)}</figure>"
    )


def _shared(name: str, scenes: list[Scene]) -> list[Common | None]:
    """For each scene what it shares with those of the same rows and columns."""
    keys = [(scene.grid["rows"], scene.grid["cols"]) if scene.grid else None for scene in scenes]
    found = {
        key: Common.of(f"{name}-{i}", [scene for scene, own in zip(scenes, keys, strict=True) if own == key])
        for i, key in enumerate(dict.fromkeys(keys))
    }
    return [found[key] for key in keys]


def _panel(
    content: Figure, k: int, scenes: tuple[Scene, Scene], shared: tuple[Common | None, Common | None]
) -> str:
    panel, (wide, small) = content.panels[k], scenes
    suffix = "-" + panel.name if panel.name else ""
    wide.name, small.name = f"svg-{content.name}{suffix}", f"svg-{content.name}{suffix}-small"
    drawn = wide.svg(common=shared[0])
    if wide.width <= 1.3 * NARROW:  # shrinks a little on a phone
        drawn = _classed(drawn, "fits")
    elif (
        wide.grid and wide.grid["rows"] * wide.grid["cols"] > TWICE
    ):  # too much to be drawn twice: scrolls on a phone
        drawn = _classed(drawn, "fixed")
    else:
        drawn = _classed(drawn, "wide") + _classed(small.svg(common=shared[1]), "small")
    classes = "".join(f" s{s}-{choice}" for s, choice in enumerate(panel.choices))
    chosen = " ".join(f"{content.name}-{s}-{choice}" for s, choice in enumerate(panel.choices))
    cells = "".join(f' data-{key}="{escape(words)}"' for key, words in wide.cell_words.items())
    return (
        f'<div class="panel{classes}" data-panel="{content.name}{suffix}" data-choices="{chosen}"{cells}>'
        f'<div class="scroll">{drawn}</div></div>'
    )


def _classed(svg: str, name: str) -> str:
    return _lean(svg.replace("<svg ", f'<svg class="{name}" ', 1))


def _lean(svg: str) -> str:
    """Without the quotes that HTML does not ask for."""
    return QUOTED.sub(r"=\1\2", svg.replace('"/>', '" />'))


def data(name: str, title: str, content: Table) -> str:
    """The numbers behind a figure, folded."""
    content = content.known()
    source = f' data-source="{content.source}"' if content.source else ""
    rows = f"{len(content.rows):,} row{'s' if len(content.rows) != 1 else ''}"
    note = f'<p class="how">{escape(content.note)}</p>' if content.note else ""
    return (
        f'<details class="data" data-name="{name}"{source}><summary>The numbers ({rows})</summary>{note}'
        f'<div class="sheet" tabindex="0" role="region" aria-label="{escape(title)}: the numbers">'
        f"{table(content)}</div></details>"
    )


def absent(sentence: str) -> str:
    """What stands where a figure would, had it been measured."""
    return f'<p class="absent">{text(sentence)}</p>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in pairs)
    return f'<ul class="facts">{items}</ul>'


def switch_rules() -> str:
    """The style by which a choice shows its panel."""
    rules = [".none>.panel{display:block}"]
    for a in range(SWITCHES):
        rules.append(f".one:has(.s0-{a}:checked)>.s0-{a}.panel{{display:block}}")
    for a, b in product(range(PAIRED), repeat=2):
        rules.append(f".two:has(.s0-{a}:checked):has(.s1-{b}:checked)>.s0-{a}.s1-{b}{{display:block}}")
    return "".join(rules)
