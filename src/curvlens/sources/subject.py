"""What is to be analysed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from curvlens.landscape import Landscape

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Subject:
    """A model and its data, with the optimizer that trains it where that is known."""

    model: nn.Module
    batches: Any
    title: str
    loss: Any = "auto"
    optimizer: torch.optim.Optimizer | None = None
    dtype: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)

    def on(self, dtype: str | None, device: str | None) -> Subject:
        """In a precision and on a device by their names."""
        import torch

        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"expected --dtype {' or '.join(DTYPES)}, got {dtype!r}")
        if device is not None:
            self.model.to(_device(device))
        found = self if dtype is None else replace(self, dtype=getattr(torch, dtype))
        return found

    def landscape(self, loss: str | None = None, micro_batch: int | None = None) -> Landscape:
        from curvlens.landscape import Landscape

        land = Landscape(
            self.model, self.batches, loss or self.loss, dtype=self.dtype, micro_batch=micro_batch
        )
        land.notes.extend(self.notes)
        return land


def _device(name: str) -> torch.device:
    """A device that is there."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"expected a device that is there, such as cpu or cuda, got {name!r}: {str(error).splitlines()[0]}"
        ) from error
    return device
