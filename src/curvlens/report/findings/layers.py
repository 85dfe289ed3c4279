"""How curvature is shared among layers and blocks."""

from __future__ import annotations

import math

from curvlens.report.data import Finding, Group, Map, Report
from curvlens.report.figures.words import number
from curvlens.report.findings import thresholds as t
from curvlens.report.findings.amounts import Amount, certainty, mean_of_logs, of, root_of_squares, times
from curvlens.report.groups import LAYER, layer_name


def varies_over_layers(report: Report) -> Finding | None:
    norms = _layers(report)
    if len(norms) < 2:
        return None
    low, high = min(norms, key=lambda n: norms[n].value), max(norms, key=lambda n: norms[n].value)
    ratio = norms[high] / norms[low]
    if not ratio.above(t.BETWEEN_LAYERS):
        return None
    return Finding(
        "varies-over-layers",
        "warning",
        "Curvature differs widely between layers",
        f"The Hessian of {high} is {times(ratio.value)} times that of {low} in norm: a learning rate that "
        "suits one "
        "is wrong for the other.",
        [f"‖H‖_F of {name}: {norms[name]}" for name in (high, low)] + [f"ratio {ratio}"],
        certainty(ratio),
        "Scale the learning rate by layer, or use an optimizer that scales by itself (Adam, LAMB); "
        "look at the initialisation of the sharp layer.",
        "Ormaniec, Dangel, Singh 2025, §4.1; Closing the Curvature Gap 2025, Theorem 6",
        [high, low],
    )


