"""The curvature matrices of a landscape, as operators over its blocks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlens import engine as engines
from curvlens.blocks import Blocks
from curvlens.engine.kept import Kept
from curvlens.engine.options import Options
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape
from curvlens.operator import Operator


class Curvature(Operator):
    """A curvature matrix of a landscape, or some of its rows and columns, by exact products.

    `engine` says how products are computed, and is known before the first. A block is computed as a block: tangents
    enter at its columns and gradients are taken for its rows alone.
    """

    def __init__(
        self,
        land: Landscape,
        quantity: Quantity,
        engine: str,
        rows: Blocks,
        columns: Blocks,
        options: Options | None = None,
    ):
        super().__init__(rows, columns, land.dtype, land.device, symmetric=rows == columns)
        engines.check(engine, quantity)
        self.landscape, self.quantity, self._engine = land, quantity, engine
        self.options = options or Options()
        self.kept = Kept(self.options.keep)
        self._precision_error: float | None = None

    @cached_property
    def engine(self) -> str:
        """The name; what "auto" stands for is found when it is asked for, or at the first product."""
        return engines.choose(self._engine, self.quantity, self.landscape, self.options.keep)

    def apply(self, stack: Tensor) -> Tensor:
        return engines.product(
            self.engine,
            self.landscape,
            self.quantity,
            self.codomain,
            self.domain,
            stack,
            self.options,
            self.kept,
        )

    def precision_error(self) -> float:
        """`‖Ã v − A v‖ / ‖A v‖` for a random `v`, with `A` the exact products: two of them, measured once."""
        if self.options.precision == "exact":
            return 0.0
        if self._precision_error is None:
            generator = torch.Generator().manual_seed(0)
            v = torch.randn(1, self.domain.size, generator=generator, dtype=self.dtype).to(self.device)
            exact = Curvature(self.landscape, self.quantity, self.engine, self.codomain, self.domain).apply(v)
            self._precision_error = ((self.apply(v) - exact).norm() / exact.norm()).item()
        return self._precision_error

    def _adjoint(self) -> Operator:
        return self._block(self.domain, self.codomain)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Curvature(self.landscape, self.quantity, self._engine, rows, columns, self.options)

    def __repr__(self) -> str:
        rows, columns = self.shape
        precision = ""
        if self.options.precision != "exact":
            error = self._precision_error
            measured = "not measured" if error is None else f"{error:.1e} measured"
            precision = f", matrix products in {self.options.precision} (relative error {measured})"
        return (
            f"{self.quantity.name}[{rows:,} x {columns:,}] by {self.engine}{precision}, "
            f"{self.dtype} on {self.device}"
        )


def hessian(land: Landscape, engine: str = "auto", **options: Any) -> Curvature:
    """The Hessian `∂²L/∂θ²` of a landscape.

    Cost of a product: about 3 gradients, and 2 for each further vector of the same call. `options` are those of
    `engine.options.Options`: `precision="tf32"`, `keep=bytes`.
    """
    return _curvature(land, Quantity("hessian"), engine, options)


def gauss_newton(land: Landscape, engine: str = "auto", at: str | None = None, **options: Any) -> Curvature:
    """The outer-product part `H_o = Jᵀ (∂²ℓ/∂F²) J`: the Hessian if the model were linear.

    `F` is the model's output, or with `at` the output of the module of that path; then `H_o = H − H_f` at
    that split, which for parameters above it is their whole Hessian. Cost: 5/3 to 2 gradients.
    """
    return _curvature(land, Quantity("gauss-newton", at), engine, options)


def functional(land: Landscape, engine: str = "auto", at: str | None = None, **options: Any) -> Curvature:
    """The functional part `H_f = Σ_m g_m ∂²F_m/∂θ²`, as the Hessian of `⟨g, F(θ)⟩` with `g = ∂ℓ/∂F` fixed.

    A product of its own, not the difference of two. `at` as for `gauss_newton`. Cost: as the Hessian.
    """
    return _curvature(land, Quantity("functional", at), engine, options)


def fisher(
    land: Landscape, kind: str = "empirical", engine: str = "auto", seed: int = 0, **options: Any
) -> Curvature:
    """The mean of `∇ℓ_i ∇ℓ_iᵀ` over scored tokens `i`, each token's loss given its own context.

    "empirical" takes the data's targets, "sampled" one target a token drawn from the model; the expectation
    of the latter is the Gauss-Newton matrix of a negative log-likelihood.
    """
    if kind not in ("empirical", "sampled"):
        raise ValueError(f"expected kind 'empirical' or 'sampled', got {kind!r}")
    return _curvature(land, Quantity("fisher", sampled=kind == "sampled", seed=seed), engine, options)


def _curvature(land: Landscape, quantity: Quantity, engine: str, options: dict[str, Any]) -> Curvature:
    if quantity.at is not None:
        paths = [path for path, _ in land.model.named_modules() if path]
        if quantity.at not in paths:
            raise ValueError(
                f"expected the path of a module, such as {paths[0] if paths else ''!r}, got at={quantity.at!r}"
            )
    return Curvature(land, quantity, engine, land.blocks, land.blocks, Options(**options))
