"""Which blocks of a small Transformer curve, and why: the two parts of the Hessian of a one-block GPT.

Trains the one-block GPT of Ormaniec, Dangel and Singh (ICLR 2025) on digit addition for a few seconds, and prints
the exact Frobenius norms of every pair of attention blocks: the Hessian, its outer-product part `H_o` and its
functional part `H_f`.
"""

import time

import torch
from rich.console import Console
from rich.table import Table

import curvlens as cl
from curvlens import digits, nets


def norms(operator: cl.Operator, names: list[str]) -> list[list[float]]:
    """Exact norms of all blocks: the rows of these blocks, from one product for each of their parameters."""
    blocks = operator.domain.select(*names)
    matrix = operator.block(blocks, blocks).dense()
    return [[matrix[blocks.ranges[a], blocks.ranges[b]].norm().item() for b in names] for a in names]


def main(width: int = 16, steps: int = 600) -> None:
    console = Console()
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, width)
    start = time.perf_counter()
    losses = digits.train(model, digits.stream(seed=1), steps=steps, lr=3e-3)
    console.print(
        f"trained a one-block GPT of width {width} for {steps} steps in {time.perf_counter() - start:.0f} s: "
        f"loss {losses[0]:.2f} -> {sum(losses[-20:]) / 20:.2f}"
    )
    land = cl.Landscape(model, digits.batches(1), dtype=torch.float64)
    console.print(repr(land))

    names = [f"layer.0.attn.{role}" for role in ("query", "key", "value", "out")]
    start = time.perf_counter()
    matrices = {
        "H": norms(cl.hessian(land), names),
        "H_o": norms(cl.gauss_newton(land), names),
        "H_f": norms(cl.functional(land), names),
    }
    table = Table(
        title="exact Frobenius norms of the blocks of the Hessian",
        caption="H = H_o + H_f, split at the logits",
    )
    table.add_column("block")
    for title in matrices:
        table.add_column(title, justify="right")
    for i, a in enumerate(names):
        for j, b in enumerate(names[i:], start=i):
            label = f"{a.rpartition('.')[2]}, {b.rpartition('.')[2]}"
            table.add_row(label, *(f"{matrix[i][j]:.3e}" for matrix in matrices.values()))
    console.print(table)
    console.print(f"three exact matrices in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
