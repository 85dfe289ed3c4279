"""Where the curvature is: every pair of blocks, every pair of layers, each layer by what its weights do.

The squares of Frobenius norms add up over a partition, `‖M_AB‖² = Σ_{a∈A, b∈B} ‖M_ab‖²`, so coarser maps are exact
where the finer one is. Errors of pairs come from the same probes and are not independent: the error of a sum is
bounded by `Σ ‖M_ab‖ σ_ab / ‖M_AB‖`, as if all went the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from curvlens.report.data import PARTS, Group, Map, Report
from curvlens.report.figures.figure import Figure, Panel, Table
from curvlens.report.figures.heatmap import (
    DECADES,
    MOST_CELLS,
    MOST_WORDS,
    SQUARE,
    Colouring,
    Source,
    heatmap,
)
from curvlens.report.figures.missing import sentence
from curvlens.report.figures.scale import Log
from curvlens.report.figures.scene import Scene
from curvlens.report.figures.words import measured, runs

NAMES = {"H": "H", "H_o": "H_o, outer", "H_f": "H_f, functional"}
ROLES = ("embed", "norm", "query", "key", "value", "out", "up", "gate", "down", "head", "other")
LEAST_LAYERS = 4  # rows of a map by layers, for it to say more than that by blocks
MOST_ROWS = 25  # of pairs in the table of a large map


def coarser(matrix: Map, rows: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Norms and bounds of their errors for sets of groups, from those of pairs of groups."""
    value, error = [], []
    for A in rows:
        norms, errors = [], []
        for B in rows:
            pairs = [(matrix.value[a][b], matrix.stderr[a][b]) for a in A for b in B]
            norm, spread = combined(pairs)
            norms.append(norm)
            errors.append(0.0 if matrix.exact else spread)
        value.append(norms)
        error.append(errors)
    return value, error


