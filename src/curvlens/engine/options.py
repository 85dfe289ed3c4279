"""What can be chosen about a product beside its engine: precision, and what is kept between products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PRECISIONS = {"exact": "highest", "tf32": "high", "bf16": "medium"}  # as torch calls them


@dataclass(frozen=True)
class Options:
    """How products are computed.

    precision "exact": matrix products in the landscape's own precision, whatever torch's global switch says;
              "tf32", "bf16": those of float32 in fewer digits where the device is faster so, sums in float32
    keep      bytes that may hold what does not change between products at fixed weights and data
    """

    precision: str = "exact"
    keep: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"expected a precision out of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not isinstance(self.keep, int) or self.keep < 0:
            raise ValueError(f"expected a number of bytes to keep, such as 4 * 2**30, got {self.keep!r}")


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside, float32 matrix products have the given precision; torch's switch is restored."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
