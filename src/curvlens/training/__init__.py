"""Curvature while a model trains: what is measured along the way, what a step does, which rates are stable."""
