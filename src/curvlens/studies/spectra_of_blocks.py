"""Z-hetero: spectra of blocks are unlike in a Transformer and alike in a CNN, at initialisation and trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlens import digits
from curvlens.curvature import hessian
from curvlens.estimate.density import Support
from curvlens.estimate.heterogeneity import divergence
from curvlens.landscape import Landscape
from curvlens.studies import plot as draw
from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.growth_without_norm import seed_of, units
from curvlens.studies.images import classifier, handwritten, train
from curvlens.studies.study import Config, Finding, Study, between, mean95

STATES = ("initial", "trained")
WAYS = ("size and shape", "shape")  # eigenvalues as they are; those of each block over its largest
BINS, THRESHOLD = 100, 1e-4
KINDS = ("GPT", "ViT", "MLP", "CNN")  # the first two are Transformers
WEIGHTS = {  # the weight matrices; biases and norms are small and left out, as in the paper
    "GPT": ("embed.token", "embed.position", "query", "key", "value", "out", "up", "down", "head"),
    "ViT": ("patch.weight", "query", "key", "value", "out", "up", "down", "head.weight"),
    "MLP": (".weight",),
    "CNN": (".weight",),
}


@dataclass(frozen=True, kw_only=True)
class Spectra(Config):
    sizes: tuple[tuple[str, int], ...] = (("GPT", 16), ("ViT", 16), ("MLP", 24), ("CNN", 12))
    images: int = 512
    steps: int = 600
    repeats: int = 10


def measure(config: Spectra, unit: str) -> dict[str, Any]:
    """Jensen-Shannon divergences between the exact spectra of every two blocks, and between the nets' full ones."""
    seed = seed_of(config, unit)
    made: dict[str, Any] = {}
    full: dict[str, list[Tensor]] = {state: [] for state in STATES}
    for kind, size in config.sizes:
        for state, land in zip(STATES, landscapes(config, kind, size, seed), strict=True):
            blocks = eigenvalues(land, kind)
            full[state].append(torch.cat(list(blocks.values())))
            for way in WAYS:
                made[f"{kind}, {state}: {way}"] = divergences(list(blocks.values()), way)
            made[f"{kind}: blocks"] = list(blocks)
    for state in STATES:
        for way in WAYS:
            made[f"full, {state}: {way}"] = divergences(full[state], way)
    return made


def landscapes(config: Spectra, kind: str, size: int, seed: int) -> Iterator[Landscape]:
    """Of one net as it is drawn, and trained with Adam: a GPT on digit addition, the others on images of digits."""
    if kind == "GPT":
        gpt = network(size, seed, config.device, norm="pre", activation="gelu")
        yield Landscape(gpt, [addition(config.images, seed, config.device)], loss="next-token")
        stream = (
            (ids.to(config.device), labels.to(config.device)) for ids, labels in digits.stream(64, seed + 1)
        )
        digits.train(gpt, stream, config.steps, lr=3e-3)
        yield Landscape(gpt, [addition(config.images, seed, config.device)], loss="next-token")
        return
    images, classes = (t.to(config.device) for t in handwritten(seed))
    net = classifier(kind, seed, config.device, **{"channels" if kind == "CNN" else "width": size})
    seen = [(images[: config.images], classes[: config.images])]
    yield Landscape(net, seen, loss="cross-entropy")
    train(net, images, classes, config.steps, torch.optim.Adam(net.parameters(), lr=3e-3), seed)
    yield Landscape(net, seen, loss="cross-entropy")


def eigenvalues(land: Landscape, kind: str) -> dict[str, Tensor]:
    """All eigenvalues of the diagonal block of every weight matrix."""
    H = hessian(land)
    found = {}
    for name in land.blocks.names:
        if name.endswith(WEIGHTS[kind]):
            block = H.block(name).dense()
            found[name] = torch.linalg.eigvalsh((block + block.mT) / 2)
    return found


def divergences(spectra: list[Tensor], way: str) -> list[list[float]]:
    """Jensen-Shannon in nats, on 100 bins of a symmetric-logarithmic axis that all spectra share."""
    if way == "shape":
        spectra = [values / values.abs().max() for values in spectra]
    largest = max(values.abs().max().item() for values in spectra)
    support = Support(-largest, largest, THRESHOLD * largest, BINS)
    masses = torch.stack([support.masses(v[None], torch.full_like(v, 1 / len(v))[None])[0] for v in spectra])
    return [divergence(row, masses).tolist() for row in masses]


PAIRS = tuple((one, other) for one in KINDS[:2] for other in KINDS[2:])


def mean_pair(matrix: list[list[float]]) -> float:
    """The mean over pairs of different blocks."""
    count = len(matrix)
    return sum(matrix[i][j] for i in range(count) for j in range(i)) / (count * (count - 1) / 2)


