"""Closed forms: exact Hessians of layers, as operators with exact norms, traces and dense blocks."""

from curvlens.exact import literal
from curvlens.exact.attention import SelfAttention, rotary
from curvlens.exact.attention_map import Elementwise, RowMap
from curvlens.exact.block import TransformerBlock, stack
from curvlens.exact.block_bounds import BlockBounds, block_bounds
from curvlens.exact.bounds import Bound, bounds, t_rank_bound
from curvlens.exact.chain import Chain
from curvlens.exact.ffn import FeedForward
from curvlens.exact.growth import GrowthLaw, growth, predicted_exponents
from curvlens.exact.heads import Heads, heads
from curvlens.exact.linear import Linear
from curvlens.exact.mlp import LinearMLP
from curvlens.exact.moments import Moments, moments
from curvlens.exact.norm import LayerNorm, RMSNorm
from curvlens.exact.propagation import propagation
from curvlens.exact.result import Result, hessian

__all__ = [
    "BlockBounds",
    "Bound",
    "Chain",
    "Elementwise",
    "FeedForward",
    "GrowthLaw",
    "Heads",
    "LayerNorm",
    "Linear",
    "LinearMLP",
    "Moments",
    "RMSNorm",
    "Result",
    "RowMap",
    "SelfAttention",
    "TransformerBlock",
    "block_bounds",
    "bounds",
    "growth",
    "heads",
    "hessian",
    "literal",
    "moments",
    "predicted_exponents",
    "propagation",
    "rotary",
    "stack",
    "t_rank_bound",
]
