"""Operators with structure: exact norms, traces, diagonals, slices and bounds, without their matrices."""

from curvlens.structured.dense import Dense, Diagonal
from curvlens.structured.grid import BlockOperator
from curvlens.structured.kronecker import KroneckerSum
from curvlens.structured.stacks import Full, LowRank

__all__ = ["BlockOperator", "Dense", "Diagonal", "Full", "KroneckerSum", "LowRank"]
