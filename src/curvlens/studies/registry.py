"""Where each study is: its name as the papers number it, and its module."""

from __future__ import annotations

from importlib import import_module

from curvlens.studies.study import Study

MODULES = {
    "A-3a": "growth_without_norm",
}


def names() -> tuple[str, ...]:
    """All studies, paper A first."""
    return tuple(MODULES)


def module(name: str) -> str:
    if name not in MODULES:
        raise ValueError(f"expected a study among {', '.join(MODULES)}, got {name!r}")
    return f"curvlens.studies.{MODULES[name]}"


def load(name: str) -> Study:
    """The study of this name."""
    return import_module(module(name)).STUDY
