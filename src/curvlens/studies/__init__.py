"""Studies: the figures, tables and claims of the papers, each run by one command and judged."""

from curvlens.studies.registry import load, names
from curvlens.studies.run import Reproduction, read, reproduce
from curvlens.studies.study import Config, Finding, Study, between, mean95, near, ratio, verdict

__all__ = [
    "Config",
    "Finding",
    "Reproduction",
    "Study",
    "between",
    "load",
    "mean95",
    "names",
    "near",
    "ratio",
    "read",
    "reproduce",
    "verdict",
]
