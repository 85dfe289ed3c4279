"""Closed forms: exact Hessians of layers, as operators with exact norms, traces and dense blocks."""

from curvlens.exact.attention import SelfAttention
from curvlens.exact.attention_map import Elementwise, RowMap
from curvlens.exact.bounds import Bound, bounds, t_rank_bound
from curvlens.exact.growth import GrowthLaw, growth, predicted_exponents
from curvlens.exact.moments import Moments, moments
from curvlens.exact.result import Result, hessian

__all__ = [
    "Bound",
    "Elementwise",
    "GrowthLaw",
    "Moments",
    "Result",
    "RowMap",
    "SelfAttention",
    "bounds",
    "growth",
    "hessian",
    "moments",
    "predicted_exponents",
    "t_rank_bound",
]
