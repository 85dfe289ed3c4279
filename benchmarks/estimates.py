"""Products and seconds of the estimates, beside SciPy and curvlinops on the same operator.

    python benchmarks/estimates.py                   a dense matrix with the spectrum of a trained model: seconds
    python benchmarks/estimates.py --operator gpt2   a GPT-2-like model of 4 layers of 256, 4 x 128 tokens
    python benchmarks/estimates.py --only eigenvalues trace
    python benchmarks/estimates.py --operator gpt2 --device cuda

A contender gets the operator as products alone, and each product is counted where it is made. The accuracy is the
same for all: ten eigenvalues to a residual of 1e-3, the trace to 2 %, all block norms to 5 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from curvlens import Landscape, hessian
from curvlens.estimate import block_norms, eigsh, trace
from curvlens.operator import Operator
from curvlens.structured import Dense

ALLOWANCE = 2000  # products for a trace; XTrace keeps a vector for each


class Counted(Operator):
    """An operator that counts its products, those of its blocks included."""

    def __init__(self, a: Operator, count: list[int] | None = None):
        super().__init__(a.codomain, a.domain, a.dtype, a.device, a.symmetric)
        self.a = a
        self.count = [0] if count is None else count

    def apply(self, stack: Tensor) -> Tensor:
        self.count[0] += len(stack)
        return self.a.apply(stack)

    def _block(self, rows, columns):  # type: ignore[no-untyped-def]
        return Counted(self.a.block(rows, columns), self.count)

    def _adjoint(self) -> Operator:
        return Counted(self.a.T, self.count)


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


def peers(part: str, device: str) -> Iterator[tuple[str, int, str]]:
    """Those that take a model and not its products alone: who, products, result."""
    import estimate_peers
    from contenders import PROBLEMS

    model, ids = PROBLEMS["like"].build()
    model, ids = model.to(device), ids.to(device)
    if part == "eigenvalues":
        yield from estimate_peers.eigenvalues(model, ids)
    elif part == "trace":
        yield from estimate_peers.traces(model, ids)


OPERATORS: dict[str, Callable[[str], Operator]] = {"dense": dense, "gpt2": gpt2}


def eigenvalues(H: Counted, _: int) -> Iterator[tuple[str, str]]:
    """Who, and what came out; products are counted by the operator between the lines."""
    found = eigsh(H, k=10, tol=1e-3)
    worst = (found.residuals / found.values.abs()).max().item()
    yield "curvlens", f"worst residual {worst:.1e}, {found.values[:3].tolist()}"
    found = eigsh(H, k=10, tol=1e-3, copies=False)
    worst = (found.residuals / found.values.abs()).max().item()
    yield "curvlens, copies=False", f"worst residual {worst:.1e}"
    from scipy.sparse.linalg import eigsh as arpack

    start = np.random.default_rng(0).standard_normal(H.shape[0])
    values, vectors = arpack(H.to_scipy(), k=10, which="LM", tol=1e-3, v0=start)
    used = H.count[0]
    columns = torch.from_numpy(vectors).to(H.device, H.dtype)
    worst = (H @ columns).cpu().numpy() - vectors * values
    worst = np.linalg.norm(worst, axis=0) / np.abs(values)
    H.count[0] = used  # checking is not its cost
    order = np.argsort(-np.abs(values))
    yield "SciPy", f"worst residual {worst.max():.1e}, {values[order[:3]].tolist()}"


def traces(H: Counted, allowance: int) -> Iterator[tuple[str, str]]:
    for method in ("xtrace", "hutchinson"):
        found = trace(H, samples=8, tol=0.02, method=method, max_products=allowance)
        yield f"curvlens, {method}", repr(found)
    try:
        from curvlinops import hutchinson_trace, xtrace
    except ImportError:
        return
    # they state no error, so their number of products is set to that of the lines above
    yield "curvlinops, hutchinson, 200 products", f"{_curvlinops(hutchinson_trace, H, 200):.5g}"
    yield "curvlinops, xtrace, 200 products", f"{_curvlinops(xtrace, H, 200):.5g}"


def _curvlinops(function, H: Counted, products: int) -> float:  # type: ignore[no-untyped-def]
    from curvlens import as_curvlinops

    return float(function(as_curvlinops(H), num_matvecs=products))


def norms(H: Counted, _: int) -> Iterator[tuple[str, str]]:
    found = block_norms(H, samples=8, tol=0.05, max_products=200 * len(H.domain))
    worst = (found.stderr / found.value).max().item()
    yield (
        "curvlens",
        f"{found.value.numel()} blocks, worst relative error {worst:.1%}, {found.samples} probes",
    )


PARTS = {"eigenvalues": eigenvalues, "trace": traces, "norms": norms}


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
        started, H.count[0] = time.perf_counter(), 0
        for who, result in PARTS[part](H, settings.products):
            row = (part, who, str(H.count[0]), f"{time.perf_counter() - started:.1f}", result)
            print(*row, sep=" | ", flush=True)
            table.add_row(*row)
            started, H.count[0] = time.perf_counter(), 0
        if settings.operator == "gpt2":
            for who, products, result in peers(part, settings.device):
                row = (part, who, str(products), f"{time.perf_counter() - started:.1f}", result)
                print(*row, sep=" | ", flush=True)
                table.add_row(*row)
                started = time.perf_counter()
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
