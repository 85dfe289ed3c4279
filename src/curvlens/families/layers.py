"""Where a model can be cut: its layers, the modules that it is a chain of."""

from __future__ import annotations

import re

from torch import nn

from curvlens.families.walk import named_modules

_LAYER = re.compile(r"(.+\.)?layer\.\d+")


def layers(model: nn.Module) -> dict[str, str]:
    """The layers of a model, `{path: name}`: by their family, else the children of its lists of like modules.

    Which layer runs when, and what passes between them, only a run of the model tells.
    """
    found = {path: name for path, name in named_modules(model).items() if _LAYER.fullmatch(name)}
    return found or _listed(model)


def _listed(model: nn.Module) -> dict[str, str]:
    """Children of lists of at least two modules of one class; a list within such a child does not count."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        if len({type(child) for child in module}) > 1 or any(path.startswith(f"{known}.") for known in found):
            continue
        if any(True for _ in next(iter(module)).parameters()):
            children = (f"{path}.{name}" if path else name for name, _ in module.named_children())
            found.update((child, child) for child in children)
    return found
