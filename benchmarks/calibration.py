"""How often an estimate's interval covers the truth, as a picture.

    python benchmarks/calibration.py --spectra indefinite flat    some minutes for each of the four spectra
    python benchmarks/calibration.py                              the rest, the picture and the tables

For every estimator and spectrum the stated error is stretched by a factor; the share of seeds whose interval then
holds the truth is drawn against that of a normal distribution. On the diagonal the errors mean what they say. The
first table gives the shares at one standard error, which is 68 %; 300 seeds leave it uncertain by 3 %. The second
is of what states a bound instead: the truth is to lie within it always. What is measured is kept beside the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
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
    spectra = [torch.linalg.eigvalsh(H.matrix[s, s]) for s in spans]
    masses = [support.masses(e, torch.full_like(e, 1 / len(e))) for e in spectra]
    mixed = [(masses[a], masses[b], (masses[a] + masses[b]) / 2) for a, b in ((0, 1), (0, 2), (1, 2))]
    xlogx = torch.special.xlogy
    divergences = torch.stack([(xlogx(a, a) / 2 + xlogx(b, b) / 2 - xlogx(m, m)).sum() for a, b, m in mixed])
    above = torch.triu(torch.ones(3, 3), 1).bool()

    middle = slice(3, -3)  # bins that hold eigenvalues
    step = (support.edges[1] - support.edges[0]).item()
    roots = torch.tensor([e.square().mean().sqrt() for e in spectra], dtype=torch.float64)
    means = torch.tensor([e.mean() for e in spectra], dtype=torch.float64)

    @lru_cache(None)
    def density(seed: int) -> estimate.Density:
        return estimate.density(H, seed=seed, chunk=8)

    @lru_cache(None)
    def parts(seed: int) -> dict[str, estimate.Density]:
        return estimate.block_densities(H, seed=seed, chunk=8)

    def pairs(measure: str) -> Callable[[int], Any]:
        def run(seed: int) -> Any:
            found = estimate.heterogeneity(parts(seed), measure, support)
            return found.value[above], found.stderr[above]

        return run

    def band(seed: int) -> Any:
        curve = density(seed).curve(support)
        return curve.density[middle] * step, curve.stderr[middle] * step

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
        "first moment": (lambda s: density(s).moment(1), values.mean()),
        "second moment": (lambda s: density(s).moment(2), (values**2).mean()),
        "third moment": (lambda s: density(s).moment(3), (values**3).mean()),
        "density band": (band, support.masses(values, torch.full_like(values, 1 / n))[middle]),
        "effective dimension": (
            lambda s: estimate.effective_dimension(density(s), 0.1),
            (sizes / (sizes + 0.1)).sum(),
        ),
        "effective rank": (lambda s: estimate.effective_rank(density(s)), torch.exp(-xlogx(p, p).sum())),
        "Jensen-Shannon": (pairs("divergence"), divergences),
        "Jensen-Shannon distance": (pairs("distance"), divergences.sqrt()),
        "ratio of norms": (pairs("norm"), (roots[:, None] / roots)[above]),
    }
    if semidefinite:
        found["trace, XNysTrace"] = (
            lambda s: estimate.trace(H, 12, seed=s, method="xnystrace"),
            values.sum(),
        )
        found["ratio of traces"] = (pairs("trace"), (means[:, None] / means)[above])
    else:
        negative = values < -1e-9
        found["negative fraction"] = (
            lambda s: estimate.negative_fraction(density(s)),
            sizes[negative].sum() / sizes.sum(),
        )
        found["negative count"] = (
            lambda s: estimate.negative_fraction(density(s), by="count"),
            negative.double().mean(),
        )
    return found


def bounds(H: Dense) -> dict[str, tuple[Callable[[int], Any], Tensor]]:
    """Of what states a bound of its error: what it gives for a seed, and the truth."""
    values = torch.linalg.eigvalsh(H.matrix)
    by_size = values[values.abs().argsort(descending=True)]
    tops = torch.stack([torch.linalg.eigvalsh(H.matrix[s, s]).abs().max() for s in H.domain.ranges.values()])
    above = torch.triu(torch.ones(3, 3), 1).bool()

    def eigenvalues(seed: int) -> Any:
        found = estimate.eigsh(H, 3, tol=0.03, seed=seed, basis=9)
        return found.values.abs(), found.residuals

    def ratios(seed: int) -> Any:
        found = estimate.heterogeneity(H, "top", samples=3, steps=4, seed=seed)
        return found.value[above], found.stderr[above]

    return {
        "eigenvalues": (eigenvalues, by_size[:3].abs()),
        "sharpness": (lambda s: estimate.sharpness(H, tol=0.03, seed=s), values.max()),
        "condition number": (
            lambda s: estimate.condition(H, 3, tol=0.03, seed=s, basis=9),
            by_size[0].abs() / by_size[2].abs(),
        ),
        "ratio of top eigenvalues": (ratios, (tops[:, None] / tops)[above]),
    }


def scores(run: Callable[[int], Any], truth: Tensor, seeds: int) -> Tensor:
    """Errors made over errors stated, of all seeds and entries."""
    parts = []
    for seed in range(seeds):
        found = run(seed)
        value, error = found if isinstance(found, tuple) else (found.value, found.stderr)
        value, error = (torch.as_tensor(x, dtype=torch.float64) for x in (value, error))
        parts.append(((value - truth).abs() / error.clamp(min=1e-13)).flatten())
    return torch.cat(parts)


FACTORS = torch.linspace(0.05, 3, 60, dtype=torch.float64)


Shares = dict[str, dict[str, list[float]]]  # of errors and of bounds, by estimator: one a factor, and at one


def measure(spectrum: str, seeds: int, shares: Shares) -> Iterator[None]:
    """Fills in, one estimator at a time, the shares within each factor of the stated error."""
    H = operator(SPECTRA[spectrum])
    groups = {"errors": cases(H, spectrum == "semidefinite"), "bounds": bounds(H)}
    for group, members in groups.items():
        known = shares.setdefault(group, {})
        for label, (run, truth) in members.items():
            if label not in known:
                found = scores(run, truth, seeds)
                at_one = (found <= 1).double().mean().item()
                known[label] = [*((found <= f).double().mean().item() for f in FACTORS), at_one]
                print(f"{spectrum:15s} {label:25s} {100 * at_one:5.1f} %", flush=True)
                yield


def picture(kept: dict[str, Shares], out: Path) -> None:
    nominal = 2 * norm.cdf(FACTORS.numpy()) - 1
    figure, axes = plt.subplots(1, len(SPECTRA), figsize=(4 * len(SPECTRA), 4.6), sharey=True)
    for axis, name in zip(axes, SPECTRA, strict=True):
        for i, (label, shares) in enumerate(kept[name]["errors"].items()):
            axis.plot(nominal, shares[:-1], label=label, linewidth=1, linestyle="-" if i < 10 else "--")
        axis.plot([0, 1], [0, 1], color="black", linewidth=0.5)
        axis.fill_between([0.6827 - 0.004, 0.6827 + 0.004], 0.60, 0.76, color="grey", alpha=0.5)
        axis.set(title=name, xlabel="nominal coverage")
    axes[0].set_ylabel("coverage")
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("calibration.png"))
    parser.add_argument("--spectra", nargs="*", choices=SPECTRA, default=list(SPECTRA))
    settings = parser.parse_args()
    path = settings.out.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name in settings.spectra:
        for _ in measure(name, settings.seeds, kept.setdefault(name, {})):
            path.write_text(json.dumps(kept))
    if any(name not in kept or "bounds" not in kept[name] for name in SPECTRA):
        return
    picture(kept, settings.out)
    for group, title in (("errors", "within one standard error, %"), ("bounds", "within the bound, %")):
        table = Table("estimator", *SPECTRA, title=title)
        for label in dict.fromkeys(label for name in SPECTRA for label in kept[name][group]):
            shares = (kept[name][group].get(label) for name in SPECTRA)
            table.add_row(label, *("" if share is None else f"{100 * share[-1]:.1f}" for share in shares))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
