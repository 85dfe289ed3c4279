"""Scaling: how the landscape settles as samples are added, and how curvature follows model and data size."""

from curvlens.scaling.convergence import LandscapeConvergence, landscape_convergence

__all__ = ["LandscapeConvergence", "landscape_convergence"]
