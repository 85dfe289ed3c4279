"""Reports made up, for the page: of the size of GPT-2, and with everything missing."""

import math
import random
from dataclasses import replace

from curvlens.report.data import (
    PARTS,
    Column,
    Curve,
    Depth,
    Eigenpair,
    Finding,
    Group,
    HeadTable,
    Map,
    Meta,
    Noise,
    NormGains,
    Number,
    Report,
    Sharpness,
    Spectra,
    Stage,
)

ROLES = {
    "norm1": "norm",
    "attn.query": "query",
    "attn.key": "key",
    "attn.value": "value",
    "attn.out": "out",
    "norm2": "norm",
    "mlp.up": "up",
    "mlp.down": "down",
}
STAGES = (
    "heads",
    "traces",
    "eigenvalues",
    "norms",
    "depth",
    "sharpness",
    "noise",
    "spectrum",
    "spectra",
    "bounds",
)


def meta(layers, heads, title="GPT-2 <small> & friends"):
    return Meta(
        title, "GPT2LMHeadModel", "gpt2", 124_439_808, layers, heads, "next-token", 8184.0, 8, 1,
        "H_o by forward-over-reverse", "float32", "cpu", "standard", 0, 143.2, 1832, "2026-01-02T03:04:05",
        {"curvlens": "0.1.0", "torch": "2.13.0"}, "9f" * 32, "a1" * 32, ["Dropout was switched off."], "AdamW",
    )  # fmt: skip


def nothing(why="the budget was used up"):
    """A report of which only the loss was measured."""
    stages = [Stage(name, name, "partial", why) for name in STAGES]
    return Report(meta(2, 2), stages, {"loss": Number("loss", 2.5)}, [], [])


def large(layers=12, heads=12, seed=0):
    """As `standard` leaves it for GPT-2: 99 groups, three maps, 16 spectra, all with errors."""
    draw = random.Random(seed)
    groups = [
        Group(f"embed.{n}", f"embed.{n}", None, "embed", 9000, [f"embed.{n}"], 0, 1.0, 5.0)
        for n in ("token", "position")
    ]
    for layer in range(layers):
        for part, role in ROLES.items():
            name = f"layer.{layer}.{part}"
            size = 10 ** draw.gauss(-2, 0.3), 10 ** draw.gauss(1, 0.2)
            groups.append(
                Group(name, f"{layer} {part}", layer, role, 589_824, [name, name + ".bias"], heads, *size)
            )
    groups.append(Group("norm", "norm", None, "norm", 768, ["norm"], 0, 0.1, 2.0))
    names = [g.name for g in groups]
    norms = {"H": _map(draw, names, 1.0), "H_o": _map(draw, names, 0.9), "H_f": _map(draw, names, 0.3)}
    traces = {
        p: Column([draw.gauss(0.1, 0.2) for _ in groups], [0.02] * len(groups), False, 16) for p in PARTS
    }
    curves = [_curve(draw, name) for name in names[:16]]
    unlike = [[abs(i - j) / 30 for j in range(16)] for i in range(16)]
    table = lambda mean: [[10 ** draw.gauss(mean, 0.5) for _ in range(heads)] for _ in range(layers)]  # noqa: E731
    blocks = ("QQ", "KK", "QK", "VQ", "VK")
    return Report(
        meta(layers, heads),
        [Stage(name, name, "estimated", "", 1.5, 20) for name in STAGES[:-1]]
        + [Stage("bounds", "bounds", "skipped", "defined for the package's own nets")],
        {
            "loss": Number("loss", 2.7314),
            "lambda_max": _estimate(4.31, 0.004),
            "lambda_min": _estimate(-0.812, 0.0009),
            "condition": _estimate(3.2e6, 4e5),
            "trace.H_f": _estimate(-1.5, 2.0),
            "best_step": _estimate(3.2e-5, 2e-6),
            "gradient_norm": replace(_estimate(0.5, math.nan), converged=False),
        },
        [_finding(f"f{i}", severity) for i, severity in enumerate(("problem", "warning", "notice", "info", "info"))],
        groups,
        norms,
        traces,
        [_pair(draw, v, len(groups)) for v in (4.31, 3.2, 2.7, 1.9, -0.3, -0.5, -0.6, -0.81)],
        _curve(draw, "H"),
        Spectra(names[:16], curves, unlike, [[0.01] * 16 for _ in range(16)]),
        HeadTable(
            [f"layer.{i}.attn" for i in range(layers)],
            {b: table(-2) for b in blocks},
            {b: [[0.0] * heads for _ in range(layers)] for b in blocks},
            {b: [True] * layers for b in blocks},
            {b: [[draw.gauss(0, 0.1) for _ in range(heads)] for _ in range(layers)] for b in ("QQ", "KK")},
            [[draw.uniform(0.3, 2.9) for _ in range(heads)] for _ in range(layers)],
            {kind: table(0) for kind in ("first", "second", "third")},
            3.1,
        ),
        [_step(draw, f"layer.{i}.{part}", i) for i in range(layers) for part in ("attn", "mlp")],
        [],
        [
            Sharpness("raw", _estimate(4.31, 0.004), math.nan, "", math.nan, math.nan),
            Sharpness("as AdamW sees it", _estimate(7.41e4, 300.0), 6.33e4, "38/η", 6e-4, 5.1e-4),
        ],
        [Noise("loss", [draw.gauss(2.7, 0.1) for _ in range(8)], 2.7, 0.1, 0.035)],
_gains(draw, [g.name for g in groups if g.role == "norm"]),
    )  # fmt: skip


