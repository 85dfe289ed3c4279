"""Colours, computed: ramps of even lightness in OKLCH, and the contrast that WCAG asks for.

A ramp whose lightness rises evenly reads the same to every eye; its hues only help. Ottosson's OKLab (2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEVELS = 64  # of a map's colours; the exact value is in the text beside it


def hexadecimal(lightness: float, chroma: float, hue: float) -> str:
    """`#rrggbb` of an OKLCH colour, its chroma reduced to what a screen can show."""
    low, high = 0.0, chroma
    if _inside(_linear(lightness, high, hue)):
        low = high
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(_linear(lightness, middle, hue)) else (low, middle)
    return "#" + "".join(
        f"{round(255 * _encode(min(1, max(0, c)))):02x}" for c in _linear(lightness, low, hue)
    )


def _linear(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )


def _inside(rgb: tuple[float, float, float]) -> bool:
    return all(-1e-4 <= c <= 1 + 1e-4 for c in rgb)


def _encode(c: float) -> float:
    return 12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055


def bytes_of(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG defines it."""
    parts = [c / 255 for c in bytes_of(colour)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio: 1, alike, to 21, black on white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _path(stops: Sequence[tuple[float, float, float]], levels: int) -> list[str]:
    """Colours along straight lines between stops (lightness, chroma, hue)."""
    found = []
    for i in range(levels):
        at = i / (levels - 1) * (len(stops) - 1)
        k = min(int(at), len(stops) - 2)
        f = at - k
        found.append(hexadecimal(*(a + f * (b - a) for a, b in zip(stops[k], stops[k + 1], strict=True))))
    return found


def sequential(dark: bool) -> list[str]:
    """From the page's ground to its opposite: little is near the ground, much stands out."""
    if dark:
        return _path([(0.27, 0.035, 275), (0.45, 0.105, 255), (0.66, 0.115, 200), (0.94, 0.10, 120)], LEVELS)
    return _path([(0.965, 0.02, 130), (0.80, 0.085, 180), (0.54, 0.115, 240), (0.26, 0.09, 280)], LEVELS)


def diverging(dark: bool) -> list[str]:
    """Negative orange, zero the page's ground, positive blue: told apart by every kind of colour vision."""
    ground = 0.27 if dark else 0.965
    end, middle = (0.82, 0.60) if dark else (0.36, 0.68)
    half = LEVELS // 2
    negative = _path([(ground, 0.01, 60), (middle, 0.13, 55), (end, 0.11, 45)], half)
    positive = _path([(ground, 0.01, 250), (middle, 0.12, 250), (end, 0.12, 262)], half)
    return [*reversed(negative), *positive]
