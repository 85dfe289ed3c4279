"""Models and data by what people type: a folder or an id of the hub, `module:function`, weights of the own nets.

subject()                                            the embedded default: a GPT, trained on digit addition
subject("gpt2-folder", text="text.txt")              a Hugging Face model on a text, in blocks of equal length
subject("package.module:build", data="package.module:batches")
subject("weights.pt", net={"heads": 2})              the state of one of `curvlens.nets`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curvlens.sources.subject import Subject


def subject(
    model: str | None = None,
    data: str | None = None,
    text: str | Path | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    length: int | None = None,
    sequences: int | None = None,
    net: Mapping[str, Any] | None = None,
) -> Subject:
    """The model, the data and the loss that a command line means."""
    from curvlens.sources import functions, huggingface, own

    if text is not None and data is not None:
        raise ValueError("expected --text or --data, got both; a text is cut into batches by the tokenizer")
    if model is None:
        if text is not None or data is not None:
            raise ValueError(
                "expected --model with data of your own, got none; give a folder or module:function"
            )
        found = own.trained(seed)
    elif functions.is_reference(model):
        found = functions.subject(model, data)
    elif Path(model).is_file():
        found = own.restored(Path(model), data, dict(net or {}), sequences)
    else:
        found = huggingface.subject(model, text, data, length, sequences, seed)
    return found.on(dtype, device)


__all__ = ["Subject", "subject"]
