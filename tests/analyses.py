"""Analyses small enough for a test."""

from curvlens import digits, nets
from curvlens.report.presets import Preset

# small enough for a test; `dense` chooses between the whole matrices and estimates
TINY = {
    "traces": 4, "norms": 2, "rows": 12, "eigenpairs": 4, "tol": 1e-3, "probes": 2, "steps": 6,
    "spectra": 3, "depth": 2, "depth_eigenvalues": False, "head_gradients": 50.0, "parts": 3,
}  # fmt: skip


def tiny(dense=0, **changes):
    return Preset("tiny", dense=dense, **{**TINY, **changes})


def digit_net(steps=20, **settings):
    model = nets.GPT(digits.VOCABULARY, digits.LENGTH, **{"width": 4, "heads": 2, "depth": 1, **settings})
    digits.train(model, digits.stream(8, seed=1), steps, lr=1e-2)
    return model
