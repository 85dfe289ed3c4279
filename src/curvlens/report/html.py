"""Pieces of a page: tables that sort, figures with their switches. Text is escaped here and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from itertools import product

from curvlens.report.figures.figure import NARROW, WIDE, Cell, Figure, Table
from curvlens.report.figures.scene import Common, Scene
from curvlens.report.figures.words import indexed

TWICE = 400  # cells of a map that is drawn for both widths
QUOTED = re.compile(r'="([A-Za-z0-9_.,-]+)"([ >])')
SWITCHES, PAIRED = 12, 4  # options of a switch that the style knows, and of one of two


def table(content: Table, css: str = "") -> str:
    """A table in the notation of machines, to be sorted and copied as it stands. HTML lets end tags go unsaid."""
    words = [any(isinstance(row[j], str) for row in content.rows) for j in range(len(content.columns))]
    head = "".join(
        f'<th{_class(words[j])}>{text(name)}' for j, name in enumerate(content.columns)
    )
    body = "".join(
        "<tr>" + "".join(f"<th>{text(c)}" if j == 0 and isinstance(c, str) else _cell(c) for j, c in enumerate(row))
        for row in content.rows
    )
    return f"<table{f' class={css}' if css else ''}><thead><tr>{head}<tbody>{body}</table>"


def text(words: str) -> str:
    """Escaped, with indices set low: `H_o`, `λ_max`, `‖H‖_F`."""
    return "".join(f"<sub>{escape(part)}</sub>" if low else escape(part) for part, low in indexed(words))


def _class(words: bool) -> str:
    return ' class="words"' if words else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td class=words>{text(cell)}"
    if isinstance(cell, bool):
        return f"<td>{'yes' if cell else 'no'}"
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "<td>"
    return f"<td>{cell}" if isinstance(cell, int) else "<td>" + f"{cell:.4g}".replace("e-0", "e-").replace("e+0", "e")


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
    wides = [panel.draw(WIDE) for panel in content.panels]
    common = Common.of(f"{name}-common", wides) if all(scene.grid for scene in wides) else None
    shared = QUOTED.sub(r"=\1\2", common.svg().replace('"/>', '" />')) if common else ""
    panels = shared + "".join(_panel(content, k, wide, common) for k, wide in enumerate(wides))
    return (
        f'<figure id="{name}" class="{kind}"><h3>{text(content.title)}</h3>'
        f'<p class="lead">{text(content.lead)}</p><p class="how">{text(content.how)}</p>'
        f'{switches}{panels}<output class="readout" aria-live="polite"></output>'
        f"{data(content.name, content.title, content.table)}</figure>"
    )


def _panel(content: Figure, k: int, wide: Scene, common: Common | None) -> str:
    panel = content.panels[k]
    small = panel.draw(NARROW)
    suffix = "-" + panel.name if panel.name else ""
    wide.name, small.name = f"svg-{content.name}{suffix}", f"svg-{content.name}{suffix}-small"
    if wide.grid and wide.width <= 1.3 * NARROW:  # shrinks a little on a phone
        drawn = _classed(wide.svg(common=common), "fits")
    elif wide.grid and wide.grid["rows"] * wide.grid["cols"] > TWICE:  # too much to be drawn twice: scrolls on a phone
        drawn = _classed(wide.svg(common=common), "fixed")
    else:
        small.marks = [replace(m, tip="") if hasattr(m, "tip") else m for m in small.marks]  # a phone has no pointer
        drawn = _classed(wide.svg(common=common), "wide") + _classed(small.svg(), "small")
    classes = "".join(f" s{s}-{choice}" for s, choice in enumerate(panel.choices))
    chosen = " ".join(f"{content.name}-{s}-{choice}" for s, choice in enumerate(panel.choices))
    cells = "".join(f' data-{key}="{escape(words)}"' for key, words in wide.cell_words.items())
    return (
        f'<div class="panel{classes}" data-panel="{content.name}{suffix}" data-choices="{chosen}"{cells}>'
        f'<div class="scroll">{drawn}</div></div>'
    )


def _classed(svg: str, name: str) -> str:
    """With its class, and without the quotes that HTML does not ask for."""
    return QUOTED.sub(r"=\1\2", svg.replace("<svg ", f'<svg class="{name}" ', 1).replace('"/>', '" />'))


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
