"""At the limits: memory that runs out, numbers that are not finite, blocks that need no work, less precision."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import curvlens as cl
from curvlens import nets
from curvlens.engine import double_backward, layered
from curvlens.engine.memory import recorded_peak
from curvlens.engine.room import room_of
from curvlens.engine.segments import Body


def gpt(layers=2, samples=4, vocabulary=11, width=8, tokens=6, **more):
    net = nets.GPT(vocabulary, tokens, width, layers, 2, norm="pre").double()
    return cl.Landscape(net, torch.randint(0, vocabulary, (samples, tokens)), "next-token", **more)


# -- out of memory


class Full:
    """An allocator that fails whenever a call is larger than a limit."""

    def __init__(self, monkeypatch, most):
        self.most, self.failures = most, 0
        self.own = double_backward.pull_back
        for module in (double_backward, layered):
            monkeypatch.setattr(module, "pull_back", self)

    def __call__(self, outputs, inputs, cotangents, keep):
        if cotangents[0].numel() > self.most:
            self.failures += 1
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
            )
        return self.own(outputs, inputs, cotangents, keep)


@pytest.mark.parametrize("engine", ["layered", "double-backward"])
def test_out_of_memory_is_caught_and_the_run_goes_on(engine, monkeypatch):
    land = gpt()
    stack = torch.randn(land.blocks.size, 6, dtype=torch.float64)
    for keep in (0, 2**30):
        again = cl.Landscape(land.model, list(land.batches))
        expected = cl.hessian(again, engine="double-backward") @ stack
        H = cl.hessian(again, engine=engine, keep=keep)
        with monkeypatch.context() as patch:
            full = Full(patch, 200)
            found = H @ stack
            tries = full.failures
            assert tries > 0
            assert (found - expected).norm() < 1e-12 * expected.norm()
            H @ stack  # the smaller steps are remembered
            assert full.failures == tries
        assert room_of(again).samples == 1 or room_of(again).vectors


def test_what_does_not_fit_one_by_one_says_so(monkeypatch):
    land = gpt()
    H = cl.hessian(land, engine="layered")
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    H @ v
    Full(monkeypatch, 0)
    with pytest.raises(MemoryError, match="expected memory for one vector and one sample at a time"):
        H @ v


def test_other_errors_are_not_taken_for_it(monkeypatch):
    land = gpt()

    def broken(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(layered, "pull_back", broken)
    with pytest.raises(RuntimeError, match="something else"):
        cl.hessian(land, engine="layered") @ torch.randn(land.blocks.size, dtype=torch.float64)


# -- not finite


@pytest.mark.parametrize("where", ["weight", "output"])
def test_a_nan_in_layer_seven_says_so(where):
    land = gpt(layers=9)
    H = cl.hessian(land, engine="layered")
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    H @ v
    layer = land.model.get_submodule(next(path for path in layered.cut(land).layers if path.endswith("7")))
    if where == "weight":
        with torch.no_grad():
            next(layer.parameters())[0] = float("nan")
        match = r"in the weight '.*\.7\."
    else:
        layer.register_forward_hook(lambda module, args, out: out / 0)
        match = r"first in the output of '.*\.7'"
    with pytest.raises(FloatingPointError, match=match):
        H @ v


# -- blocks


@pytest.fixture
def layer_runs(monkeypatch):
    """Counts the times that a layer is run."""
    counts = []
    own = Body.__call__
    monkeypatch.setattr(Body, "__call__", lambda self, *args: (counts.append(self), own(self, *args))[1])
    return counts


def runs(counts, land, rows, columns, quantity=cl.hessian):
    block = quantity(land, engine="layered").block(rows, columns)
    v = torch.randn(block.shape[1], dtype=torch.float64)
    block @ v  # what is found once
    counts.clear()
    block @ v
    return len(counts)


def test_a_block_costs_what_it_must(layer_runs):
    land = gpt(layers=6)
    # forward through all six; then each layer from the last down to the lowest row
    assert runs(layer_runs, land, "*", "*") == 12
    assert runs(layer_runs, land, "layer.5", "layer.5") == 7
    assert runs(layer_runs, land, "layer.3", "layer.5") == 9
    assert runs(layer_runs, land, "layer.0", "layer.5") == 12
    assert runs(layer_runs, land, "layer.5", "layer.0") == 7
    assert runs(layer_runs, land, "head", "layer.5") == 6


def test_no_tangent_below_the_lowest_column(monkeypatch):
    land = gpt(layers=6)
    pushed = []
    own = jvp
    monkeypatch.setattr("curvlens.engine.segments.jvp", lambda *args: (pushed.append(1), own(*args))[1])
    for column, count in (("layer.0", 6), ("layer.3", 3), ("layer.5", 1), ("embed", 6)):
        block = cl.hessian(land, engine="layered").block("*", column)
        v = torch.randn(block.shape[1], dtype=torch.float64)
        block @ v
        pushed.clear()
        block @ v
        assert len(pushed) == count


# -- memory


def peak(land, **more):
    H = cl.hessian(land, engine="layered", **more)
    v = torch.randn(1, land.blocks.size, dtype=land.dtype)
    H.apply(v)
    gc.collect()
    return recorded_peak(lambda: H.apply(v)) - v.nbytes


def test_memory_does_not_grow_with_depth_beyond_the_boundaries():
    few, many = (gpt(layers=layers, samples=8, width=16, tokens=64) for layers in (4, 8))
    boundary = 8 * 64 * 16 * 8  # bytes of the stream; kept with its tangent for each layer
    assert peak(many) - peak(few) <= 4 * 2 * boundary * 1.1
    other = cl.hessian(few, engine="double-backward"), cl.hessian(many, engine="double-backward")
    grown = [
        recorded_peak(lambda H=H: H.apply(torch.ones(1, H.shape[1], dtype=torch.float64))) for H in other
    ]
    assert grown[1] - grown[0] > 50 * boundary  # what it does where the graph is kept


@pytest.mark.slow
def test_the_head_of_a_large_vocabulary_stays_below_a_gigabyte():
    vocabulary, width, tokens = 150_000, 16, 8192

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.readout = nn.Linear(width, vocabulary)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.readout(x)

    land = cl.Landscape(Bare(), torch.randint(0, vocabulary, (1, tokens)), "next-token")
    assert tokens * vocabulary * 4 > 4 * 2**30  # the logits alone
    result = land.blocks.size * 4
    assert peak(land) - 3 * result < 2**30


# -- precision


def test_exact_means_exact_whatever_the_switch_says(monkeypatch):
    land = gpt()
    seen = []
    own = layered.product

    def look(*args):
        seen.append(torch.get_float32_matmul_precision())
        return own(*args)

    monkeypatch.setitem(cl.curvature.engines.ENGINES, "layered", look)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for precision in ("exact", "tf32", "bf16"):
            cl.hessian(land, engine="layered", precision=precision) @ v
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest", "high", "medium"]


def test_the_error_of_a_precision_is_measured_and_stated():
    net = nets.GPT(40, 16, 64, 2, 2, norm="pre")
    land = cl.Landscape(net, torch.randint(0, 40, (2, 16)), "next-token")
    H = cl.hessian(land, engine="layered", precision="bf16")
    assert "not measured" in repr(H)
    error = H.precision_error()
    assert error < 0.05  # three digits a product; none where the processor has no such products
    assert f"{error:.1e} measured" in repr(H)
    assert cl.hessian(land).precision_error() == 0


# -- which compositions of torch are right


def test_which_derivatives_of_layer_norm_are_right():
    """Those that the package uses are right; those that it must not use are listed, wrong or mended."""
    x = torch.randn(5, 4, dtype=torch.float64)

    def by_torch(t):
        return F.layer_norm(x @ t[8:].view(4, 4), (4,), t[:4], t[4:8]).sin().sum()

    def by_hand(t):
        h = x @ t[8:].view(4, 4)
        n = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return (n * t[:4] + t[4:8]).sin().sum()

    t = torch.randn(24, dtype=torch.float64)
    exact = torch.autograd.functional.hessian(by_hand, t)

    def error(found):
        return ((found - exact).norm() / exact.norm()).item()

    eye = torch.eye(24, dtype=torch.float64)
    trusted = {
        "double backward": torch.autograd.functional.hessian(by_torch, t),
        "jacfwd(grad)": jacfwd(grad(by_torch))(t),
        "vmap(jvp(grad))": vmap(lambda v: jvp(grad(by_torch), (t,), (v,))[1])(eye),
    }
    assert {name: error(found) for name, found in trusted.items() if error(found) > 1e-12} == {}

    leaf = t.clone().requires_grad_()
    tangents = [torch.autograd.grad(jvp(by_torch, (leaf,), (v,))[1], leaf)[0] for v in eye]
    distrusted = {
        "torch.func.hessian": hessian(by_torch)(t),
        "jacrev(jacrev)": jacrev(jacrev(by_torch))(t),
        "jvp(jacrev)": torch.stack([jvp(jacrev(by_torch), (t,), (v,))[1] for v in eye]),
        "jacfwd(jacfwd)": jacfwd(jacfwd(by_torch))(t),
        "grad(jvp)": torch.stack(tangents),
    }
    for name, found in distrusted.items():
        # 14 % and more with torch 2.11 and 2.13 (pytorch #196700); right once that is mended, never in between
        assert error(found) > 0.01 or error(found) < 1e-12, name
