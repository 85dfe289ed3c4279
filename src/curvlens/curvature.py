"""The curvature matrices of a landscape, as operators over its blocks."""

from __future__ import annotations

from torch import Tensor

from curvlens import engine as engines
from curvlens.blocks import Blocks
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape
from curvlens.operator import Operator


class Curvature(Operator):
    """A curvature matrix of a landscape, or some of its rows and columns, by exact products.

    `engine` says how products are computed. A block is computed as a block: tangents enter at its columns and
    gradients are taken for its rows alone.
    """

    def __init__(self, land: Landscape, quantity: Quantity, engine: str, rows: Blocks, columns: Blocks):
        super().__init__(rows, columns, land.dtype, land.device, symmetric=rows == columns)
        self.landscape, self.quantity, self.engine = land, quantity, engine

    def apply(self, stack: Tensor) -> Tensor:
        return engines.product(self.engine, self.landscape, self.quantity, self.codomain, self.domain, stack)

    def _adjoint(self) -> Operator:
        return Curvature(self.landscape, self.quantity, self.engine, self.domain, self.codomain)

    def _block(self, rows: Blocks, columns: Blocks) -> Operator:
        return Curvature(self.landscape, self.quantity, self.engine, rows, columns)

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{self.quantity.name}[{rows:,} x {columns:,}] by {self.engine}, {self.dtype} on {self.device}"


def hessian(land: Landscape, engine: str = "auto") -> Curvature:
    """The Hessian `∂²L/∂θ²` of a landscape.

    Cost of a product: about 3 gradients, and 2 for each further vector of the same call.
    """
    return _curvature(land, Quantity("hessian"), engine)


def gauss_newton(land: Landscape, engine: str = "auto", at: str | None = None) -> Curvature:
    """The outer-product part `H_o = Jᵀ (∂²ℓ/∂F²) J`: the Hessian if the model were linear.

    `F` is the model's output, or with `at` the output of the module of that path; then `H_o = H − H_f` at
    that split, which for parameters above it is their whole Hessian. Cost: 5/3 to 2 gradients.
    """
    return _curvature(land, Quantity("gauss-newton", at), engine)


def functional(land: Landscape, engine: str = "auto", at: str | None = None) -> Curvature:
    """The functional part `H_f = Σ_m g_m ∂²F_m/∂θ²`, as the Hessian of `⟨g, F(θ)⟩` with `g = ∂ℓ/∂F` fixed.

    A product of its own, not the difference of two. `at` as for `gauss_newton`. Cost: as the Hessian.
    """
    return _curvature(land, Quantity("functional", at), engine)


def fisher(land: Landscape, kind: str = "empirical", engine: str = "auto", seed: int = 0) -> Curvature:
    """The mean of `∇ℓ_i ∇ℓ_iᵀ` over scored tokens `i`, each token's loss given its own context.

    "empirical" takes the data's targets, "sampled" one target a token drawn from the model; the expectation
    of the latter is the Gauss-Newton matrix of a negative log-likelihood.
    """
    if kind not in ("empirical", "sampled"):
        raise ValueError(f"expected kind 'empirical' or 'sampled', got {kind!r}")
    return _curvature(land, Quantity("fisher", sampled=kind == "sampled", seed=seed), engine)


def _curvature(land: Landscape, quantity: Quantity, engine: str) -> Curvature:
    if quantity.at is not None:
        paths = [path for path, _ in land.model.named_modules() if path]
        if quantity.at not in paths:
            raise ValueError(
                f"expected the path of a module, such as {paths[0] if paths else ''!r}, got at={quantity.at!r}"
            )
    return Curvature(land, quantity, engines.choose(engine, quantity), land.blocks, land.blocks)
