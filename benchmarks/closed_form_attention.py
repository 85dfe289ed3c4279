"""The exact Hessian of one attention layer: closed form against automatic differentiation, float64.

    python benchmarks/closed_form_attention.py [--size 17 16] [--markdown benchmarks/closed_form_attention.md]

Every number is the smallest of several repeats, all of one size in one run, so that ratios compare like with like; a
run of one size leaves the other columns of the page as they are. `floor` allocates
and fills a matrix of the Hessian's size: no way of forming it can be faster. Products are with one vector; "graph kept"
is a double backward whose first pass is not counted, the best case of automatic differentiation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import curvlens.exact as exact

SIZES = ((17, 16), (32, 32), (64, 64), (128, 64))
LONG = 8.0  # seconds; what takes longer is timed once


def best(function: Callable[[], object], budget: float = 1.5) -> float:
    """Milliseconds: the smallest of three to 500 repeats after a warm-up, as many as the budget (in seconds) allows."""
    started = time.perf_counter()
    function()
    first = time.perf_counter() - started
    if first > LONG:
        return 1e3 * first
    smallest, count, started = math.inf, 0, time.perf_counter()
    while count < 3 or (time.perf_counter() - started < budget and count < 500):
        before = time.perf_counter()
        function()
        smallest, count = min(smallest, time.perf_counter() - before), count + 1
    return 1e3 * smallest


class Problem:
    def __init__(self, L: int, d: int):
        generator = torch.Generator().manual_seed(0)
        self.X, self.Y = (torch.randn(L, d, generator=generator) for _ in range(2))
        self.weights = [torch.randn(d, d, generator=generator) / math.sqrt(d) for _ in range(3)]
        self.d, self.size = d, 3 * d * d
        self.theta = torch.cat([W.flatten() for W in self.weights])
        self.layer = exact.SelfAttention(*self.weights)

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        Q, K, V = theta.view(3, self.d, self.d)
        A = torch.softmax((self.X @ Q) @ (self.X @ K).T / math.sqrt(self.d), -1)
        return ((A @ (self.X @ V) - self.Y) ** 2).mean()

    def closed(self) -> exact.Result:
        return exact.hessian(self.layer, self.X, self.Y)


def dense_rows(p: Problem) -> dict[str, float]:
    gradient = torch.func.grad(p.loss)
    eye = torch.eye(p.size)

    def by_chunks(size: int) -> torch.Tensor:
        def product(v: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(gradient, (p.theta,), (v,))[1]

        return torch.func.vmap(product, chunk_size=size)(eye)

    rows = {
        "floor": best(lambda: torch.empty(p.size, p.size).fill_(1)),
        "closed form": best(lambda: p.closed().total.dense()),
    }
    chunk = (
        p.size if p.size < 4000 else 512
    )  # all directions at once would take the memory several times over
    rows["vmap(jvp(grad))"] = best(lambda: by_chunks(chunk))
    if p.size < 4000:
        rows["jacfwd(grad)"] = best(lambda: torch.func.jacfwd(gradient)(p.theta))
        rows["torch.func.hessian"] = best(lambda: torch.func.hessian(p.loss)(p.theta))
        try:
            operator = curvlinops_operator(p)
        except ImportError as missing:
            print(f"curvlinops is left out: {missing}")
        else:
            rows["curvlinops"] = best(lambda: operator @ eye)
    return rows


def curvlinops_operator(p: Problem):  # type: ignore[no-untyped-def]
    from curvlinops import HessianLinearOperator

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Q, self.K, self.V = (torch.nn.Parameter(W.clone()) for W in p.weights)

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            A = torch.softmax((X @ self.Q) @ (X @ self.K).T / math.sqrt(p.d), -1)
            return A @ (X @ self.V)

    layer = Layer()
    return HessianLinearOperator(
        layer, torch.nn.MSELoss(), list(layer.parameters()), [(p.X, p.Y)], check_deterministic=False
    )


def number_rows(p: Problem) -> dict[str, float]:
    """Norms of all blocks and the trace, from scratch: forward pass, factors, Gram matrices."""

    def total() -> object:
        H = p.closed().total
        return H.block_norms(), H.trace()  # type: ignore[attr-defined]

    def both() -> object:
        R = p.closed()
        return [(H.block_norms(), H.trace()) for H in (R.outer, R.functional)]  # type: ignore[attr-defined]

    return {"norms and trace, H": best(total), "norms and traces, H_o and H_f": best(both)}


def product_rows(p: Problem) -> dict[str, float]:
    v = torch.randn(p.size, generator=torch.Generator().manual_seed(1))
    H = p.closed().total
    gradient = torch.func.grad(p.loss)
    theta = p.theta.clone().requires_grad_()
    (kept,) = torch.autograd.grad(p.loss(theta), theta, create_graph=True)
    return {
        "closed form": best(lambda: H @ v),
        "double backward, graph kept": best(
            lambda: torch.autograd.grad(kept, theta, v, retain_graph=True), 0.5
        ),
        "jvp(grad)": best(lambda: torch.func.jvp(gradient, (p.theta,), (v,))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--markdown", type=Path, help="also write the tables here, and the numbers beside them"
    )
    parser.add_argument("--size", type=int, nargs=2, action="append", help="L and d; all sizes if left out")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_default_dtype(torch.float64)
    kept = arguments.markdown and arguments.markdown.with_suffix(".json")
    columns = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for L, d in arguments.size or SIZES:
        columns[f"({L}, {d})"] = measure(L, d)
    columns = {size: columns[size] for size in (f"({L}, {d})" for L, d in SIZES) if size in columns}
    text = report(columns)
    print("\n" + text)
    if kept:
        arguments.markdown.write_text(text)
        kept.write_text(json.dumps(columns, indent=1) + "\n")


def measure(L: int, d: int) -> dict[str, dict[str, float]]:
    p = Problem(L, d)
    column: dict[str, dict[str, float]] = {"load": {"before": os.getloadavg()[0]}}
    for name, rows in (("products", product_rows), ("numbers", number_rows), ("dense", dense_rows)):
        column[name] = rows(p)
        shown = {key: round(value, 3) for key, value in column[name].items()}
        print(f"(L, d) = ({L}, {d})  {name}: ", shown, f"load {os.getloadavg()[0]:.1f}", flush=True)
    return column


def report(columns: dict[str, dict[str, dict[str, float]]]) -> str:
    tables = {name: [c[name] for c in columns.values()] for name in ("dense", "numbers", "products")}
    heads = " | ".join(columns)
    lines = [
        "# The exact Hessian of one attention layer",
        "",
        f"float64, two cores (threads used: {torch.get_num_threads()}), torch {torch.__version__}, milliseconds, "
        "smallest of repeats, one run of `python benchmarks/closed_form_attention.py` a column. Columns: (L, d), with "
        "d_K = d_V = d, so 3 d² parameters. The machine's load before each run: "
        + ", ".join(f"{c['load']['before']:.1f}" for c in columns.values())
        + ".",
    ]
    titles = {
        "dense": "Dense matrix",
        "numbers": "Exact norms and traces, no matrix",
        "products": "One product",
    }
    for name, title in titles.items():
        lines += ["", f"## {title}", "", f"| | {heads} |", "|---|" + "---|" * len(columns)]
        for row in dict.fromkeys(key for column in tables[name] for key in column):
            cells = " | ".join(f"{column[row]:.3g}" if row in column else "–" for column in tables[name])
            lines.append(f"| {row} | {cells} |")
        lines += ratios(name, tables)
    return "\n".join(lines) + "\n"


def ratios(name: str, tables: dict[str, list[dict[str, float]]]) -> list[str]:
    def row(title: str, values: list[float]) -> str:
        return f"| *{title}* | " + " | ".join(f"{v:.3g}" for v in values) + " |"

    dense = tables["dense"]
    if name == "dense":
        others = [min(v for k, v in c.items() if k not in ("floor", "closed form")) for c in dense]
        return [
            row("closed form / floor", [c["closed form"] / c["floor"] for c in dense]),
            row(
                "fastest autodiff / closed form",
                [o / c["closed form"] for o, c in zip(others, dense, strict=True)],
            ),
        ]
    if name == "numbers":
        pairs = list(zip(dense, tables[name], strict=True))
        autodiff = [min(v for k, v in c.items() if k not in ("floor", "closed form")) for c in dense]
        return [
            row(
                "dense closed form / norms of H",
                [c["closed form"] / t["norms and trace, H"] for c, t in pairs],
            ),
            row(
                "dense autodiff / norms of H",
                [a / t["norms and trace, H"] for a, (_, t) in zip(autodiff, pairs, strict=True)],
            ),
        ]
    products = tables[name]
    best_other = [min(v for k, v in c.items() if k != "closed form") for c in products]
    return [
        row(
            "fastest autodiff / closed form",
            [o / c["closed form"] for o, c in zip(best_other, products, strict=True)],
        )
    ]


if __name__ == "__main__":
    main()
