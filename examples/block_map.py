"""A picture of the Hessian of one Transformer block and of its two parts, entry by entry.

    python examples/block_map.py out/block_map.png

Trains the one-block GPT on digit addition and draws `|H|`, `|H_o|` and `|H_f|` over the attention and feed-forward
weights of its layer, as figure 1 of Ormaniec, Dangel and Singh (ICLR 2025) does. Needs matplotlib
(`pip install curvlens[report]`).
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm

import curvlens as cl
from curvlens import digits, nets

SHORT = {"query": "$W_Q$", "key": "$W_K$", "value": "$W_V$", "out": "$W_O$", "up": "$W_1$", "down": "$W_2$"}


def main(path: str = "out/block_map.png", width: int = 8, steps: int = 600, samples: int = 64) -> None:
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, width)
    digits.train(model, digits.stream(seed=1), steps=steps, lr=3e-3)
    land = cl.Landscape(model, digits.batches(1, size=samples), dtype=torch.float64)
    layer = land.blocks.select("layer.0")
    matrices = {
        "Hessian $H$": cl.hessian(land).block(layer, layer).dense().abs(),
        "outer-product part $H_o$": cl.gauss_newton(land).block(layer, layer).dense().abs(),
        "functional part $H_f$": cl.functional(land).block(layer, layer).dense().abs(),
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    top = max(m.max().item() for m in matrices.values())
    for axis, (title, matrix) in zip(axes, matrices.items(), strict=True):
        shown = axis.imshow(
            matrix, norm=LogNorm(top * 1e-6, top, clip=True), cmap="magma", interpolation="nearest"
        )
        edges = [layer.ranges[name].start for name in layer.names[1:]]
        for edge in edges:
            axis.axhline(edge - 0.5, color="white", linewidth=0.4)
            axis.axvline(edge - 0.5, color="white", linewidth=0.4)
        middles = [(span.start + span.stop) / 2 for span in layer.ranges.values()]
        labels = [SHORT[name.rpartition(".")[2]] for name in layer.names]
        axis.set_xticks(middles, labels)
        axis.set_yticks(middles, labels)
        axis.tick_params(length=0)
        axis.set_title(title)
    figure.colorbar(shown, ax=axes, label="absolute value", shrink=0.9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
