"""How much is measured: three presets. More samples, more pairs, finer maps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    name: str
    dense: int  # with at most so many parameters the whole matrices are formed: then all is exact
    traces: int  # probes of traces
    norms: int  # probes of each row of a map
    rows: int  # most rows of a map
    eigenpairs: int  # from both ends together
    tol: float  # residual of an eigenvalue, relative
    probes: int  # of the spectral density
    steps: int  # products a probe
    spectra: int  # most groups with a spectrum of their own; 0: none
    depth: int  # probes a sublayer
    depth_eigenvalues: bool
    head_gradients: float  # cost up to which the norms of heads are exact, in gradients
    parts: int  # of the data, for its noise


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("quick", 4096, 8, 2, 40, 4, 1e-2, 2, 20, 0, 4, False, 10.0, 4),
        Preset("standard", 4096, 16, 4, 120, 8, 1e-3, 4, 40, 16, 8, False, 50.0, 8),
        Preset("thorough", 8192, 32, 8, 400, 16, 1e-4, 10, 80, 64, 16, True, 200.0, 16),
    )
}


def named(preset: str | Preset) -> Preset:
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset]