def _estimate(value, error):
    return Number("", value, error, False, True, 16, 64)


def _finding(name, severity):
    text = "Numbers and what they mean, in two sentences or so. " * 3
    return Finding(
        name,
        severity,
        f"Finding {name}: H_f & <more>",
        text,
        [text, text],
        text,
        text,
        "A Theorem 3.1",
        ["norm"],
    )


def _map(draw, names, factor):
    """Smooth along the depth, with noise: what pictures of real maps compress like."""
    n = len(names)
    size = [10 ** (draw.gauss(-1.5, 0.3) - abs(i - n / 3) / 40) for i in range(n)]
    value, error = ([[0.0] * n for _ in range(n)] for _ in range(2))
    for i in range(n):
        for j in range(i, n):
            v = (
                factor
                * math.sqrt(size[i] * size[j])
                * 10 ** draw.gauss(-0.3, 0.05)
                * math.exp(-abs(i - j) / 25)
            )
            value[i][j] = value[j][i] = v
            error[i][j] = error[j][i] = v * draw.uniform(0.02, 0.15)
    return Map(names, value, error, False, 4)


def _curve(draw, name, bins=160, threshold=2e-3):
    t = [-6 + 14.6 * i / (bins - 1) for i in range(bins)]
    width = draw.uniform(0.8, 2.5)
    density = [math.exp(-((x / width) ** 2)) + 1e-4 * draw.random() for x in t]
    total = sum(density) * 14.6 / (bins - 1)
    density = [d / total for d in density]
    nodes = [draw.gauss(0, 1) for _ in range(20)]
    return Curve(
        name, 589_824, False, [threshold * math.sinh(x) for x in t], density, [0.1 * d for d in density], threshold,
        14.6 / (bins - 1), nodes, [0.05] * 20, 4,
    )  # fmt: skip


def _pair(draw, value, count):
    mass = [draw.random() ** 6 for _ in range(count)]
    return Eigenpair(value, abs(value) * 1e-3, [m / sum(mass) for m in mass], 0.1 * draw.random())


def _gains(draw, names):
    deviation, gain, epsilon = ([10 ** draw.gauss(mean, 0.2) for _ in names] for mean in (-0.5, 0.5, -4))
    return NormGains(names, deviation, gain, epsilon)


def _step(draw, name, layer):
    def extent(size):
        trace = replace(_estimate(size * draw.gauss(0, 1), 0.2 * size), label="trace")
        return {"trace": trace, "frobenius": replace(_estimate(size, 0.08 * size), label="frobenius")}

    return Depth(name, extent(10 ** (1.2 - 0.12 * layer)), extent(10 ** draw.gauss(0.3, 0.2)), extent(16.0))
