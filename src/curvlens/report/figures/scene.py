"""A figure as a list of marks, drawn as SVG text here and on paper by `paper`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from curvlens.report.figures import style
from curvlens.report.figures.colour import LEVELS, bytes_of
from curvlens.report.figures.png import gray_png, indexed_png
from curvlens.report.figures.words import indexed

Point = tuple[float, float]
PLAIN = ("raster", "ramp")  # roles that say nothing about looks


@dataclass(frozen=True)
class Rect:
    role: str
    x: float
    y: float
    width: float
    height: float
    tip: str = ""


@dataclass(frozen=True)
class Cells:
    """Rectangles of one size and colour, drawn as one."""

    role: str
    corners: tuple[Point, ...]
    width: float
    height: float


@dataclass(frozen=True)
class Path:
    role: str
    points: tuple[Point, ...]
    closed: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Dot:
    role: str
    x: float
    y: float
    shape: str  # "circle", "square", "diamond", "triangle"
    radius: float
    tip: str = ""


@dataclass(frozen=True)
class Text:
    role: str
    x: float
    y: float
    words: str
    anchor: str = "start"  # "middle", "end"
    turn: float = 0.0  # degrees, clockwise


@dataclass(frozen=True)
class Raster:
    """Many cells as one picture, each the role of a level; the exact values are in the data."""

    role: str
    x: float
    y: float
    width: float
    height: float
    cells: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Segments:
    """Separate lines of one role, drawn as one."""

    role: str
    pieces: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class Ramp:
    """The colours of a legend, low to high; a page holds each kind once."""

    role: str
    kind: str  # "q", one way; "d", both ways from zero
    x: float
    y: float
    width: float
    height: float


Mark = Rect | Cells | Path | Segments | Dot | Text | Raster | Ramp


@dataclass
class Scene:
    """One drawing. `title` and `description` are read aloud; `grid` says where the cells of a map lie, `cell_words`
    what they say, each once for all widths."""

    name: str
    title: str
    description: str
    width: float
    height: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    grid: dict[str, float] | None = None
    cell_words: dict[str, str] = field(default_factory=dict)

    def rect(self, role: str, x: float, y: float, width: float, height: float, tip: str = "") -> None:
        self.marks.append(Rect(role, x, y, width, height, tip))

    def cells(self, role: str, corners: Iterable[Point], width: float, height: float) -> None:
        self.marks.append(Cells(role, tuple(corners), width, height))

    def line(self, role: str, *points: Point, tip: str = "") -> None:
        self.marks.append(Path(role, tuple(points), False, tip))

    def segments(self, role: str, pieces: Iterable[Sequence[Point]]) -> None:
        self.marks.append(Segments(role, tuple(tuple(piece) for piece in pieces)))

    def ramp(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        self.marks.append(Ramp("ramp", kind, x, y, width, height))

    def area(self, role: str, points: Iterable[Point]) -> None:
        self.marks.append(Path(role, tuple(points), True))

    def dot(
        self, role: str, x: float, y: float, shape: str = "circle", radius: float = 4, tip: str = ""
    ) -> None:
        self.marks.append(Dot(role, x, y, shape, radius, tip))

    def text(self, role: str, x: float, y: float, words: str, anchor: str = "start", turn: float = 0) -> None:
        self.marks.append(Text(role, x, y, words, anchor, turn))

    def raster(self, x: float, y: float, width: float, height: float, cells: Sequence[Sequence[str]]) -> None:
        self.marks.append(Raster("raster", x, y, width, height, tuple(tuple(row) for row in cells)))

    @property
    def nodes(self) -> int:
        """Elements of the drawing, the words of tips not counted."""
        return len(self.marks)

    def svg(self, alone: bool = False, dark: bool = False, common: Common | None = None) -> str:
        """The drawing as SVG; `alone`, with its own style and colours, as a file.

        Marks that several drawings have in `common` are referred to by name: over a map, under anything else.
        """
        name = self.name
        attributes = [
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"',
            f'width="{_n(self.width)}" height="{_n(self.height)}"',
            'role="img"',
        ]
        if alone:
            attributes.insert(0, 'xmlns="http://www.w3.org/2000/svg"')
        if self.grid and not alone:
            attributes += [f'data-{key}="{_n(value)}"' for key, value in self.grid.items()]
        parts = [
            f"<svg {' '.join(attributes)}>",
            f"<title>{escape(self.title, False)}</title>",
            f"<desc>{escape(self.description, False)}</desc>",
        ]
        if alone:
            ground = style.COLOURS["ground"][dark]
            roles = {m.role for m in self.marks} - set(PLAIN)
            for kind in {m.kind for m in self.marks if isinstance(m, Ramp)}:
                roles |= {f"{kind}{i}" for i in range(LEVELS)}
            parts.append(f"<style>{style.sheet(roles, dark)}</style>")
            parts.append(f'<rect width="100%" height="100%" fill="{ground}"/>')
        drawn = [
            _drawn([m for m in self.marks if common is None or m not in common.marks], alone, dark, name)
        ]
        if common is not None:
            drawn.insert(1 if self.grid else 0, f'<use href="#{common.name}"/>')
        parts += drawn
        return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Common:
    """What several drawings share, in its order."""

    name: str
    marks: tuple[Mark, ...]

    @classmethod
    def of(cls, name: str, scenes: Sequence[Scene]) -> Common | None:
        """The marks that all scenes have; None where that is not worth a reference."""
        shared = set(scenes[0].marks).intersection(*(scene.marks for scene in scenes[1:]))
        shared = {mark for mark in shared if not isinstance(mark, (Raster, Ramp))}
        if len(scenes) < 2 or len(shared) < 6:
            return None
        return cls(name, tuple(mark for mark in scenes[0].marks if mark in shared))

    def svg(self) -> str:
        drawn = _drawn(self.marks, False, False, self.name)
        return _hidden(f'<g id="{self.name}">{drawn}</g>')


def _drawn(marks: Iterable[Mark], alone: bool, dark: bool, name: str) -> str:
    parts: list[str] = []
    for (role, anchor), run in groupby(marks, lambda mark: (mark.role, getattr(mark, "anchor", "start"))):
        elements = [_element(mark, alone, dark, name) for mark in run]
        look = f'class="{role}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        if role in PLAIN:
            parts += elements
        elif len(elements) == 1:
            parts.append(re.sub(r"^<(\w+)", rf"<\1 {look}", elements[0]))
        else:  # a group for each run of one look
            parts += [f"<g {look}>", *elements, "</g>"]
    return "".join(parts)


def _n(value: float) -> str:
    """A coordinate, to a tenth."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def definitions() -> str:
    """What the figures of a page share: the colours of legends, and filters that colour gray pictures."""
    groups = "".join(
        f'<g id="ramp-{kind}">'
        + "".join(f'<path class="{kind}{i}" d="M{i},0H{min(i + 2, LEVELS)}v1H{i}"/>' for i in range(LEVELS))
        + "</g>"
        for kind in ("q", "d")
    )
    filters = "".join(
        _filter(f"{theme}-{kind}", kind, dark)
        for kind in ("q", "d")
        for theme, dark in (("day", False), ("night", True))
    )
    return _hidden(groups + filters)


