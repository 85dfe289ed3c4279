"""What is kept between products saves work, stays within its bytes, and is never stale."""

import pytest
import torch

import curvlens as cl
from curvlens import nets
from models import MODELS

PLENTY = 2**30
QUANTITIES = {
    "hessian": cl.hessian,
    "gauss-newton": cl.gauss_newton,
    "functional": cl.functional,
    "empirical": cl.fisher,
    "sampled": lambda land, **more: cl.fisher(land, "sampled", seed=3, **more),
}


def agree(found, expected, tight=1e-12):
    assert (found - expected).norm() <= tight * expected.norm()


@pytest.mark.parametrize("engine", ["layered", "double-backward"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "torch_transformer", "own_tied"])
def test_every_product_is_the_same(name, engine):
    land = cl.Landscape(*MODELS[name]())
    stack = torch.randn(land.blocks.size, 3, dtype=torch.float64)
    for quantity in QUANTITIES.values():
        expected = quantity(land, engine="double-backward") @ stack
        A = quantity(land, engine=engine, keep=PLENTY)
        for _ in range(2):
            agree(A @ stack, expected)
            agree(A @ stack[:, 0], expected[:, 0])


def test_blocks_and_batches():
    model, _ = MODELS["llama"]()
    batches = [torch.randint(3, 11, (size, tokens)) for size, tokens in ((3, 5), (1, 7), (2, 4))]
    land = cl.Landscape(model, batches, micro_batch=2)
    for rows, columns in (("layer.0", "layer.1"), ("layer.1", "layer.0"), ("layer.1.attn.query", "embed")):
        expected = cl.hessian(land, engine="double-backward").block(rows, columns)
        for engine in ("layered", "double-backward"):
            found = cl.hessian(land, engine=engine, keep=PLENTY).block(rows, columns)
            v = torch.randn(found.shape[1], dtype=torch.float64)
            for _ in range(2):
                agree(found @ v, expected @ v)
            assert len(found.kept) > 1


class Counting(nets.GPT):
    runs = 0

    def forward(self, ids):
        Counting.runs += 1
        return super().forward(ids)


def test_the_model_is_not_run_again():
    net = Counting(11, 5, 8, 2, 2)
    land = cl.Landscape(net, torch.randint(0, 11, (3, 5)))
    H = cl.hessian(land, engine="double-backward", keep=PLENTY)
    v = torch.randn(land.blocks.size)
    H @ v
    before = Counting.runs
    first, second = H @ v, H @ v
    assert Counting.runs == before
    assert torch.equal(first, second)


@pytest.mark.parametrize("engine", ["layered", "double-backward"])
def test_layers_are_not_run_again(engine, monkeypatch):
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model, batch)
    H = cl.hessian(land, engine=engine, keep=PLENTY)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = H @ v

    def broken(*_, **__):
        raise AssertionError("a layer ran again")

    monkeypatch.setattr("transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward", broken)
    agree(H @ v, expected)


@pytest.mark.parametrize("engine", ["layered", "double-backward"])
@pytest.mark.parametrize("how", ["in place", "data", "replaced", "optimizer", "buffer"])
def test_changed_weights_are_noticed(how, engine):
    model, batch = MODELS["gpt2"]()
    model.register_buffer("gain", torch.ones(1, dtype=torch.float64))
    model.transformer.ln_f.register_forward_hook(lambda module, args, out: out * model.gain)
    land = cl.Landscape(model, batch)
    H = cl.hessian(land, engine=engine, keep=PLENTY)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    before = H @ v
    weight = model.transformer.h[1].mlp.c_fc.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.1)
        elif how == "data":  # moves no version counter
            weight.data[0, 0] += 0.5
        elif how == "replaced":
            model.transformer.h[1].mlp.c_fc.weight.data = weight * 1.1
        elif how == "buffer":
            model.gain.mul_(1.1)
    if how == "optimizer":
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
        weight.grad = None
    expected = cl.hessian(land, engine="double-backward") @ v
    assert (expected - before).norm() > 1e-3 * before.norm()
    agree(H @ v, expected)
    agree(H @ v, expected)


def test_as_many_layers_as_fit():
    net = nets.GPT(20, 8, 16, 4, 2, norm="pre").double()
    land = cl.Landscape(net, torch.randint(0, 20, (2, 8)))
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = cl.hessian(land, engine="double-backward") @ v
    kept = []
    whole = cl.hessian(land, engine="layered", keep=PLENTY)
    whole @ v
    for share in (0, 0.3, 0.6, 1):
        H = cl.hessian(land, engine="layered", keep=int(share * whole.kept.bytes))
        for _ in range(2):
            agree(H @ v, expected)
        assert H.kept.bytes <= H.kept.budget
        kept.append(len(H.kept))
    assert kept == [0, 1, 2, 4]


def test_what_is_no_number_of_bytes_is_refused():
    land = cl.Landscape(*MODELS["gpt2"]())
    for wrong in (-1, 0.5, "all"):
        with pytest.raises(ValueError, match="expected a number of bytes to keep"):
            cl.hessian(land, keep=wrong)
    with pytest.raises(ValueError, match="expected a precision out of exact"):
        cl.hessian(land, precision="half")
