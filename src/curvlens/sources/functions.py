"""Models and batches from functions of one's own: `package.module:build`, or `folder/file.py:build`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from curvlens.sources.subject import Subject

REFERENCE = re.compile(r"(?P<module>[\w./\\-]+?):(?P<name>[A-Za-z_]\w*)")
EXPECTED = {"--model": "an nn.Module, or (model, optimizer)", "--data": "batches, or a re-iterable of them"}


def is_reference(text: str) -> bool:
    return REFERENCE.fullmatch(text) is not None and not Path(text).exists()


def subject(model: str, data: str | None) -> Subject:
    """What the functions return: a model, or a model and its optimizer; batches as `Landscape` takes them."""
    if data is None:
        raise ValueError(f"expected --data module:function with a model from {model!r}, got none")
    built = call(model, "--model")
    optimizer = None
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], Optimizer):
        built, optimizer = built
    if not isinstance(built, nn.Module):
        raise TypeError(f"expected {EXPECTED['--model']} from {model!r}, got {type(built).__name__}")
    return Subject(
        built.eval(), call(data, "--data"), f"{type(built).__name__} of {model}", optimizer=optimizer
    )


def call(reference: str, option: str) -> Any:
    """The value of a function, given by its module and name."""
    matched = REFERENCE.fullmatch(reference)
    if matched is None:
        raise ValueError(f"expected module:function for {option}, got {reference!r}")
    module = _module(matched["module"], option)
    function = getattr(module, matched["name"], None)
    if function is None:
        known = ", ".join(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
        raise ValueError(
            f"expected a function {matched['name']!r} in {matched['module']!r} for {option}, got none; "
            f"it has {known[:200] or 'no function'}"
        )
    return function() if callable(function) and not isinstance(function, nn.Module) else function


def _module(name: str, option: str) -> Any:
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"expected a Python file for {option}, got no file {name!r}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules beside where one stands
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected a module that Python finds from here for {option}, got {name!r}: {error}; "
            "give the path of its file, folder/file.py:function, or set PYTHONPATH"
        ) from error
