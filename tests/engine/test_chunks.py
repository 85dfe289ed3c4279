"""The number of vectors a pass is bounded by memory, and changes no result."""

import pytest
import torch

import curvlens as cl
from curvlens.engine import chunks
from models import MODELS


@pytest.fixture
def land():
    model, batch = MODELS["own_gpt"]()
    return cl.Landscape(model, batch)


def test_fewer_vectors_a_pass_where_memory_is_short(land, monkeypatch):
    piece = next(land.pieces())
    each = chunks.saved_bytes(land, piece)
    assert each > 1000  # activations of a net of two layers
    sizes = []
    for free in (2**30, 2**22, 2**10):
        monkeypatch.setattr(chunks, "free_memory", lambda device, free=free: free)
        sizes.append(chunks.chunk_size(land, piece, 10_000, kept=True))
    assert sizes[0] > sizes[1] > sizes[2] == 1
    assert chunks.chunk_size(land, piece, 1, kept=True) == 1


def test_saved_bytes_grow_with_the_batch(land):
    piece = next(land.pieces())
    parts = [chunks.saved_bytes(land, part) for part in piece.split(1)]
    assert max(parts) < chunks.saved_bytes(land, piece) < 1.5 * sum(parts)


@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse"])
@pytest.mark.parametrize("quantity", [cl.hessian, cl.gauss_newton, cl.functional])
def test_chunks_change_no_result(land, monkeypatch, engine, quantity):
    vectors = torch.randn(land.blocks.size, 7, dtype=torch.float64)
    results = []
    for size in (1, 3, 7):
        monkeypatch.setattr("curvlens.engine.chunk_size", lambda *_, size=size, **__: size)
        results.append(quantity(land, engine=engine) @ vectors)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-11, atol=1e-12)
