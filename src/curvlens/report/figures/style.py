"""What every mark looks like: one table of roles, for the page, for files and for paper.

A role is a class in SVG. Colours are named, with a light and a dark value, so that a figure follows the page's theme.
"""

from __future__ import annotations

from collections.abc import Iterable

from curvlens.report.figures.colour import LEVELS, contrast, diverging, sequential

# name: (light, dark)
COLOURS = {
    "ground": ("#ffffff", "#15171c"),
    "raised": ("#f6f7f9", "#1e2128"),
    "ink": ("#1a1d23", "#e9ebef"),
    "muted": ("#565d69", "#a6adba"),
    "rule": ("#d8dce2", "#363b45"),
    "edge": ("#8b93a0", "#727a88"),
    "total": ("#4a3f8f", "#b3a8f5"),
    "outer": ("#0a64ad", "#6db5f7"),
    "functional": ("#b04a00", "#f7a35c"),
    "third": ("#12775a", "#5fcaa3"),
    "alarm": ("#b3201b", "#ff8f85"),
    # of text on a map: what stands out is black or white, whatever the theme
    "black-white": ("#000000", "#ffffff"),
    "black-black": ("#000000", "#000000"),
    "white-black": ("#ffffff", "#000000"),
    "white-white": ("#ffffff", "#ffffff"),
}
PAIRS = ("black-white", "black-black", "white-black", "white-white")
SERIES = ("total", "outer", "functional", "alarm", "ink", "muted")

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'Liberation Sans',sans-serif"

Style = dict[str, str | float]


def _roles() -> dict[str, Style]:
    """Properties of each role; a colour is the name of one."""
    roles: dict[str, Style] = {
        "label": {"fill": "muted", "font-size": "11.5px"},
        "name": {"fill": "ink", "font-size": "11.5px"},
        "strong": {"fill": "ink", "font-size": "12px", "font-weight": 600},
        **{f"on-{pair}": {"fill": pair, "font-size": "10px"} for pair in PAIRS},
        "grid": {"stroke": "rule", "stroke-width": 1, "fill": "none"},
        "axis": {"stroke": "edge", "stroke-width": 1, "fill": "none"},
        "zero-line": {"stroke": "edge", "stroke-width": 1, "fill": "none", "stroke-dasharray": "2 3"},
        "gap": {"stroke": "ground", "stroke-width": 1, "fill": "none"},
        "frame": {"stroke": "rule", "stroke-width": 1, "fill": "none"},
        "missing": {"fill": "raised", "stroke": "rule", "stroke-width": 1},
        "cross": {"stroke": "edge", "stroke-width": 1, "fill": "none"},
        "nought": {"fill": "ground", "stroke": "rule", "stroke-width": 1},
        "blank": {"fill": "ground"},
    }
    for name in SERIES:
        roles[f"line-{name}"] = {
            "stroke": name,
            "stroke-width": 1.75,
            "fill": "none",
            "stroke-linejoin": "round",
        }
        roles[f"thin-{name}"] = {"stroke": name, "stroke-width": 1, "fill": "none"}
        roles[f"dash-{name}"] = {
            "stroke": name,
            "stroke-width": 1.5,
            "fill": "none",
            "stroke-dasharray": "6 4",
        }
        roles[f"mark-{name}"] = {"fill": name, "stroke": "ground", "stroke-width": 1}
        roles[f"hollow-{name}"] = {"fill": "ground", "stroke": name, "stroke-width": 1.5}
        roles[f"band-{name}"] = {"fill": name, "fill-opacity": 0.2}
        roles[f"hill-{name}"] = {"fill": name, "fill-opacity": 0.2, "stroke": name, "stroke-width": 1}
        roles[f"text-{name}"] = {"fill": name, "font-size": "11.5px", "font-weight": 600}
    return roles


ROLES = _roles()


def ramp(role: str, dark: bool = False) -> str | None:
    """The colour of a level of a map, `q0` … `q63` or `d0` … `d63`; None for any other role."""
    kind, level = role[:1], role[1:]
    if kind not in ("q", "d") or not level.isdigit():
        return None
    return _RAMPS[kind, dark][int(level)]


_RAMPS = {
    (kind, dark): f(dark) for kind, f in (("q", sequential), ("d", diverging)) for dark in (False, True)
}


def over(role: str) -> str:
    """The role of text on a cell: of black and white the one that is easier to read, in each theme."""
    grounds = [str(resolved(role, dark)["fill"]) for dark in (False, True)]
    light, dark = ("black" if contrast("#000000", g) >= contrast("#ffffff", g) else "white" for g in grounds)
    return f"on-{light}-{dark}"


def resolved(role: str, dark: bool = False) -> Style:
    """The properties of a role, with colours as `#rrggbb`."""
    colour = ramp(role, dark)
    if colour is not None:
        return {"fill": colour}
    return {
        key: COLOURS[value][dark] if isinstance(value, str) and value in COLOURS else value
        for key, value in ROLES[role].items()
    }


def _rule(role: str, style: Style) -> str:
    return f".{role}{{{';'.join(f'{k}:{v}' for k, v in style.items())}}}"


def sheet(roles: Iterable[str], dark: bool = False) -> str:
    """The style of a figure that stands alone."""
    rules = [_rule(role, resolved(role, dark)) for role in sorted(set(roles))]
    return f"text{{font-family:{FONT}}}" + "".join(rules)


def page_sheet() -> str:
    """The style of all figures of a page: colours as variables, the levels of maps for both themes."""

    def variables(dark: bool) -> str:
        return ":root{" + "".join(f"--{name}:{both[dark]};" for name, both in COLOURS.items()) + "}"

    def levels(dark: bool) -> str:
        return "".join(f".{k}{i}{{fill:{_RAMPS[k, dark][i]}}}" for k in "qd" for i in range(LEVELS))

    named = {
        role: {k: f"var(--{v})" if isinstance(v, str) and v in COLOURS else v for k, v in style.items()}
        for role, style in ROLES.items()
    }
    rules = "".join(_rule(role, style) for role, style in named.items())
    night = "@media screen and (prefers-color-scheme:dark){" + variables(True) + levels(True)
    return (
        variables(False)
        + levels(False)
        + rules
        + ".night{display:none}"
        + night
        + ".day{display:none}.night{display:inline}}"
    )
