"""What an engine is asked for: the rows of a quantity on one piece of the data."""

from __future__ import annotations

from dataclasses import dataclass

from curvlens.batches import Batch
from curvlens.engine.kept import Kept
from curvlens.engine.options import Options
from curvlens.engine.quantity import Quantity
from curvlens.landscape import Landscape


@dataclass(frozen=True)
class Job:
    land: Landscape
    quantity: Quantity
    piece: Batch
    rows: list[str]  # names of parameters
    options: Options
    kept: Kept
