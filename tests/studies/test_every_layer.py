"""Blocks of lower layers, by pulled-back rows and by products, against automatic differentiation."""

import pytest
import torch

from curvlens import Landscape, functional, gauss_newton, hessian
from curvlens.exact.of_net import embedded, of_net
from curvlens.studies import every_layer
from curvlens.studies.embedding_scale import addition, embed, network
from curvlens.studies.top_layer import next_tokens


def problem():
    net = network(4, seed=2, device="cpu", depth=2, norm="pre")
    embed(net, 0.5, seed=2)
    ids, labels = addition(3, seed=2, device="cpu")
    labels[1, 13:] = -100
    return net, ids, labels


def test_norms_of_lower_layers():
    net, ids, labels = problem()
    names = [f"layer.{i}.attn.{kind}" for i in (0, 1) for kind in ("query", "value")]
    made = every_layer.diagonal_norms(of_net(net), embedded(net, ids), next_tokens(labels), names)
    land = Landscape(net, (ids, labels), "next-token")
    for name in names:
        for ours, H in zip(made[name], (gauss_newton(land), functional(land), hessian(land)), strict=True):
            assert ours == pytest.approx(H.block(name).dense().norm().item(), rel=1e-10)


def test_norms_off_the_diagonal_by_either_product():
    net, ids, labels = problem()
    names = ["layer.0.attn.query", "layer.1.mlp.up"]
    rows = every_layer.outer_rows(of_net(net), embedded(net, ids), next_tokens(labels), names)
    a, b = rows.values()
    truth = gauss_newton(Landscape(net, (ids, labels), "next-token")).block(*names).dense().norm().item()
    assert len(a) > a.shape[1]  # by the matrix of weights
    assert every_layer.outer_norm(a, b) == pytest.approx(truth, rel=1e-10)
    few = slice(0, 10)
    assert every_layer.outer_norm(a[few], b[few]) == pytest.approx(
        (a[few].T @ b[few]).norm().item(), rel=1e-10
    )


def test_mean_squared_error():
    net, ids, _ = problem()
    Y = torch.randn(*ids.shape, 12, dtype=torch.float64)
    rows = every_layer.outer_rows(of_net(net), embedded(net, ids), Y, ["layer.0.attn.key"], "mse")
    C = rows["layer.0.attn.key"]
    truth = gauss_newton(Landscape(net, (ids, Y), "mse")).block("layer.0.attn.key").dense()
    ours = C.T @ C
    ours = ours * (truth.norm() / ours.norm())  # the two means of squares differ by a constant factor
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)


def test_large_blocks_are_estimated(monkeypatch):
    net, ids, labels = problem()
    arguments = (of_net(net), embedded(net, ids), next_tokens(labels), ["layer.0.attn.value"])
    exact = every_layer.diagonal_norms(*arguments)
    monkeypatch.setattr(every_layer, "SMALL", 0)
    estimated = every_layer.diagonal_norms(*arguments, samples=400)
    # each squared norm has a relative error of about sqrt(2 / 400) at the most; five of them
    for a, b in zip(exact["layer.0.attn.value"], estimated["layer.0.attn.value"], strict=True):
        assert b == pytest.approx(a, rel=0.18)
