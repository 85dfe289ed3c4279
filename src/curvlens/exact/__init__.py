"""Closed forms: exact Hessians of layers, as operators with exact norms, traces and dense blocks."""

from curvlens.exact.result import Result, hessian

__all__ = ["Result", "hessian"]
