"""What the closed forms of the heads say: heads without curvature, saturated and even attention."""

from __future__ import annotations

import math
from statistics import median

from curvlens.report.data import Finding, HeadTable, Report
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import Amount, certainty, of, root_of_squares

SHOWN = 12  # heads that are named
QUERY_BLOCKS = ("QQ", "QK", "VQ")  # those that every query head has


def idle_heads(report: Report) -> Finding | None:
    """Heads whose functional curvature is next to nothing beside the median head's."""
    if report.heads is None:
        return None
    norms = _norms(report.heads)
    if len(norms) < 2:
        return None
    middle = Amount(median(norm.value for norm in norms.values()))
    if not middle.value:
        return None
    idle = {name: norm / middle for name, norm in norms.items() if (norm / middle).below(t.IDLE)}
    if not idle:
        return None
    least = min(idle, key=lambda name: idle[name].value)
    return Finding(
        "idle-heads",
        "notice",
        f"{_count(idle)} no curvature of {'its' if len(idle) == 1 else 'their'} own",
        f"Their functional Hessian is below {t.IDLE:g} of the median head's: queries and keys there do not change "
        f"what the loss sees. Least: {least}.",
        [_listed(idle), f"median head {middle}"],
        certainty(*idle.values()),
        "Candidates for pruning: leave one out and look at the loss. If they were meant to learn, look at the "
        "scale of "
        "their values and of their output, and whether their attention is saturated.",
        "Ormaniec, Dangel, Singh 2025, Theorem 3.2 (closed form for every head)",
        _groups(idle),
    )


def saturated_heads(report: Report) -> Finding | None:
    """Entropy next to zero: then the moments M2 and M3 vanish, and with them every block of query and key."""
    shares = _entropy(report)
    found = {name: share for name, share in shares.items() if share < t.SATURATED}
    if not found:
        return None
    assert report.heads is not None
    seconds = _table(report.heads, report.heads.moments.get("second", []))
    return Finding(
        "saturated-heads",
        "warning",
        f"{_count(found)} a saturated softmax",
        "Nearly all of their attention goes to a single token. The second and third moment of attention, by "
        "which query "
        "and key enter the Hessian, go to zero with it, and so do their gradients: these heads hardly learn.",
        [f"entropy over that of even attention: {_listed(found)}"]
        + [f"tr M2 of {name}: {number(seconds[name])}" for name in list(found)[:3] if name in seconds],
        "Entropy and moments are exact on the data given.",
        "Lower the scale of queries and keys (QK-norm, logit soft-capping, a smaller learning rate for them); "
        "a temperature above one restores their curvature.",
        "Ormaniec, Dangel, Singh 2025, Theorem 3.1 and §4.2; Zhai et al. 2023 on entropy collapse",
        _groups(found),
    )


def even_heads(report: Report) -> Finding | None:
    shares = _entropy(report)
    found = {name: share for name, share in shares.items() if share > t.EVEN}
    if not found:
        return None
    return Finding(
        "even-heads",
        "info",
        f"{_count(found)} even attention: no token is looked at more than another",
        "Queries and keys do not yet decide anything. The layer is a mean over tokens, which only its value "
        "weights shape.",
        [f"entropy over that of even attention: {_listed(found)}"],
        "Entropy is exact on the data given.",
        "At initialisation this is usual. After training it says that the head is a mean, or that the scale of "
        "queries "
        "and keys is too small to learn from.",
        "Ormaniec, Dangel, Singh 2025, §4.2",
        _groups(found),
    )


def _norms(heads: HeadTable) -> dict[str, Amount]:
    """The functional norm of each head, without the key's own block, which grouped heads share."""
    found = {}
    for i, layer in enumerate(heads.layers):
        for h in range(len(heads.norms["QQ"][i])):
            cells = [of(heads.norms[b][i][h], heads.stderr[b][i][h], heads.exact[b][i]) for b in QUERY_BLOCKS]
            if not any(math.isnan(c.value) for c in cells):
                found[f"{layer} head {h}"] = root_of_squares(cells)
    return found


def _entropy(report: Report) -> dict[str, float]:
    """The entropy of each head as a share of that of even attention, where that is known."""
    heads = report.heads
    if heads is None or not heads.entropy_limit > 0:
        return {}
    found = _table(heads, heads.entropy)
    return {name: value / heads.entropy_limit for name, value in found.items()}


def _table(heads: HeadTable, values: list[list[float]]) -> dict[str, float]:
    return {
        f"{layer} head {h}": value
        for layer, row in zip(heads.layers, values, strict=False)
        for h, value in enumerate(row)
        if math.isfinite(value)
    }


def _count(heads: dict[str, object] | dict[str, float] | dict[str, Amount]) -> str:
    return "One head has" if len(heads) == 1 else f"{len(heads)} heads have"


def _listed(found: dict[str, float] | dict[str, Amount]) -> str:
    shown = [
        f"{name} {number(v, 2) if isinstance(v, float) else v}" for name, v in list(found.items())[:SHOWN]
    ]
    rest = len(found) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _groups(found: dict[str, float] | dict[str, Amount]) -> list[str]:
    return list(dict.fromkeys(f"{name.split(' head ')[0]}.query" for name in found))


RULES = (saturated_heads, idle_heads, even_heads)