def grows_with_depth(report: Report) -> Finding | None:
    norms = _layers(report)
    if len(norms) < 3:
        return None
    names = sorted(norms, key=lambda name: int(LAYER.match(name)["layer"]))  # type: ignore[index]
    third = max(1, len(names) // 3)
    first, last = (mean_of_logs(norms[n] for n in part) for part in (names[:third], names[-third:]))
    ratio = last / first
    order = _rank_correlation([norms[name].value for name in names])
    if not ratio.above(t.WITH_DEPTH) or order < t.ORDERED:
        return None
    return Finding(
        "grows-with-depth",
        "warning",
        "Curvature grows with depth",
        f"From the first layers to the last the Hessian's norm grows {times(ratio.value)} times.",
        [f"first third {first}", f"last third {last}", f"rank correlation with depth {number(order, 2)}"],
        certainty(ratio),
        "Put the norm before each sublayer (pre-norm), scale the residual branches down with depth, or warm up "
        "longer.",
        "Ormaniec, Dangel, Singh 2025, Figure 3 and Appendix on depth; Xiong et al. 2020",
        names,
    )


def query_key_against_value(report: Report) -> Finding | None:
    """Norms of the diagonal blocks of H: the value's against the larger of query's and key's."""
    found = []
    for layer, roles in _attention(report).items():
        if {"query", "key", "value"} <= roles.keys():
            other = max(roles["query"], roles["key"], key=lambda a: a.value)
            found.append((layer, roles["value"] / other, roles))
    above = [f for f in found if f[1].above(t.DISPARITY)]
    below = [f for f in found if (Amount(1.0) / f[1]).above(t.DISPARITY)]
    if not above and not below:
        return None
    chosen, more = (above, True) if len(above) >= len(below) else (below, False)
    layer, ratio, roles = max(chosen, key=lambda f: abs(math.log(f[1].value)))
    larger, smaller = ("value", "query and key") if more else ("query and key", "value")
    shown = ratio if more else Amount(1.0) / ratio
    return Finding(
        "query-key-against-value",
        "notice",
        f"{larger[0].upper()}{larger[1:]} weights curve far more than {smaller}",
        f"In {len(chosen)} of {len(found)} attention layers the {larger} blocks of H are more than "
        f"{t.DISPARITY:g} times "
        f"as large as the {smaller} blocks; most in {layer}, {times(shown.value)} times. The softmax makes "
        "query and "
        "key depend on the data to a higher power than value.",
        [f"‖H‖_F of {layer} {role}: {roles[role]}" for role in ("query", "key", "value")]
        + [f"ratio {shown}"],
        certainty(shown),
        "Adam's scaling by parameter evens this out; with gradient descent give query and key a learning rate "
        "of their "
        "own. "
        + ("" if more else "Large inputs sharpen queries and keys: a norm on them (QK-norm) bounds it."),
        "Ormaniec, Dangel, Singh 2025, Figure 1, Theorem 3.1 and equation 5",
        [f"{f[0]}.{role}" for f in chosen for role in ("query", "key", "value")],
    )


def sharpest_block(report: Report) -> Finding | None:
    """Where the eigenvector of the largest eigenvalue lives."""
    if not report.eigenpairs:
        return None
    top = max(report.eigenpairs, key=lambda pair: pair.value)
    if top.value <= 0 or not top.mass or len(top.mass) < 2:
        return None
    share = max(top.mass)
    group = report.groups[top.mass.index(share)]
    gap = _gap(report)
    # an eigenvector turns by at most residual over gap; its mass by twice that
    if share - (2 * top.residual / gap if not top.exact else 0.0) <= t.ONE_BLOCK:
        return None
    return Finding(
        "sharpest-block",
        "notice",
        f"The sharpest direction lies in {group.name}",
        f"{100 * share:.0f} % of the top eigenvector is in {group.name}, which has "
        f"{100 * group.size / report.meta.parameters:.1f} % of the parameters. It is this block that limits the "
        "step.",
        [
            f"λ_max = {Amount(top.value, 0.0 if top.exact else top.residual)}",
            f"share of its eigenvector {number(share)}",
        ],
        "The numbers are exact, up to rounding, on the data given."
        if top.exact
        else f"The eigenvector's residual {number(top.residual, 2)} over the gap to the next eigenvalue bounds "
        "its error.",
        f"Give {group.name} a smaller learning rate or clip its update first; "
        + (
            "an embedding is sharp in its frequent tokens."
            if group.role in ("embed", "head")
            else "look at its scale."
        ),
        "eigenvector of the exact Hessian",
        [group.name],
    )


def _gap(report: Report) -> float:
    values = sorted((pair.value for pair in report.eigenpairs), reverse=True)
    return max(values[0] - values[1], 1e-300) if len(values) > 1 else 1e-300


def unlike_spectra(report: Report) -> Finding | None:
    """Mean Jensen-Shannon divergence of the groups' spectra."""
    spectra = report.spectra
    if spectra is None or len(spectra.names) < 2:
        return None
    n = len(spectra.names)
    pairs = [(i, j) for i in range(n) for j in range(i)]
    mean = sum(spectra.divergence[i][j] for i, j in pairs) / len(pairs)
    error = sum(spectra.stderr[i][j] for i, j in pairs) / len(pairs)
    found = Amount(mean, error if math.isfinite(error) else math.inf)
    if not found.above(t.UNLIKE):
        return None
    i, j = max(pairs, key=lambda p: spectra.divergence[p[0]][p[1]])
    return Finding(
        "unlike-spectra",
        "notice",
        "Blocks have unlike spectra: one learning rate cannot fit them all",
        f"The mean divergence between the spectra of two blocks is {found} nats, of at most ln 2 = 0.69.",
        [f"most unlike: {spectra.names[i]} and {spectra.names[j]}, {number(spectra.divergence[i][j])} nats"],
        certainty(found),
        "Prefer Adam, or one learning rate a block (as Adam-mini does), over plain gradient descent.",
        "Zhang et al. 2024, Why Transformers Need Adam: A Hessian Perspective",
        [spectra.names[i], spectra.names[j]],
    )


# -- reading the map


def _layers(report: Report) -> dict[str, Amount]:
    """‖H‖_F of each layer's own block, from the map."""
    table = report.maps.get("H")
    if table is None:
        return {}
    rows: dict[str, list[int]] = {}
    for i, name in enumerate(table.names):
        if LAYER.match(name):
            rows.setdefault(layer_name(name), []).append(i)
    stacks = {LAYER.match(name)["stack"] for name in rows}  # type: ignore[index]
    if len(stacks) > 1:  # an encoder and a decoder are two scales of depth: only the decoder's
        rows = {name: inside for name, inside in rows.items() if name.startswith("decoder.")}
    return {name: root_of_squares(_cell(table, i, j) for i in at for j in at) for name, at in rows.items()}


def _attention(report: Report) -> dict[str, dict[str, Amount]]:
    """The diagonal blocks of query, key and value of every attention, "layer.0.attn" and so on."""
    table = report.maps.get("H")
    if table is None:
        return {}
    roles: dict[str, Group] = {group.name: group for group in report.groups}
    found: dict[str, dict[str, Amount]] = {}
    for i, name in enumerate(table.names):
        if name in roles and roles[name].role in ("query", "key", "value"):
            place = name.rpartition(".")[0]
            found.setdefault(place, {})[roles[name].role] = _cell(table, i, i)
    return found


def _cell(table: Map, i: int, j: int) -> Amount:
    return of(table.value[i][j], table.stderr[i][j], table.exact)


def _rank_correlation(values: list[float]) -> float:
    """Spearman's, of the values with their order."""
    n = len(values)
    rank = {i: place for place, i in enumerate(sorted(range(n), key=values.__getitem__))}
    return 1 - 6 * sum((i - rank[i]) ** 2 for i in range(n)) / (n * (n * n - 1))


RULES = (varies_over_layers, grows_with_depth, query_key_against_value, sharpest_block, unlike_spectra)
