"""The figures of a report, drawn as SVG in Python; `save` writes them all, as SVG and PNG."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curvlens.report.data import Report
    from curvlens.report.figures.figure import Figure

# sections of the page: name, title, the figures in it as (module, function)
CHAPTERS = (
    (
        "where",
        "Where it curves",
        (("blocks", "block_map"), ("blocks", "by_role"), ("spectra", "eigenvectors")),
    ),
    ("attention", "Attention heads", (("heads", "head_map"),)),
    ("by-depth", "Through the depth", (("depth", "depth_profile"), ("depth", "norm_gains"))),
    (
        "eigenvalues",
        "Eigenvalues",
        (("spectra", "spectrum"), ("spectra", "block_spectra"), ("spectra", "divergence")),
    ),
    ("limits", "Limits", (("limits", "sharpness"), ("limits", "bounds"), ("limits", "noise"))),
)


def chapter(report: Report, parts: tuple[tuple[str, str], ...]) -> Iterator[Figure | str]:
    """Figures, or the sentence that says why there is none."""
    from importlib import import_module

    for module, function in parts:
        yield getattr(import_module(f"curvlens.report.figures.{module}"), function)(report)


def figures(report: Report) -> list[Figure]:
    """All figures that the report has the numbers for."""
    found = [figure for _, _, parts in CHAPTERS for figure in chapter(report, parts)]
    return [figure for figure in found if not isinstance(figure, str)]


def save(report: Report, folder: str | Path) -> list[Path]:
    """Every drawing as SVG, and as PNG where matplotlib is installed; every table as CSV. The paths."""
    from curvlens.report.figures import paper
    from curvlens.report.files import write

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    png = paper.available()
    for figure in figures(report):
        for name, scene in figure.scenes():
            scene.name = name
            paths.append(target / f"{name}.svg")
            write(paths[-1], scene.svg(alone=True))
            if png:
                paths.append(target / f"{name}.png")
                paper.save_png(scene, paths[-1])
        paths.append(target / f"{figure.name}.csv")
        write(paths[-1], figure.table.csv())
    if not png:
        print(
            "figures: SVG only; for PNG install matplotlib: pip install 'curvlens[report]'", file=sys.stderr
        )
    return paths
