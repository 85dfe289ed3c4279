"""A figure of the report: its drawings, what they show, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from curvlens.report.figures.scene import Scene

WIDE, NARROW = 760, 344  # the text's column, and a phone's

Cell = str | float | int | bool | None


@dataclass(frozen=True)
class Table:
    """Plain values; None for what is not known. `note` says what is left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    source: str = ""  # where in the data all pairs are, if not here: paths of maps

    def known(self) -> Table:
        """Without the columns of errors that are all zero: what is exact needs none."""
        kept = [
            j
            for j, name in enumerate(self.columns)
            if "±" not in name or any(row[j] not in (0, None) for row in self.rows)
        ]
        rows = tuple(tuple(row[j] for j in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[j] for j in kept), rows=rows)

    def csv(self) -> str:
        import csv
        import io

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure, for one choice of each of its switches."""

    draw: Callable[[float], Scene]
    choices: tuple[int, ...] = ()
    name: str = ""  # of the file


@dataclass(frozen=True)
class Figure:
    """`lead` is what the figure says, in numbers; `how` is how to read it."""

    name: str
    title: str
    lead: str
    how: str
    panels: tuple[Panel, ...]
    table: Table
    switches: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (what is chosen, its options)

    def scenes(self, width: float = WIDE) -> Iterator[tuple[str, Scene]]:
        """Each drawing with the name of its file."""
        for panel in self.panels:
            yield f"{self.name}-{panel.name}" if panel.name else self.name, panel.draw(width)
