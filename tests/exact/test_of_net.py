"""The closed form of a whole GPT against automatic differentiation of the landscape, block by block."""

import pytest
import torch

import curvlens.exact as exact
from curvlens import curvature, nets
from curvlens.exact.of_net import embedded, of_linear_mlp, of_net
from curvlens.landscape import Landscape
from tests.exact.jets import relative


def gpt(**options):
    net = nets.GPT(5, 4, 4, depth=2, heads=2, seed=2, **options).double()
    generator = torch.Generator().manual_seed(3)
    for name, p in net.named_parameters():  # norms and biases away from 1 and 0
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        assert p.dtype == torch.float64, name
    return net, torch.randint(0, 5, (3, 4), generator=generator)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "pre", "activation": "gelu", "bias": True},
        {"norm": "post", "activation": "gelu", "tied": True},
        {"norm": "none", "activation": "relu", "causal": False},
        {"norm": "pre", "activation": None, "attention": "linear", "key_width": 2},
    ],
    ids=["pre", "post", "plain", "linear"],
)
def test_a_whole_gpt(options):
    net, ids = gpt(**options)
    land = Landscape(net, ids, "next-token")
    model = of_net(net)
    Y = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    R = exact.hessian(model, embedded(net, ids), Y, loss="cross-entropy")
    parts = {
        "total": curvature.hessian(land),
        "outer": curvature.gauss_newton(land),
        "functional": curvature.functional(land),
    }
    for name, autodiff in parts.items():
        rows = autodiff.codomain.select("layer.*")
        own = R.blocks.select("layer.*")
        assert set(rows.names) == set(own.names)
        order = [rows.names.index(name) for name in own.names]
        found = getattr(R, name).block(own, own).dense()
        expected = autodiff.block(rows, rows).dense()
        starts = torch.arange(rows.size).split([block.size for block in rows])
        at = torch.cat([starts[i] for i in order])
        # 1e-12: float64, two blocks deep
        assert relative(found, expected[at][:, at]) < 1e-12


def test_a_linear_mlp():
    net = nets.LinearMLP([3, 2, 4]).double()
    X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    H = curvature.hessian(Landscape(net, (X, Y), "mse")).dense()
    found = exact.hessian(of_linear_mlp(net), X, Y).total.dense()
    assert relative(found, H) < 1e-13
