"""Hugging Face models, from a folder or the hub, on the blocks of a text.

Weights are loaded in float32 whatever the checkpoint holds. The text becomes blocks of equal length, so that nothing is
padded and a tokenizer without a padding token serves as well.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlens.batches import IGNORED
from curvlens.engine.room import is_out_of_memory
from curvlens.sources.functions import call
from curvlens.sources.subject import Subject

LENGTH, SEQUENCES, SIZE = 128, 8, 4  # tokens of a block, blocks, blocks of a batch, unless asked otherwise
MASKED = 0.15  # of the tokens, for models that fill in masks


def subject(
    model: str,
    text: str | Path | None,
    data: str | None,
    length: int | None,
    sequences: int | None,
    seed: int,
) -> Subject:
    if text is None and data is None:
        raise ValueError(
            f"expected --text FILE or --data module:function with the model {model!r}, got neither"
        )
    _require()
    _check_folder(model)
    with _quiet():
        config = _config(model)
        loaded, notes = _model(model, config)
        if data is not None:
            batches: Any = call(data, "--data")
        else:
            assert text is not None
            batches, more = _batches(model, loaded, Path(text), length, sequences, seed)
            notes.extend(more)
    return Subject(loaded, batches, f"{type(loaded).__name__} of {Path(model).name}", notes=notes)


# -- the model


def _require() -> None:
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        raise ImportError(
            "expected transformers for a Hugging Face model, got an environment without it; pip install "
            "'curvlens[hf]'"
        )


def _check_folder(model: str) -> None:
    """A path that is none, before the hub is asked for it."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"expected a folder that save_pretrained wrote, with a config.json, got {model!r}, which has none"
            )
        return
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or "\\" in model:
        raise FileNotFoundError(
            f"expected a folder with a Hugging Face model, or an id of the hub, got {model!r}, and there is no "
            "such folder"
        )


def _config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise _explained(model, error) from error


def _explained(model: str, error: Exception) -> Exception:
    """What the library's long texts come to."""
    words = " ".join(str(error).split())
    if Path(model).is_dir():
        if "model type" in words or "model_type" in words or "Unrecognized" in words:
            return ValueError(
                f"expected a kind of model that transformers knows in {model!r}, got another: "
                f"{words.split('. ')[0]}; update "
                "transformers, or give --model module:function"
            )
        return ValueError(f"expected a model that transformers can load in {model!r}, got: {words[:200]}")
    return FileNotFoundError(
        f"expected a folder, or an id of a model that the hub has, got {model!r}: there is no folder of this "
        "name, and the "
        "hub could not be reached or does not know it; download the model elsewhere and give its folder"
    )


def _model(model: str, config: Any) -> tuple[nn.Module, list[str]]:
    import transformers

    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        kind = transformers.AutoModelForCausalLM
    try:
        loaded, info = kind.from_pretrained(  # type: ignore[misc]
            model, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _explained(model, error) from error
    notes = []
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if stored is not None and str(stored).removeprefix("torch.") in ("float16", "bfloat16"):
        notes.append(f"the weights are stored in {str(stored).removeprefix('torch.')}, computed in float32")
    missing = info.get("missing_keys") or []
    if missing:
        notes.append(
            f"{len(missing)} weights were not in the checkpoint and are as initialised: {sorted(missing)[0]}, …"
        )
    return loaded.eval(), notes


# -- the text


def _batches(
    model: str, loaded: nn.Module, text: Path, length: int | None, sequences: int | None, seed: int
) -> tuple[list[Any], list[str]]:
    if not text.is_file():
        raise FileNotFoundError(f"expected a text file for --text, got no file {str(text)!r}")
    tokenizer = _tokenizer(model)
    try:
        written = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text in {str(text)!r}, got other bytes at {error.start}") from error
    if len(tokenizer) < 2:  # what the library makes of a folder without one
        raise ValueError(
            f"expected a tokenizer in {model!r}, got none; save it there with tokenizer.save_pretrained, or "
            "give token ids "
            "with --data module:function"
        )
    ids = torch.tensor(tokenizer(written, add_special_tokens=False)["input_ids"], dtype=torch.long)
    most = _longest(loaded)
    asked = min(LENGTH, most) if length is None else length
    if asked > most:
        raise ValueError(f"expected --length of at most {most} for this model, got {asked}")
    if asked < 2:
        raise ValueError(f"expected --length of at least 2, got {asked}: one token predicts the next")
    if len(ids) < asked:
        raise ValueError(
            f"expected a text of at least one sequence of {asked} tokens, got {len(ids)} in {str(text)!r}; give "
            "more text" + (f", or --length {len(ids)}" if len(ids) > 1 else "")
        )
    count = min(len(ids) // asked, sequences or SEQUENCES)
    blocks = ids[: count * asked].view(count, asked)
    notes = [f"the first {count * asked:,} of {len(ids):,} tokens of {text.name}, in blocks of {asked}"]
    parts = list(blocks.split(SIZE))
    if type(loaded).__name__.endswith("ForMaskedLM"):
        notes.append(f"{100 * MASKED:.0f} % of the tokens are masked and scored, drawn with seed {seed}")
        return [_masked(part, tokenizer, seed + i) for i, part in enumerate(parts)], notes
    if not type(loaded).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(
            f"expected a model that predicts text (…ForCausalLM, …LMHeadModel, …ForMaskedLM) with --text, got "
            f"{type(loaded).__name__}; give its batches with --data module:function"
        )
    return [{"input_ids": part, "labels": part} for part in parts], notes


def _masked(ids: Tensor, tokenizer: Any, seed: int) -> dict[str, Tensor]:
    """Some tokens replaced by the mask, and those alone scored."""
    if tokenizer.mask_token_id is None:
        raise ValueError(
            "expected a tokenizer with a mask token for this model, got one without; set mask_token"
        )
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < MASKED
    chosen[:, 0] |= ~chosen.any(1)  # at least one each
    return {
        "input_ids": ids.masked_fill(chosen, tokenizer.mask_token_id),
        "labels": ids.masked_fill(~chosen, IGNORED),
    }


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the library raises many kinds
        raise ValueError(
            f"expected a tokenizer in {model!r}, got none that loads ({' '.join(str(error).split())[:120]}); "
            "save it there "
            "with tokenizer.save_pretrained, or give token ids with --data module:function"
        ) from error


def _longest(model: nn.Module) -> int:
    config: Any = model.config
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0:
            # RoBERTa and its kin count positions from behind the padding token
            return size - 2 if "roberta" in getattr(config, "model_type", "") else size
    return 1 << 20


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on stderr: what matters is said in our words."""
    from transformers.utils import logging as theirs

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        hub.setLevel(before)
        if bars:
            theirs.enable_progress_bar()
