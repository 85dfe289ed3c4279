"""Where each study is: its name as the papers number it, and its module."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module

from curvlens.studies.study import Study

MODULES = {
    "A-1": "heat_map",
    "A-3a": "growth_without_norm",
    "A-3b": "growth_pre_norm",
    "A-4": "softmax_histogram",
    "A-5": "growth_linear_axes",
    "A-6": "depth_softmax",
    "A-7": "depth_linear_attention",
    "A-8": "linear_mlp",
    "A-T": "scores_split",
    "A-eq5": "growth_of_all_blocks",
    "A-heads": "heads",
    "A-moments": "moments",
    "A-norm": "norm_placement",
    "A-table1": "data_dependence",
    "B-validate": "closed_form_accuracy",
    "B-blocks": "block_map",
    "B-bounds": "tightness_of_bounds",
    "B-converge": "landscape_convergence",
    "B-criteria": "criteria",
    "B-scale": "curvature_against_size",
    "Z-hetero": "spectra_of_blocks",
    "Z-adam": "sgd_and_adam",
    "O-training": "through_training",
    "O-third": "third_order",
    "O-recurrent": "recurrent_layer",
}


def names() -> tuple[str, ...]:
    """All studies, paper A first, then paper B, then what belongs to others."""
    return tuple(MODULES)


def matching(pattern: str) -> tuple[str, ...]:
    """All studies for "all", else those of a name or a shell pattern."""
    found = names() if pattern == "all" else tuple(name for name in MODULES if fnmatchcase(name, pattern))
    if not found:
        raise ValueError(f"expected 'all' or a study among {', '.join(MODULES)}, got {pattern!r}")
    return found


def module(name: str) -> str:
    if name not in MODULES:
        raise ValueError(f"expected a study among {', '.join(MODULES)}, got {name!r}")
    return f"curvlens.studies.{MODULES[name]}"


def load(name: str) -> Study:
    """The study of this name."""
    return import_module(module(name)).STUDY