def combined(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The root of the sum of squares, and a bound of its error; NaN where a part is not known."""
    pairs = list(pairs)
    norm = math.sqrt(sum(v * v for v, _ in pairs))
    return norm, sum(v * e for v, e in pairs) / norm if norm else max((e for _, e in pairs), default=0.0)


def block_map(report: Report) -> Figure | str:
    parts = [part for part in PARTS if part in report.maps]
    if not parts:
        return _absent(report, "The norms of pairs of blocks")
    names = report.maps[parts[0]].names
    views = [("by block", "blocks")]
    if LEAST_LAYERS <= len(runs(names)) < len(names):
        views = [("by layer", "layers"), ("by block", "blocks")]
    panels = []
    for p, part in enumerate(parts):
        for v, (_, view) in enumerate(views):
            panels.append(_map_panel(report, part, view, (p, v) if len(views) > 1 else (p,)))
    lead = _largest(report.maps[parts[0]], NAMES[parts[0]].split(",")[0])
    rows = _pair_rows(report, parts)
    switches = [("Matrix", tuple(NAMES[part] for part in parts))]
    if len(views) > 1:
        switches.append(("Shown", tuple(label for label, _ in views)))
    total = len(names) * (len(names) + 1) // 2 * len(parts)
    note = (
        f"The {len(rows):,} largest of {total:,} pairs; squares of norms add up over blocks."
        if len(rows) < total
        else ""
    )
    return Figure(
        "blocks",
        "The Hessian, block by block",
        lead,
        "Each cell is the Frobenius norm of one block of the matrix, on a logarithmic scale; the diagonal is a "
        "block with itself. Squares add up, so layers are exact sums of their blocks. "
        + ("A pair of layers opens into its blocks by a click or Enter. " if len(views) > 1 else "")
        + (
            "The norms are exact."
            if report.maps[parts[0]].exact
            else "The norms are estimates, ± one standard error."
        ),
        tuple(panels),
        Table(
            ("matrix", "row", "column", "‖·‖_F", "±"),
            tuple(rows),
            note,
            " ".join(f"maps/{part}" for part in parts) if len(rows) < total else "",
        ),
        tuple(switches),
    )


def _map_panel(report: Report, part: str, view: str, choices: tuple[int, ...]) -> Panel:
    matrix = report.maps[part]
    title = f"Frobenius norms of {NAMES[part]}"
    if view == "layers":
        whole = runs(matrix.names)
        value, error = coarser(matrix, [range(first, last) for _, first, last in whole])
        names = [name for name, _, _ in whole]
        source = ""
    else:
        value, error, names = matrix.value, matrix.stderr, matrix.names
        source = f"maps/{part}" if len(names) ** 2 > MOST_WORDS else ""
    colouring = Colouring.log(v for row in value for v in row)
    cell = min(52.0, 600 / max(1, len(names)))

    def draw(width: float) -> Scene:
        scene = heatmap(
            f"blocks-{part}-{view}",
            title,
            f"{len(names)} by {len(names)} {view}; darker is larger.",
            value,
            names,
            names,
            colouring,
            errors=None if matrix.exact else error,
            unit=f"‖{part}‖_F of a block",
            what=f"‖{part}‖_F",
            width=width,
            cell=cell,
            source=Source(f"{source}/value", "" if matrix.exact else f"{source}/stderr", f"{source}/names")
            if source
            else None,
        )
        if view == "layers":  # the blocks inside of a cell can be opened
            ends = Log.of((v for row in matrix.value for v in row), DECADES)
            scene.cell_words |= {
                "detail": f"maps/{part}",
                "low": f"{ends.low:.6g}",
                "high": f"{ends.high:.6g}",
            }
        return scene

    return Panel(draw, choices, f"{part}-{view}")


def _largest(matrix: Map, name: str) -> str:
    """The block with most of the squared norm, and the share of the diagonal."""
    squares = [[v * v if math.isfinite(v) else 0.0 for v in row] for row in matrix.value]
    total = sum(map(sum, squares))
    if not total:
        return f"‖{name}‖_F is zero, or not known, everywhere."
    n = range(len(matrix.names))
    i, j = max(((i, j) for i in n for j in n), key=lambda at: squares[at[0]][at[1]])
    share, diagonal = squares[i][j] * (1 if i == j else 2) / total, sum(squares[k][k] for k in n) / total
    pair = matrix.names[i] if i == j else f"{matrix.names[i]} × {matrix.names[j]}"
    return (
        f"{pair} holds {share:.0%} of ‖{name}‖²_F; the diagonal blocks together hold {diagonal:.0%}, "
        f"pairs of different blocks {1 - diagonal:.0%}."
    )


def _pair_rows(report: Report, parts: Sequence[str]) -> list[tuple[str, str, str, float, float]]:
    rows = []
    for part in parts:
        matrix = report.maps[part]
        n = len(matrix.names)
        found = [
            (
                part,
                matrix.names[i],
                matrix.names[j],
                matrix.value[i][j],
                0.0 if matrix.exact else matrix.stderr[i][j],
            )
            for i in range(n)
            for j in range(i, n)
        ]
        if n * (n + 1) // 2 > MOST_ROWS:
            found = sorted(found, key=lambda row: -row[3] if math.isfinite(row[3]) else math.inf)[:MOST_ROWS]
        rows += found
    return rows


def by_role(report: Report) -> Figure | str:
    """Diagonal blocks as layers by roles: norms of the three matrices and their traces."""
    kinds: list[tuple[str, str, list[float], list[float], bool]] = []
    for part in PARTS:
        if part in report.maps:
            m = report.maps[part]
            row = {name: i for i, name in enumerate(m.names)}
            if not all(g.name in row for g in report.groups):
                continue  # the map's rows are coarser
            n = [row[g.name] for g in report.groups]
            errors = [0.0 if m.exact else m.stderr[i][i] for i in n]
            kinds.append((f"‖{part}‖_F", f"norm-{part}", [m.value[i][i] for i in n], errors, False))
    for part in PARTS:
        if part in report.traces:
            t = report.traces[part]
            errors = [0.0] * len(t.value) if t.exact else t.stderr
            kinds.append((f"tr {part}", f"trace-{part}", t.value, errors, True))
    gradient = [g.gradient for g in report.groups]
    if any(math.isfinite(v) for v in gradient):
        kinds.append(("gradient", "gradient", gradient, [0.0] * len(gradient), False))
    if not kinds:
        return _absent(report, "Norms and traces of the diagonal blocks")
    places, rows, columns = _places(report.groups)
    panels = tuple(_role_panel(k, kinds[k], places, rows, columns) for k in range(len(kinds)))
    header = ["block", "role", "parameters", "gradient norm", "weight norm"]
    for label, name, *_ in kinds:
        if name != "gradient":
            header += [label, f"± {label}"]
    table = []
    for i, g in enumerate(report.groups):
        line: list[str | float | int | None] = [g.name, g.role, g.size, g.gradient, g.weight]
        for _, name, values, errors, _ in kinds:
            if name != "gradient":
                line += [values[i], errors[i]]
        table.append(tuple(line))
    label, _, values, errors, _ = kinds[0]
    at = sorted((i for i, v in enumerate(values) if math.isfinite(v)), key=lambda i: -values[i])[:3]
    named = ", ".join(f"{report.groups[i].name} ({measured(values[i], errors[i])})" for i in at)
    return Figure(
        "roles",
        "Each layer by what its weights do",
        f"The largest {label} of a diagonal block: {named}.",
        "Diagonal blocks: norm, trace, and the loss's gradient; the table has the weights' norm too. "
        "Traces have signs: blue is positive, orange "
        "negative. Groups of one kind in one layer are combined: squares of norms add, traces add.",
        panels,
        Table(tuple(header), tuple(table)),
        (("Shown", tuple(kind[0] for kind in kinds)),) if len(kinds) > 1 else (),
    )


def _places(groups: Sequence[Group]) -> tuple[dict[tuple[str, str], list[int]], list[str], list[str]]:
    places: dict[tuple[str, str], list[int]] = {}
    for i, g in enumerate(groups):
        row = f"layer {g.layer}" if g.layer is not None else "outside of layers"
        places.setdefault((row, g.role), []).append(i)
    rows = list(dict.fromkeys(row for row, _ in places))
    rows = [r for r in rows if r != "outside of layers"] + [r for r in rows if r == "outside of layers"]
    used = {role for _, role in places}
    return places, rows, [r for r in ROLES if r in used] + sorted(used - set(ROLES))


def _role_panel(
    k: int,
    kind: tuple[str, str, list[float], list[float], bool],
    places: dict[tuple[str, str], list[int]],
    rows: list[str],
    columns: list[str],
) -> Panel:
    label, name, values, errors, signed = kind
    matrix: list[list[float]] = []
    spread: list[list[float]] = []
    for row in rows:
        pairs = []
        for column in columns:
            members = places.get((row, column))
            if not members:
                pairs.append((math.nan, math.nan))
            elif signed:
                pairs.append((sum(values[i] for i in members), sum(errors[i] for i in members)))
            else:
                pairs.append(combined((values[i], errors[i]) for i in members))
        matrix.append([v for v, _ in pairs])
        spread.append([e for _, e in pairs])
    flat = [v for line in matrix for v in line]
    colouring = Colouring.around_zero(flat) if signed else Colouring.log(flat)
    many = len(rows) * len(columns) > MOST_CELLS

    def draw(width: float) -> Scene:
        return heatmap(
            f"roles-{name}",
            f"{label} of the diagonal blocks",
            "Layers by roles of their weights.",
            matrix,
            rows,
            columns,
            colouring,
            errors=spread,
            unit=label,
            width=width,
            cell=SQUARE if many else 62,
            cell_height=22 if len(rows) <= 32 else 12,
            absent="no such weights",
        )

    return Panel(draw, (k,), name)


def _absent(report: Report, what: str) -> str:
    return sentence(report, what, "norms")
