"""Which engine "auto" takes, and that it is said before a product."""

import pytest
import torch

import curvlens as cl
from curvlens import guards, nets
from curvlens.engine import choice
from curvlens.engine.double_backward import graph_bytes
from curvlens.engine.quantity import Quantity
from models import MODELS

QUANTITIES = {
    "hessian": cl.hessian,
    "gauss-newton": cl.gauss_newton,
    "functional": cl.functional,
    "fisher": cl.fisher,
}
SMALL = {
    "hessian": "double-backward",
    "gauss-newton": "forward-over-reverse",
    "functional": "double-backward",
    "fisher": "forward-over-reverse",
}


def landscape(**more):
    torch.manual_seed(0)
    net = nets.GPT(50, 16, 24, 3, 2, norm="pre").double()
    batches = [torch.randint(0, 50, (samples, 16)) for samples in (2, 5, 1)]
    return cl.Landscape(net, batches, "next-token", **more)


def limit(monkeypatch, large=2**40, free=2**50):
    monkeypatch.setattr(choice, "LARGE", large)
    monkeypatch.setattr(choice, "free_memory", lambda device: free)


@pytest.mark.parametrize("by", ["size", "free memory"])
@pytest.mark.parametrize("name", QUANTITIES)
def test_layer_by_layer_from_a_size_on(name, by, monkeypatch):
    held = choice.held_bytes(landscape(), Quantity(name))
    results = []
    for most, engine in ((held, SMALL[name]), (held - 1, "layered")):
        limit(monkeypatch, **({"large": most} if by == "size" else {"free": most / choice.SHARE}))
        land = landscape()
        A = QUANTITIES[name](land)
        assert A.engine == engine
        assert f"by {engine}" in repr(A)
        assert A.block("layer.1").engine == A.T.engine == engine
        results.append(A @ torch.ones(land.blocks.size, dtype=torch.float64))
    assert (results[0] - results[1]).norm() <= 1e-12 * results[0].norm()


def test_a_limit_lies_with_the_largest_micro_batch():
    sizes = [choice.held_bytes(landscape(micro_batch=m), Quantity("hessian")) for m in (None, 2, 1)]
    assert [sizes[0] / sizes[2], sizes[1] / sizes[2]] == pytest.approx([5, 2], rel=0.01)


def test_one_sample_tells_of_the_batch():
    land = landscape()
    largest = max(land.pieces(), key=lambda piece: len(piece.target))
    with guards.twice_differentiable(land.model, land.device):
        whole = graph_bytes(land, largest, Quantity("hessian"))
    assert choice.held_bytes(land, Quantity("hessian")) == pytest.approx(whole, rel=0.1)


def test_what_cannot_be_cut_stays_whole(monkeypatch):
    limit(monkeypatch, large=0)
    land = cl.Landscape(*MODELS["linear_mlp"]())
    H = cl.hessian(land)
    assert H.engine == "double-backward"
    assert cl.gauss_newton(land).engine == "forward-over-reverse"
    v = torch.ones(land.blocks.size, dtype=land.dtype)
    assert torch.equal(H @ v, cl.hessian(land, engine="double-backward") @ v)


def test_an_inner_split_stays_whole(monkeypatch):
    limit(monkeypatch, large=0)
    land = landscape()
    at = next(path for path, _ in land.model.named_modules() if path)
    assert cl.gauss_newton(land, at=at).engine == "double-backward"
    with pytest.raises(ValueError, match="expected a split at the model's output"):
        cl.gauss_newton(land, engine="layered", at=at)


@pytest.mark.parametrize("name", ["gauss-newton", "fisher", "hessian"])
def test_with_bytes_to_keep_something_is_kept(name, monkeypatch):
    expected = None
    for large, engine in ((2**40, "double-backward"), (0, "layered")):
        limit(monkeypatch, large=large)
        land = landscape()
        A = QUANTITIES[name](land, keep=2**30)
        assert A.engine == engine
        v = torch.ones(land.blocks.size, dtype=torch.float64)
        expected = QUANTITIES[name](land) @ v if expected is None else expected
        for _ in range(2):
            assert (A @ v - expected).norm() <= 1e-12 * expected.norm()
        assert A.kept.bytes > 0


def test_it_is_chosen_once_and_not_before_it_is_asked_for(monkeypatch):
    runs = []
    land = landscape()
    land.model.register_forward_hook(lambda *_: runs.append(1))
    H = cl.hessian(land)
    assert not runs
    assert H.engine == "double-backward"
    assert len(runs) == 1
    limit(monkeypatch, large=0)
    assert H.engine == cl.hessian(land).engine == "double-backward"
    assert len(runs) == 1


def test_a_sample_that_does_not_fit_goes_layer_by_layer(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(choice, "graph_bytes", full)
    assert cl.hessian(landscape()).engine == "layered"


def test_a_model_that_fails_is_left_to_the_product():
    net = nets.GPT(23, 12, 16, depth=1)
    land = cl.Landscape(net, torch.randint(0, 23, (4, 12)))
    net.forward = lambda ids: ids.nonsense
    H = cl.hessian(land)
    assert H.engine == "double-backward"
    with pytest.raises(AttributeError, match="nonsense"):
        H @ torch.ones(land.blocks.size)
