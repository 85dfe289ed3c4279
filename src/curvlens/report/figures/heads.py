"""Every attention head: its functional curvature, entropy and moments, layers by heads."""

from __future__ import annotations

import math

from curvlens.report.data import HeadTable, Report
from curvlens.report.figures.figure import Cell, Figure, Panel, Table
from curvlens.report.figures.heatmap import MOST_CELLS, SQUARE, Colouring, Source, heatmap
from curvlens.report.figures.missing import sentence
from curvlens.report.figures.scene import Scene
from curvlens.report.figures.words import number

BLOCKS = ("QQ", "KK", "QK", "VQ", "VK")
WHAT = {"QQ": "query–query", "KK": "key–key", "QK": "query–key", "VQ": "value–query", "VK": "value–key"}
MOMENTS = {"first": "‖M1 − mean‖", "second": "tr M2", "third": "|tr M3[w]|"}

Quantity = tuple[
    str, str, str, list[list[float]], list[list[float]], bool
]  # label, name, words, values, errors, signed


def quantities(heads: HeadTable) -> list[Quantity]:
    found: list[Quantity] = []
    for block in BLOCKS:
        if block in heads.norms:
            norms = heads.norms[block]
            zero = [[0.0] * len(row) for row in norms]
            errors = [
                zero[i] if heads.exact.get(block, [False] * len(norms))[i] else heads.stderr[block][i]
                for i in range(len(norms))
            ]
            words = f"Frobenius norm of the {WHAT[block]} block"
            found.append((f"‖{block}‖", f"norm-{block}", words, norms, errors, False))
    for block in ("QQ", "KK"):
        if block in heads.traces:
            found.append(
                (
                    f"tr {block}",
                    f"trace-{block}",
                    f"trace of the {WHAT[block]} block",
                    heads.traces[block],
                    [[0.0] * len(row) for row in heads.traces[block]],
                    True,
                )
            )
    if heads.entropy:
        none = [[0.0] * len(row) for row in heads.entropy]
        found.append(("entropy", "entropy", "mean entropy of attention, in nats", heads.entropy, none, False))
    for key, label in MOMENTS.items():
        if key in heads.moments:
            none = [[0.0] * len(row) for row in heads.moments[key]]
            words = f"{key} moment of attention, {label}, mean over queries"
            found.append((f"{key} moment", f"moment-{key}", words, heads.moments[key], none, False))
    return found


def head_map(report: Report) -> Figure | str:
    heads = report.heads
    if heads is None or not heads.layers:
        return sentence(report, "The closed forms of attention heads", "heads")
    found = quantities(heads)
    panels = tuple(_panel(k, found[k], heads) for k in range(len(found)))
    exact = all(all(flags) for flags in heads.exact.values())
    left = "; ".join(f"{name}: {why}" for name, why in heads.omitted.items())
    return Figure(
        "heads",
        "Attention, head by head",
        _lead(heads),
        "Exact functional curvature of each head, split at the output of its own attention layer"
        + (". " if exact else "; some norms are estimates, ± one standard error. ")
        + "KK and VK count key heads, which several query heads may share. A cross marks a head that does not exist."
        + (f" Left out: {left}." if left else ""),
        panels,
        _table(heads, found),
        (("Shown", tuple(q[0] for q in found)),),
    )


def _lead(heads: HeadTable) -> str:
    norms = heads.norms.get("QQ") or next(iter(heads.norms.values()), [])
    flat = [(v, i, h) for i, row in enumerate(norms) for h, v in enumerate(row) if math.isfinite(v)]
    if not flat or not max(flat)[0]:
        return "No head carries functional curvature of its own."
    high, i, h = max(flat)
    low, k, m = min(flat)
    several = f"; the least, {number(low)}, in {heads.layers[k]} head {m}" if len(flat) > 1 else ""
    return f"The largest query–query norm, {number(high)}, is in {heads.layers[i]} head {h}{several}."


def _panel(k: int, quantity: Quantity, heads: HeadTable) -> Panel:
    label, name, words, values, errors, signed = quantity
    flat = [v for row in values for v in row]
    if name == "entropy":
        limit = heads.entropy_limit if math.isfinite(heads.entropy_limit) else None
        colouring = Colouring.linear(flat, 0.0, limit)
    else:
        colouring = Colouring.around_zero(flat) if signed else Colouring.log(flat)
    count = max(len(row) for row in values)
    source = _source(name, heads)
    kind = "key head" if name.endswith(("KK", "VK")) else "head"

    def draw(width: float) -> Scene:
        return heatmap(
            f"heads-{name}",
            f"{words}, layers by heads",
            "One row a layer, one column a head.",
            values,
            heads.layers,
            [f"{kind} {h}" if count <= 4 else str(h) for h in range(count)],
            colouring,
            errors=errors,
            unit=words,
            what=label,
            width=width,
            cell=SQUARE if count * len(values) > MOST_CELLS else 62,
            cell_height=22 if len(values) <= 32 else 13,
            thin=True,
            source=source,
        )

    return Panel(draw, (k,), name)


def _source(name: str, heads: HeadTable) -> Source:
    """Where the panel's numbers are in the data."""
    kind, _, key = name.partition("-")
    path = {
        "norm": f"norms/{key}",
        "trace": f"traces/{key}",
        "entropy": "entropy",
        "moment": f"moments/{key}",
    }[kind]
    exact = kind != "norm" or all(heads.exact.get(key, [False]))
    return Source(f"heads/{path}", "" if exact else f"heads/stderr/{key}", "heads/layers", "head")


def _table(heads: HeadTable, found: list[Quantity]) -> Table:
    header = ["layer", "head"]
    for label, name, _, _, _, _ in found:
        header += [label, f"± {label}"] if name.startswith("norm-") else [label]
    count = max((len(row) for q in found for row in q[3]), default=0)
    rows = []
    for i, layer in enumerate(heads.layers):
        for h in range(count):
            line: list[Cell] = [layer, h]
            for _, name, _, values, errors, _ in found:
                inside = h < len(values[i])
                line.append(values[i][h] if inside else None)
                if name.startswith("norm-"):
                    line.append(errors[i][h] if inside else None)
            if any(isinstance(v, float) and math.isfinite(v) for v in line):
                rows.append(tuple(line))
    return Table(tuple(header), tuple(rows), "KK and VK are of the key head with the row's number.")
