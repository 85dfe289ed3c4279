"""The package's own nets: the embedded default, and nets restored from their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlens import digits, grammar, nets
from curvlens.sources.functions import call, is_reference
from curvlens.sources.subject import Subject

WIDTH, STEPS, RATE = (
    16,
    600,
    3e-3,
)  # of the default: seconds of training, and few enough weights for exact matrices
DATA = {"digits": (digits.VOCABULARY, digits.batches), "grammar": (grammar.VOCABULARY, grammar.batches)}
SEQUENCES = 64
NET = ("heads", "attention", "activation", "causal", "scale")  # what weights do not tell


def trained(seed: int = 0, width: int = WIDTH, steps: int = STEPS) -> Subject:
    """The attention paper's one-block GPT, trained on digit addition for some seconds, with its AdamW."""
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, width, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = digits.train(model, digits.stream(seed=seed + 1), steps, optimizer=optimizer)
    note = f"trained here for {steps} steps with AdamW at {RATE:g}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    return Subject(
        model,
        digits.batches(1, SEQUENCES, seed=seed),
        "One-block GPT on digit addition",
        "next-token",
        optimizer,
        torch.float64,
        [note],
    )


def restored(path: Path, data: str | None, settings: dict[str, Any], sequences: int | None = None) -> Subject:
    """A GPT of `curvlens.nets` from the file of its `state_dict()`: sizes are read off the weights."""
    model = _gpt(_state(path), path, settings)
    return Subject(model, _batches(model, data, sequences or SEQUENCES), f"GPT of {path.name}", "auto")


def _state(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            "expected the weights of a net (torch.save(model.state_dict(), path), or safetensors), got "
            f"{str(path)!r}, "
            "which cannot be read as that"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"expected a state_dict in {str(path)!r}, got {type(state).__name__}; save model.state_dict()"
        )
    return state


def _gpt(state: dict[str, Tensor], path: Path, settings: dict[str, Any]) -> nets.GPT:
    unknown = [key for key in settings if key not in NET]
    if unknown:
        raise ValueError(f"expected --net of {', '.join(NET)}, got {', '.join(unknown)}")
    if "head.W_E" in state:  # tied: files may hold the one tensor under either name
        state = {"token.weight": state["head.W_E"], **state}
        state["head.W_E"] = state["token.weight"]
    try:
        vocabulary, width = state["token.weight"].shape
        first = {
            name.removeprefix("blocks.0."): t for name, t in state.items() if name.startswith("blocks.0.")
        }
        norm = "pre" if "norm.weight" in state else "post" if "norm1.weight" in first else "none"
        if "mlp.W_1" not in first:
            settings = {**settings, "activation": None}
        model = nets.GPT(
            vocabulary,
            len(state["position.weight"]),
            width,
            depth=1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
            key_width=first["attn.W_Q"].shape[1],
            value_width=first["attn.W_V"].shape[1],
            hidden=first["mlp.W_1"].shape[1] if "mlp.W_1" in first else None,
            norm=norm,  # type: ignore[arg-type]
            bias="attn.b_Q" in first,
            tied="head.W_U" not in state,
            **settings,
        )
        model.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"expected the weights of a curvlens.nets.GPT in {str(path)!r}, got others: "
            f"{str(error).splitlines()[0]}; "
            "for a model of your own give --model module:function, for Hugging Face the folder"
        ) from error
    return model.to(next(iter(state.values())).dtype).eval()


def _batches(model: nets.GPT, data: str | None, sequences: int) -> Any:
    """What the vocabulary fits, unless something else is asked for."""
    vocabulary, length = model.token.num_embeddings, model.length
    if data is not None and is_reference(data):
        return call(data, "--data")
    fitting = [name for name, (size, _) in DATA.items() if size == vocabulary]
    name = data or (fitting[0] if fitting else None)
    if name not in DATA:
        raise ValueError(
            f"expected --data {', '.join(DATA)} or module:function for a vocabulary of {vocabulary}, got {data!r}"
        )
    if name == "grammar":
        return grammar.batches(1, sequences, min(length, grammar.LENGTH))
    return digits.batches(1, sequences)
