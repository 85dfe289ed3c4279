"""Closed forms: exact Hessians of layers, as operators with exact norms, traces and dense blocks."""

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_map import Elementwise, RowMap
from curvlens.exact.result import Result, hessian

__all__ = ["Elementwise", "Result", "RowMap", "SelfAttention", "hessian"]
