"""Where each study is: its name as the papers number it, and its module."""

from __future__ import annotations

from importlib import import_module

from curvlens.studies.study import Study

MODULES = {
    "A-1": "heat_map",
    "A-3a": "growth_without_norm",
    "A-3b": "growth_pre_norm",
    "A-4": "softmax_histogram",
    "A-5": "growth_linear_axes",
    "A-8": "linear_mlp",
    "A-eq5": "growth_of_all_blocks",
    "A-table1": "data_dependence",
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
