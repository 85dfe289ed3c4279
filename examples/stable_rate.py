"""Which learning rate a small Transformer bears: trained just below and just above the rate that its curvature allows.

Full-batch gradient descent on digit addition. Every few steps the critical rate is measured; the run at 0.9 of it goes
down, the run at 1.5 of it bounces until the curvature gives way: the edge of stability.
"""

import torch
from rich.console import Console

import curvlens as cl
from curvlens import digits, nets
from curvlens.training.predict import Step
from curvlens.training.trajectory import gradient_descent


def main(width: int = 8, warmup: int = 200, steps: int = 30) -> None:
    console = Console()
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, width, norm="pre", activation="gelu")
    digits.train(model, digits.stream(seed=1), steps=warmup, lr=3e-3)
    land = cl.Landscape(model, digits.batches(1), dtype=torch.float64)
    found = cl.stability(land, torch.optim.SGD(model.parameters(), lr=0.1))
    console.print(found)
    for factor in (0.9, 1.5):
        run = gradient_descent(land, factor * found.critical, steps)
        console.print(f"\nat {factor:g} of the critical rate:\n{run}")

    # one step of the optimizer itself, and what the local polynomial says of it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9 * found.critical)
    for name, g in land.blocks.to_parameters(land.gradient()).items():
        model.get_parameter(name).grad = g.to(model.get_parameter(name))
    with Step(land) as step:
        optimizer.step()
    console.print(f"\n{cl.predict_loss(land, step)}")


if __name__ == "__main__":
    main()
