"""What is here and works: packages, devices, second derivatives; and what will run for a given model."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from typing import Literal, NamedTuple

import torch

from curvlens import families
from curvlens.engine import ENGINES
from curvlens.kernels.inside_models import PLAIN
from curvlens.landscape import Landscape
from curvlens.operator import free_memory
from curvlens.report.files import writable

State = Literal["fine", "missing", "note", "wrong"]
MARKS = {"fine": "✓", "missing": "·", "note": "!", "wrong": "✗"}
PACKAGES = {
    "numpy": "",
    "scipy": "",
    "rich": "",
    "typer": "",
    "transformers": "Hugging Face models: pip install 'curvlens[hf]'",
    "safetensors": "weights in safetensors: pip install 'curvlens[hf]'",
    "matplotlib": "figures as PNG: pip install 'curvlens[report]'",
    "triton": "kernels on a GPU come with torch for CUDA",
}


class Part(NamedTuple):
    """One thing that was looked at."""

    what: str
    state: State
    words: str

    def __str__(self) -> str:
        lines = wrap(f"{MARKS[self.state]} {self.what:<14} {self.words}", 80, subsequent_indent=" " * 17)
        return "\n".join(lines)


def machine(folder: Path) -> list[Part]:
    """Versions, devices, and trials of what an analysis rests on."""
    found = [Part("python", "fine", f"{platform.python_version()} on {platform.platform()}")]
    found.append(Part("torch", "fine", f"{torch.__version__}, {torch.get_num_threads()} threads"))
    found += [_package(name, advice) for name, advice in PACKAGES.items()]
    found += [_devices(), _memory(), *layer_norm_fault(), _attention(), _folder(folder)]
    return found


def _package(name: str, advice: str) -> Part:
    try:
        return Part(name, "fine", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Part(
            name, "missing" if advice else "wrong", f"not installed; {advice or f'pip install {name}'}"
        )


def _devices() -> Part:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Part(
            "devices", "fine", "cpu, " + ", ".join(f"cuda:{i} ({name})" for i, name in enumerate(names))
        )
    mps = ", mps (float32 only)" if torch.backends.mps.is_available() else ""
    return Part("devices", "fine", f"cpu{mps}; no CUDA device")


def _memory() -> Part:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Part("memory", "fine", f"{free_memory(device) / 2**30:.1f} GiB free on {device}")


def layer_norm_fault() -> list[Part]:
    """Second derivatives through `F.layer_norm` by three compositions, against finite differences."""
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))

    def f(weight: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.layer_norm(x * weight, (5,), weight) ** 3).sum()

    step = 1e-6
    gradient = torch.func.grad(f)
    true = (gradient(w + step * v) - gradient(w - step * v)) / (2 * step)

    def double_backward() -> torch.Tensor:
        leaf = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(g @ v, leaf)[0]

    ways = {
        "double backward": double_backward,
        "forward over reverse": lambda: torch.func.jvp(gradient, (w,), (v,))[1],
        "jacfwd(jacrev)": lambda: torch.func.jacfwd(torch.func.jacrev(f))(w) @ v,
    }
    wrong = [name for name, way in ways.items() if not torch.allclose(way(), true, rtol=1e-5, atol=1e-5)]
    used = [name for name in wrong if name != "jacfwd(jacrev)"]
    if used:
        words = f"wrong by {', '.join(used)} through F.layer_norm in torch {torch.__version__}; take another torch"
        return [Part("derivatives", "wrong", words)]
    found = [
        Part(
            "derivatives", "fine", "second derivatives through F.layer_norm are right as curvlens takes them"
        )
    ]
    if wrong:
        words = (
            f"this torch has the fault of F.layer_norm: {', '.join(wrong)} is wrong there (pytorch #196700)"
        )
        found.append(
            Part("layer_norm", "note", words + "; curvlens does not use it, your own code should not either")
        )
    return found


def _attention() -> Part:
    from curvlens.kernels import attention

    q, k, v = (torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    try:
        ok = torch.autograd.gradgradcheck(lambda q, k, v: attention(q, k, v, is_causal=True), (q, k, v))
    except RuntimeError as error:
        return Part(
            "kernels", "wrong", f"attention of curvlens fails its own check: {str(error).splitlines()[0]}"
        )
    place = "Triton on a GPU" if torch.cuda.is_available() else "chunked PyTorch"
    return Part("kernels", "fine" if ok else "wrong", f"attention with second derivatives, {place}")


def _folder(folder: Path) -> Part:
    try:
        writable(folder)
    except OSError as error:
        return Part("folder", "wrong", str(error))
    return Part("folder", "fine", f"{folder} can be written to")


# -- a model


def of_a_model(land: Landscape) -> list[Part]:
    """What was found in it, which engine and attention will run, and the cost of a product and of each preset."""
    from curvlens.report.forecast import forecast, plans_of, time_words
    from curvlens.report.presets import PRESETS

    family = families.find(land.model)
    sites = families.attention_sites(land.model)
    known = family is not families.PARAMETERS
    words = (
        f"{family.name}: {len(land.blocks)} blocks, {len(sites)} attention layers of "
        f"{max((site.heads for site in sites), default=0)} heads"
        if known
        else "none knows this model: blocks go by the names of their parameters; describe it with families.register"
    )
    found = [
        Part("model", "fine", f"{type(land.model).__name__}, {land.blocks.size:,} parameters"),
        Part("family", "fine" if known else "note", words),
        Part("data", "fine", f"{land.weight:,.0f} scored tokens, loss {land.loss.name}"),
        Part("attention", "fine", _attention_words(land)),
    ]
    plans = plans_of(land)
    found += [Part(f"product {name}", "fine" if p.fits else "note", str(p)) for name, p in plans.items()]
    for preset in PRESETS:
        cost = forecast(land, preset, plans=plans)
        exact = ", everything exact" if cost.dense else ""
        words = f"{cost.products:,} products, about {time_words(cost.seconds)}{exact}"
        found.append(Part(preset, "fine", words))
    found.append(Part("engines", "fine", f"to choose from: {', '.join(ENGINES)}"))
    return found


def _attention_words(land: Landscape) -> str:
    """Which attention runs inside of a product."""
    kind = getattr(getattr(land.model, "config", None), "_attn_implementation", None)
    if kind == "eager":
        return 'as the model writes it (eager); model.set_attn_implementation("sdpa") spares memory at long sequences'
    length = max((t.shape[1] for piece in land.pieces() for t in piece.tensors() if t.dim() > 1), default=0)
    if length**2 > PLAIN:
        return f"{length} tokens: curvlens' own, tile by tile, in memory linear in the length"
    return f"{length} tokens: PyTorch's plain one; beyond {PLAIN**0.5:.0f} curvlens' own, linear in memory, takes over"
