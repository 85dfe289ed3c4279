"""Numbers and names as figures write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby

from curvlens.report.figures.scale import SUPERSCRIPTS


def number(value: float | None, digits: int = 3) -> str:
    """`0.0123`, `1.23×10⁻⁵`: to so many digits, with a true minus."""
    if value is None or math.isnan(value):
        return "not known"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return typeset(f"{value:.{digits}g}")


def measured(value: float | None, error: float | None) -> str:
    """`21.38 ± 0.14`, `(1.23 ± 0.05)×10⁻⁵`: the error to two digits, the value as far; alone where it is exact."""
    if value is None or math.isnan(value) or math.isinf(value):
        return number(value)
    if error == 0:
        return number(value, 4)
    if error is None or not math.isfinite(error):
        return f"{number(value)} (error not known)"
    exponent = math.floor(math.log10(max(abs(value), error)))
    shift = 0 if -3 <= exponent < 5 else exponent
    places = max(0, 1 - math.floor(math.log10(error / 10.0**shift)))
    words = f"{_fixed(value / 10.0**shift, places)} ± {_fixed(error / 10.0**shift, places)}"
    return f"({words})×10{str(shift).translate(SUPERSCRIPTS)}" if shift else words


def _fixed(value: float, places: int) -> str:
    return f"{value:.{min(places, 12)}f}".replace("-", "−")


def typeset(text: str) -> str:
    """A number of the machine, `-1.5e-07`, as `−1.5×10⁻⁷`; words around it stay."""
    return " ".join(_typeset(word) for word in text.split(" "))


def _typeset(word: str) -> str:
    mantissa, e, exponent = word.partition("e")
    if not e or not exponent.lstrip("+-").isdigit():
        return word.replace("-", "−") if word[1:2].isdigit() or word[1:2] == "." else word
    raised = str(int(exponent)).translate(SUPERSCRIPTS)
    return f"10{raised}" if mantissa == "1" else f"{mantissa.replace('-', '−')}×10{raised}"


def extent(words: str, size: float = 11.5) -> float:
    """The width of a line of text, about."""
    return 0.57 * size * len(words)


def layer_of(name: str) -> str:
    """`layer.3` of `layer.3.attn.query`, `encoder.layer.3` of its like; for others their first part."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i:
            return ".".join(parts[: i + 1])
    return parts[0]


def within_layer(name: str) -> str:
    """`attn.query` of `layer.3.attn.query`; the whole name for what belongs to no layer."""
    layer = layer_of(name)
    return name[len(layer) + 1 :] if name.startswith(layer + ".") and layer != name.split(".")[0] else name


def runs(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Neighbours of the same layer: (layer, first, one past the last)."""
    found, at = [], 0
    for layer, members in groupby(names, layer_of):
        count = len(list(members))
        found.append((layer, at, at + count))
        at += count
    return found


_INDEX = re.compile(r"((?<![\w.])[A-Za-zλ]|[‖²])_(max|min|[a-z]{1,2}·?|F)(?![\w])")


def indexed(text: str) -> list[tuple[str, bool]]:
    """Pieces of a text and whether they are indices: `H_o`, `λ_max`, `‖H‖_F`; names of blocks have none."""
    found, at = [], 0
    for match in _INDEX.finditer(text):
        found += [(text[at : match.end(1)], False), (match[2], True)]
        at = match.end()
    return [*found, (text[at:], False)]
