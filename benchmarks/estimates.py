"""Products and seconds of the estimates, beside SciPy, curvlinops, hessian-eigenthings and PyHessian.

    python benchmarks/estimates.py                      a dense matrix with the spectrum of a trained model: seconds
    python benchmarks/estimates.py --operator trained   a GPT-2-like model of 0.9 million parameters after 30 steps
    python benchmarks/estimates.py --operator gpt2 --only eigenvalues    one of 4.5 million at initialisation
    python benchmarks/estimates.py --operator gpt2 --device cuda

Products are counted where they are made. The accuracy is the same for all: ten eigenvalues to a residual of 1e-3,
the trace to 2 %, all block norms to 5 %. SciPy starts from the vector that `eigsh` starts from.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from measured import Counted, Row, arpack, checked, worst
from rich.console import Console
from rich.table import Table

from curvlens import Landscape, hessian
from curvlens.estimate import block_norms, eigsh, trace
from curvlens.operator import Operator
from curvlens.structured import Dense

ALLOWANCE = 2000  # products for a trace; XTrace keeps a vector for each


def dense(device: str) -> Operator:
    """2,000 eigenvalues: a few tens of outliers of both signs and a bulk that decays over decades, in six blocks."""
    generator = np.random.default_rng(0)
    outliers = [10 / (1 + i) ** 0.8 for i in range(30)] + [-4 / (1 + i) ** 0.8 for i in range(20)]
    bulk = np.exp(2 * generator.normal(size=1950)) * generator.choice([1, 1, -1], size=1950)
    values = torch.tensor([*outliers, *(0.2 * bulk / np.abs(bulk).max())])
    basis, _ = torch.linalg.qr(torch.randn(2000, 2000, generator=torch.Generator().manual_seed(0)).double())
    matrix = (basis * values) @ basis.T
    names = ("query", "key", "value", "out", "up", "down")
    sizes = (200, 200, 200, 200, 600, 600)
    matrix = ((matrix + matrix.T) / 2).to(device)
    return Dense.over(matrix, {n: (s,) for n, s in zip(names, sizes, strict=True)})


def gpt2(device: str) -> Operator:
    """4.5 million parameters at initialisation, float32."""
    from contenders import PROBLEMS

    model, ids = PROBLEMS["like"].build()
    return hessian(Landscape(model.to(device), [ids.to(device)]))


def trained(device: str) -> Operator:
    """0.9 million parameters after 30 steps of Adam on the batch; at initialisation the trace is a small difference."""
    from contenders import Problem

    sizes = {"vocab_size": 1000, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 32}
    model, ids = Problem("GPT-2-like: 4 layers of 128, 4 x 32 tokens", sizes, 4, 32).build()
    model, ids = model.to(device), ids.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return hessian(Landscape(model, [ids]))


OPERATORS: dict[str, Callable[[str], Operator]] = {"dense": dense, "gpt2": gpt2, "trained": trained}


def eigenvalues(H: Counted, _: int) -> Iterator[Row]:
    for settings in ({}, {"copies": False}) if isinstance(H.a, Dense) else ({},):
        found = eigsh(H, k=10, tol=1e-3, **settings)
        vectors = found.vectors.T
        who = "curvlens" + "".join(f", {name}={value}" for name, value in settings.items())
        yield who, H.count[0], partial(checked, H.a, found.values, vectors)
    values, vectors = arpack(H)
    yield "SciPy", H.count[0], partial(checked, H.a, values, vectors)


def traces(H: Counted, allowance: int) -> Iterator[Row]:
    for method in ("xtrace", "hutchinson"):
        found = trace(H, samples=8, tol=0.02, method=method, max_products=allowance)
        yield f"curvlens, {method}", H.count[0], partial(repr, found)


def norms(H: Counted, _: int) -> Iterator[Row]:
    found = block_norms(H, samples=4, tol=0.05, max_products=200 * len(H.domain))
    yield "curvlens", H.count[0], partial(worst, found)


PARTS: dict[str, Callable[[Counted, int], Iterator[Row]]] = {
    "eigenvalues": eigenvalues,
    "trace": traces,
    "norms": norms,
}


def contenders(part: str, H: Counted, allowance: int) -> Iterator[Iterator[Row]]:
    yield PARTS[part](H, allowance)
    if not isinstance(H.a, Dense):  # the others take a model
        import estimate_peers

        yield from estimate_peers.contenders(part, H.a)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operator", choices=OPERATORS, default="dense")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--products", type=int, default=ALLOWANCE, help="allowance for a trace")
    settings = parser.parse_args()
    H = Counted(OPERATORS[settings.operator](settings.device))
    table = Table("estimate", "who", "products", "seconds", "result", title=f"{H.a!r}")
    for part in settings.only:
        for contender in contenders(part, H, settings.products):
            H.count[0], started = 0, time.perf_counter()
            for who, products, result in contender:
                row = (part, who, str(products), f"{time.perf_counter() - started:.1f}", result())
                print(*row, sep=" | ", flush=True)
                table.add_row(*row)
                H.count[0], started = 0, time.perf_counter()
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
