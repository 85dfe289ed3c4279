"""A plan says what a product takes, before it is run."""

import pytest
import torch

import curvlens as cl
from curvlens import nets
from curvlens.engine import plan as plans
from curvlens.engine.memory import recorded_peak
from curvlens.engine.plan import plan
from models import MODELS

QUANTITIES = {"hessian": cl.hessian, "gauss-newton": cl.gauss_newton}


def landscape(samples=8, **more):
    net = nets.GPT(300, 32, 48, 3, 2, norm="pre")
    return cl.Landscape(net, torch.randint(0, 300, (samples, 32)), "next-token", **more)


def test_memory_is_recorded():
    assert recorded_peak(lambda: torch.ones(1000).exp()) == 8000
    assert recorded_peak(lambda: torch.ones(1000)[:10]) == 4000


@pytest.mark.parametrize("engine", ["layered", "double-backward", "forward-over-reverse"])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_memory_is_right_within_a_quarter(quantity, engine):
    land = landscape()
    for vectors in (1, 3):
        H = QUANTITIES[quantity](land, engine=engine)
        stack = torch.randn(vectors, land.blocks.size)
        H.apply(stack)
        said = plan(land, quantity, vectors, engine)
        assert said.engine == engine
        assert said.seconds > 0
        assert said.peak_bytes == pytest.approx(recorded_peak(lambda: H.apply(stack)), rel=0.25)  # noqa: B023


def test_a_smaller_micro_batch_where_the_whole_does_not_fit(monkeypatch):
    land = landscape(16)
    whole = plan(land, engine="double-backward")
    assert whole.fits
    assert whole.micro_batch is None
    monkeypatch.setattr(plans, "free_memory", lambda device: int(whole.peak_bytes / 2))
    said = plan(land, engine="double-backward")
    assert said.fits
    assert said.micro_batch < 16
    assert f"micro_batch={said.micro_batch}" in str(said)
    smaller = landscape(16, micro_batch=said.micro_batch)
    H = cl.hessian(smaller, engine="double-backward")
    v = torch.randn(1, land.blocks.size)
    H.apply(v)
    assert recorded_peak(lambda: H.apply(v)) <= said.free_bytes


def test_what_never_fits_is_said(monkeypatch):
    monkeypatch.setattr(plans, "free_memory", lambda device: 1000)
    said = plan(landscape())
    assert not said.fits
    assert "still too much" in str(said)


def test_uneven_batches_and_every_kind_of_output():
    for name in ("gpt2", "vit", "linear_mlp"):
        model, batch = MODELS[name]()
        assert plan(cl.Landscape(model, [batch, batch])).seconds > 0


def test_auto_is_what_the_operator_takes(monkeypatch):
    land = landscape(2)
    whole, layered = (plan(land, engine=engine) for engine in ("double-backward", "layered"))
    assert layered.peak_bytes < whole.peak_bytes
    assert plan(land).engine == cl.hessian(land).engine == "double-backward"
    assert whole.kept > 0
    monkeypatch.setattr("curvlens.engine.choice.LARGE", 0)
    land = landscape(2)
    assert plan(land).engine == cl.hessian(land).engine == "layered"
