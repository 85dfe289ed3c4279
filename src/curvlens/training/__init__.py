"""Curvature while a model trains: what a step does to the loss, which rates are stable, and where training goes."""