def _hidden(definitions: str) -> str:
    return f'<svg class="shared" width="0" height="0" aria-hidden="true"><defs>{definitions}</defs></svg>'


def _filter(name: str, kind: str, dark: bool) -> str:
    roles = [*(f"{kind}{i}" for i in range(LEVELS)), *SPECIAL]
    colours = [bytes_of(str(style.resolved(role, dark)["fill"])) for role in roles]
    tables = "".join(
        f'<feFunc{channel} type="discrete" tableValues="{" ".join(f"{c[i] / 255:.3f}".lstrip("0") for c in colours)}"/>'
        for i, channel in enumerate("RGB")
    )
    return (
        f'<filter id="{name}" x="0" y="0" width="1" height="1" color-interpolation-filters="sRGB">'
        f"<feComponentTransfer>{tables}</feComponentTransfer></filter>"
    )


def shape_points(shape: str, x: float, y: float, r: float) -> list[Point]:
    """The corners of a mark that is not a circle."""
    if shape == "square":
        a = 0.88 * r
        return [(x - a, y - a), (x + a, y - a), (x + a, y + a), (x - a, y + a)]
    if shape == "diamond":
        a = 1.25 * r
        return [(x, y - a), (x + a, y), (x, y + a), (x - a, y)]
    return [(x, y - 1.2 * r), (x + 1.1 * r, y + 0.8 * r), (x - 1.1 * r, y + 0.8 * r)]


