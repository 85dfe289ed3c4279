from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from curvlens.cli.exits import DONE, FAILED, INCOMPLETE, NOT_CONVERGED, WrongInput, complain, expected_input
from curvlens.cli.options import Device, DryRun, Dtype, Json, Quiet, Seed, Strict


def track(
    folder: Annotated[
        Path, typer.Argument(help="Folder of checkpoints: checkpoint-100/ of a Trainer, or step_100.pt.")
    ],
    model: Annotated[
        str | None, typer.Option(help="module:function that builds the model, for checkpoints of one's own.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, cut into sequences by the tokenizer.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Held batches: module:function, or module:name.")] = None,
    loss: Annotated[str, typer.Option(help="next-token, cross-entropy, mse, or auto.")] = "auto",
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence of the text.")] = 64,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of the text.")] = 8,
    parts: Annotated[
        str, typer.Option(help="What is measured: eigenvalues, optimizer, blocks, heads, depth.")
    ] = "eigenvalues,optimizer,blocks,heads,depth",
    samples: Annotated[int, typer.Option(min=1, help="Random probes of traces and norms.")] = 2,
    out: Annotated[Path, typer.Option(help="The page to write; the record goes beside it.")] = Path(
        "out/track.html"
    ),
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    dry_run: DryRun = False,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit with 1 on such a finding: a severity, or names, with commas.")
    ] = None,
    strict: Strict = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Curvature through a training that is over, from its checkpoints: sharpness, its limit, blocks, heads, depth.

    Each checkpoint is measured on the same held batches, and written down at once: the same command goes on after an
    interruption. The optimizer's own state, where it is saved, gives the sharpness that it saw.
    """
    with expected_input():
        from curvlens.training.checkpoints import checkpoints, track_checkpoints

        found = checkpoints(folder)
        failing = [] if fail_on is None else [name.strip() for name in fail_on.split(",")]
        if dry_run:
            typer.echo("\n".join(f"step {c.step:>8,}  {c.path}" for c in found))
            raise typer.Exit(DONE)
        net, batches = _model(model, found[0].path), _batches(data, text, found[0].path, length, sequences)
        if device is not None:
            net.to(device)
        options: dict[str, Any] = {"dtype": _dtype(dtype)} if dtype else {}

        def watch(index: int, checkpoint: Any) -> None:
            if not quiet and sys.stderr.isatty():
                print(f"[{index + 1}/{len(found)}] step {checkpoint.step:,}", file=sys.stderr)

        try:
            tracker = track_checkpoints(
                found, net, batches, out.with_suffix(".jsonl"), watch, loss=loss, seed=seed, samples=samples,
                parts=[name.strip() for name in parts.split(",")], **options,
            )  # fmt: skip
        except KeyboardInterrupt:
            complain("interrupted; what was measured is kept, and the same command goes on from there")
            raise typer.Exit(INCOMPLETE) from None
    _tell(tracker.track, out, json, quiet)
    failed = [m["step"] for m in tracker.track.measurements if m.get("failed")]
    if any(f.id in failing or f.severity in failing for f in tracker.findings):
        raise typer.Exit(FAILED)
    if failed:
        complain(f"measurements of step {', '.join(map(str, failed))} are not complete; the record says why")
        raise typer.Exit(INCOMPLETE)
    raise typer.Exit(NOT_CONVERGED if strict and not _converged(tracker.track) else DONE)


def _tell(track: Any, out: Path, json: bool, quiet: bool) -> None:
    from json import dumps

    from curvlens.training.record import plain

    track.to_html(out)
    if json:
        typer.echo(dumps(plain(track.to_dict()), ensure_ascii=False))
    elif not quiet:
        typer.echo(f"{track}\nThe page: {out}")


def _converged(track: Any) -> bool:
    keys = ("lambda_max", "lambda_min", "preconditioned")
    return all(m[key]["converged"] for m in track.measurements for key in keys if m.get(key))


def _model(name: str | None, path: Path) -> Any:
    if name is not None:
        return _named(name)()
    if not path.is_dir():
        raise WrongInput(f"expected --model module:function for checkpoints such as {path.name!r}, got none")
    from json import loads

    import transformers

    kinds = loads((path / "config.json").read_text()).get("architectures") or ["AutoModelForCausalLM"]
    kind = getattr(transformers, kinds[0], transformers.AutoModelForCausalLM)
    return kind.from_pretrained(path, dtype="float32")


def _batches(data: str | None, text: Path | None, path: Path, length: int, sequences: int) -> Any:
    if (data is None) == (text is None):
        raise WrongInput("expected held batches by --data module:function or by --text FILE, one of the two")
    if data is not None:
        made = _named(data)
        return made() if callable(made) else made
    from transformers import AutoTokenizer

    assert text is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(path.parent)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    count = min(sequences, len(ids) // length)
    if not count:
        raise WrongInput(f"expected a text of at least --length {length} tokens, got {len(ids)}")
    return [ids[: count * length].view(count, length)]


def _named(reference: str) -> Any:
    """What `module:name` stands for; modules of the present folder are found."""
    from importlib import import_module

    module, _, name = reference.partition(":")
    if not name:
        raise WrongInput(f"expected module:name, got {reference!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        raise WrongInput(f"expected {name!r} in the module {module!r}, got none") from None


def _dtype(name: str) -> Any:
    import torch

    if name not in ("float32", "float64"):
        raise WrongInput(f"expected --dtype float32 or float64, got {name!r}")
    return getattr(torch, name)
