"""How often an estimate's interval covers the truth, as a picture: `python benchmarks/calibration.py --out FILE.png`.

For every estimator and spectrum the stated error is stretched by a factor; the share of seeds whose interval then
holds the truth is drawn against that of a normal distribution. On the diagonal the errors mean what they say. The
table gives the shares at one standard error, which is 68 %; 300 seeds leave it uncertain by 3 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import norm
from torch import Tensor

from curvlens import estimate
from curvlens.structured import Dense

SHAPES = {"query": (8,), "key": (10,), "norm": (6,)}
SIZE = 24
SPECTRA = {
    "indefinite": [(-1) ** i * (1 + i % 3) / (1 + i) ** 1.5 for i in range(SIZE)],
    "flat": torch.linspace(-1, 2, SIZE).tolist(),
    "rank-deficient": [2 ** (-i / 3) * (-1) ** (i % 3) if i < 14 else 0 for i in range(SIZE)],
    "semidefinite": [1 / (1 + i) ** 2 for i in range(SIZE)],
}


def operator(values: list[float]) -> Dense:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(random)
    matrix = (basis * torch.tensor(values, dtype=torch.float64)) @ basis.T
    return Dense.over((matrix + matrix.T) / 2, SHAPES)


def cases(H: Dense, semidefinite: bool) -> dict[str, tuple[Callable[[int], Any], Tensor]]:
    """Of each estimator: what it gives for a seed, and the truth."""
    values = torch.linalg.eigvalsh(H.matrix)
    sizes, n = values.abs(), len(values)
    p = sizes / sizes.sum()
    spans = list(H.domain.ranges.values())
    blocks = torch.tensor([[H.matrix[a, b].norm() for b in spans] for a in spans], dtype=torch.float64)
    support = estimate.Support(values.min().item(), values.max().item(), bins=20, relative_width=0.1)
    masses = [
        support.masses(e, torch.full_like(e, 1 / len(e)))
        for e in (torch.linalg.eigvalsh(H.matrix[s, s]) for s in spans)
    ]
    mixed = [(masses[a], masses[b], (masses[a] + masses[b]) / 2) for a, b in ((0, 1), (0, 2), (1, 2))]
    xlogx = torch.special.xlogy
    divergences = torch.stack([(xlogx(a, a) / 2 + xlogx(b, b) / 2 - xlogx(m, m)).sum() for a, b, m in mixed])
    above = torch.triu(torch.ones(3, 3), 1).bool()

    def heterogeneity(seed: int) -> Any:
        found = estimate.heterogeneity(H, support=support, seed=seed, chunk=8)
        return found.value[above], found.stderr[above]

    found = {
        "trace, Hutchinson": (
            lambda s: estimate.trace(H, 12, seed=s, method="hutchinson"),
            values.sum(),
        ),
        "trace, XTrace": (lambda s: estimate.trace(H, 12, seed=s), values.sum()),
        "Frobenius norm": (lambda s: estimate.frobenius(H, seed=s), values.norm()),
        "diagonal": (lambda s: estimate.diagonal(H, 10, seed=s), H.matrix.diagonal()),
        "block norms": (lambda s: estimate.block_norms(H, seed=s), blocks),
        "block traces": (
            lambda s: estimate.block_traces(H, seed=s),
            torch.stack([H.matrix[a, a].trace() for a in spans]),
        ),
        "third moment": (
            lambda s: estimate.density(H, steps=3, seed=s, chunk=8).moment(3),
            (values**3).mean(),
        ),
        "effective dimension": (
            lambda s: estimate.effective_dimension(H, 0.1, seed=s, chunk=8),
            (sizes / (sizes + 0.1)).sum(),
        ),
        "effective rank": (
            lambda s: estimate.effective_rank(H, seed=s, chunk=8),
            torch.exp(-xlogx(p, p).sum()),
        ),
        "Jensen-Shannon": (heterogeneity, divergences),
    }
    if semidefinite:
        found["trace, XNysTrace"] = (
            lambda s: estimate.trace(H, 12, seed=s, method="xnystrace"),
            values.sum(),
        )
    else:
        found["negative fraction"] = (
            lambda s: estimate.negative_fraction(H, seed=s, chunk=8),
            sizes[values < -1e-9].sum() / sizes.sum(),
        )
    assert n == SIZE
    return found


def scores(run: Callable[[int], Any], truth: Tensor, seeds: int) -> Tensor:
    """Errors made over errors stated, of all seeds and entries."""
    parts = []
    for seed in range(seeds):
        found = run(seed)
        value, error = found if isinstance(found, tuple) else (found.value, found.stderr)
        value, error = (torch.as_tensor(x, dtype=torch.float64) for x in (value, error))
        parts.append(((value - truth).abs() / error).flatten())
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("calibration.png"))
    settings = parser.parse_args()
    factors = torch.linspace(0.05, 3, 60, dtype=torch.float64)
    nominal = 2 * norm.cdf(factors.numpy()) - 1
    table = Table("estimator", *SPECTRA, title="coverage at one standard error, %")
    rows: dict[str, dict[str, str]] = {}
    figure, axes = plt.subplots(1, len(SPECTRA), figsize=(4 * len(SPECTRA), 4.2), sharey=True)
    for axis, (name, values) in zip(axes, SPECTRA.items(), strict=True):
        H = operator(values)
        for label, (run, truth) in cases(H, name == "semidefinite").items():
            found = scores(run, truth, settings.seeds)
            shares = [(found <= factor).double().mean().item() for factor in factors]
            axis.plot(nominal, shares, label=label, linewidth=1)
            share = 100 * (found <= 1).double().mean().item()
            rows.setdefault(label, {})[name] = f"{share:.1f}"
            print(f"{name:15s} {label:22s} {share:5.1f} %", flush=True)
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.5)
        axis.fill_between([0.6827 - 0.004, 0.6827 + 0.004], 0.60, 0.76, color="grey", alpha=0.5)
        axis.set(title=name, xlabel="nominal coverage")
    axes[0].set_ylabel("coverage")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(settings.out, dpi=120)
    for label, shares in rows.items():
        table.add_row(label, *(shares.get(name, "") for name in SPECTRA))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