def numbers(config: Spectra, measured: Mapping[str, Any]) -> dict[str, Any]:
    runs = list(measured.values())
    made: dict[str, Any] = {"runs": runs}
    for state in STATES:
        for way in WAYS:
            of = {kind: [mean_pair(run[f"{kind}, {state}: {way}"]) for run in runs] for kind in KINDS}
            full = [mean_pair(run[f"full, {state}: {way}"]) for run in runs]
            for kind in KINDS:
                made[f"{kind}, {state}: {way}"] = mean95(of[kind])
            for one, other in PAIRS:
                ratios = [a / b for a, b in zip(of[one], of[other], strict=True)]
                made[f"{one} over {other}, {state}: {way}"] = mean95(ratios)
            ratios = [a / b for a, b in zip(full, of["GPT"], strict=True)]
            made[f"full over blocks, {state}: {way}"] = mean95(ratios)
    return made


def judge(config: Spectra, made: dict[str, Any]) -> list[Finding]:
    unlike = (
        "'unlike in Transformers, alike in CNNs': the mean divergence of two blocks is half as large again"
    )
    alike = "'full spectra look alike': less far from net to net than blocks are within the Transformer"
    found = []
    for state in STATES:
        for way in WAYS:
            for one, other in PAIRS:
                ours = made[f"{one} over {other}, {state}: {way}"]
                what = f"divergence of blocks, {one} over {other}, {state}, {way}"
                main = way == "size and shape" and other == "CNN"
                found.append(between(what, "> 1", ours, 1.5, 100, unlike, main=main, said=SAID))
            ours = made[f"full over blocks, {state}: {way}"]
            what = f"divergence of full spectra over that of the GPT's blocks, {state}, {way}"
            found.append(between(what, "< 1", ours, 0, 1, alike, main=False))
    return found


SAID = (
    "nets of some 3,000 weights and one block are far from the paper's: first, inner and last layers of a small CNN "
    "differ as much as the blocks of a Transformer"
)


def figure(config: Spectra, made: dict[str, Any]) -> Any:
    """The maps of divergences, in the mean over repeats."""
    drawing, axes = draw.panels(len(KINDS), 2, width=2.9, height=2.9)
    for row, state in zip(axes, STATES, strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            maps = [run[f"{kind}, {state}: {WAYS[0]}"] for run in made["runs"]]
            mean = torch.tensor(maps).mean(0).tolist()
            names = [short(name) for name in made["runs"][0][f"{kind}: blocks"]]
            image = axis.imshow(mean, vmin=0, vmax=0.7, cmap="magma")
            axis.set_xticks(range(len(names)), names, fontsize=6, rotation=90)
            axis.set_yticks(range(len(names)), names, fontsize=6)
            value, _ = made[f"{kind}, {state}: {WAYS[0]}"]
            draw.titled(axis, f"{kind}, {state}: mean {value:.2f}")
    bar = drawing.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label("Jensen-Shannon divergence (nats, ≤ ln 2)", fontsize=7)
    return drawing


def short(name: str) -> str:
    """ "query" for "blocks.0.attn.query"; "layer 3" for "3.weight"."""
    head, _, last = name.rpartition(".")
    return (f"layer {head}" if head.isdigit() else head) if last == "weight" else last


STUDY = Study(
    name="Z-hetero",
    title="Spectra of blocks: Transformers, MLP, CNN",
    source="Zhang et al., Why Transformers need Adam, Figures 2 to 4",
    claim="Full Hessian spectra of Transformers and CNNs look alike; the spectra of diagonal blocks are unlike each "
    "other in a Transformer and alike in a CNN.",
    presets={
        "smoke": Spectra(
            sizes=(("GPT", 4), ("ViT", 4), ("MLP", 6), ("CNN", 3)), images=16, steps=5, repeats=2
        ),
        "cpu": Spectra(images=64, repeats=4),
        "paper": Spectra(sizes=(("GPT", 32), ("ViT", 32), ("MLP", 48), ("CNN", 24)), images=1024, steps=2000),
    },
    units=units,
    measure=measure,
    numbers=numbers,
    judge=judge,
    plot=figure,
    remarks="A GPT on digit addition, the others on images of digits. Every eigenvalue of every block, "
    "exactly: no Lanczos and no probes. Densities on 100 bins of an axis "
    "`asinh(λ / 10⁻⁴ λ_max)` that all blocks of a net share, a kernel of 1 % of its range, natural logarithm; by "
    "shape alone, each block's eigenvalues over its largest. The paper publishes no code for its distance, and its "
    "kernel of fixed width 0.003 hides blocks whose eigenvalues are smaller. Figures: size and shape.",
)