def _d(points: Iterable[Point], closed: bool) -> str:
    """A path by its steps from point to point, in tenths; what rounding leaves over goes into the next step."""
    at, parts = (0, 0), list[str]()
    for x, y in points:
        here = round(10 * x), round(10 * y)
        step = here if not parts else (here[0] - at[0], here[1] - at[1])
        words = ",".join(_n(part / 10) for part in step)
        parts.append(("M" if not parts else "l") + words)
        at = here
    return "".join(parts) + ("Z" if closed else "")


def _element(mark: Mark, alone: bool, dark: bool, name: str) -> str:
    if isinstance(mark, Text):
        turn = f' transform="rotate({_n(mark.turn)} {_n(mark.x)} {_n(mark.y)})"' if mark.turn else ""
        return f'<text x="{_n(mark.x)}" y="{_n(mark.y)}"{turn}>{_lowered(mark.words)}</text>'
    if isinstance(mark, Raster):
        return _image(mark, dark) if alone else _gray_image(mark, name)
    if isinstance(mark, Ramp):
        if not alone:
            place = f"translate({_n(mark.x)},{_n(mark.y)})scale({mark.width / LEVELS:.3f},{_n(mark.height)})"
            return f'<use href="#ramp-{mark.kind}" transform="{place}"/>'
        levels = "".join(
            f'<path class="{mark.kind}{i}" d="M{i},0H{min(i + 2, LEVELS)}v1H{i}"/>' for i in range(LEVELS)
        )
        place = f"translate({_n(mark.x)},{_n(mark.y)}) scale({mark.width / LEVELS:.3f},{_n(mark.height)})"
        return f'<g transform="{place}">{levels}</g>'
    if isinstance(mark, Segments):
        return f'<path d="{"".join(_d(piece, False) for piece in mark.pieces)}"/>'
    if isinstance(mark, Cells):
        w, h = _n(mark.width), _n(mark.height)
        return f'<path d="{"".join(f"M{_n(x)},{_n(y)}h{w}v{h}h-{w}" for x, y in mark.corners)}"/>'
    if isinstance(mark, Rect):
        tag, rest = "rect", _box(mark)
    elif isinstance(mark, Path):
        tag, rest = "path", f'd="{_d(mark.points, mark.closed)}"'
    elif mark.shape == "circle":
        tag, rest = "circle", f'cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}"'
    else:
        corners = shape_points(mark.shape, mark.x, mark.y, mark.radius)
        tag, rest = "path", f'd="{_d(corners, True)}"'
    if not mark.tip:
        return f"<{tag} {rest}/>"
    return f"<{tag} {rest}><title>{escape(mark.tip, False)}</title></{tag}>"


def _lowered(words: str) -> str:
    """Text with its indices set low, as `H_o` means."""
    low = '<tspan dy="2.5" font-size="75%">{}</tspan><tspan dy="-2.5">\u200b</tspan>'
    return "".join(low.format(text) if below else text for text, below in indexed(escape(words, False)))


def _box(mark: Rect | Raster) -> str:
    return f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}"'


def _image(mark: Raster, dark: bool) -> str:
    """The picture in its colours, for a file."""
    roles = sorted({role for row in mark.cells for role in row})
    colours = [str(style.resolved(role, dark)["fill"]) for role in roles]
    index = {role: i for i, role in enumerate(roles)}
    return f"<image {_placed(mark, indexed_png([[index[r] for r in row] for row in mark.cells], colours))}/>"


def _gray_image(mark: Raster, name: str) -> str:
    """The picture in grays, coloured by the page's filter for either theme: so it is there once."""
    kind = next((role[0] for row in mark.cells for role in row if role[1:].isdigit()), "q")
    data = gray_png([[_gray(role) for role in row] for row in mark.cells])
    return (
        f'<g class="day" filter="url(#day-{kind})"><image id="{name}-picture" {_placed(mark, data)}/></g>'
        f'<g class="night" filter="url(#night-{kind})"><use href="#{name}-picture"/></g>'
    )


SPECIAL = ("blank", "missing")  # roles of cells beside the levels of a ramp
STEPS = LEVELS + len(SPECIAL)


def _gray(role: str) -> int:
    level = LEVELS + SPECIAL.index(role) if role in SPECIAL else int(role[1:])
    return round(255 * (level + 0.5) / STEPS)


def _placed(mark: Raster, data: bytes) -> str:
    href = "data:image/png;base64," + base64.b64encode(data).decode()
    # smoothing would invent values between cells
    return f'{_box(mark)} preserveAspectRatio="none" image-rendering="pixelated" href="{href}"'
