"""The closed form of the top attention layer against automatic differentiation of the whole network."""

from itertools import combinations_with_replacement

import pytest
import torch

from curvlens import Landscape, functional, gauss_newton, hessian
from curvlens.structured.grid import frobenius
from curvlens.studies.embedding_scale import addition, embed, exponent, local_slopes, network
from curvlens.studies.top_layer import of_network


@pytest.mark.parametrize("kind", [
    {"norm": "none"},
    {"norm": "pre", "depth": 2, "heads": 2},
    {"norm": "post", "activation": "gelu"},
    {"attention": "linear", "activation": None},
])  # fmt: skip
def test_norms_of_all_blocks(kind):
    net = network(4, seed=1, device="cpu", **kind)
    embed(net, 0.7, seed=1)
    ids, labels = addition(3, seed=1, device="cpu")
    labels[0, 14:] = -100  # sequences count by their scored tokens
    made = of_network(net, ids, labels)
    land = Landscape(net, (ids, labels), "next-token")
    top, path = len(net.blocks) - 1, f"blocks.{len(net.blocks) - 1}.attn"
    splits = {
        ("outer", "logits"): gauss_newton(land),
        ("functional", "logits"): functional(land),
        ("outer", "output"): gauss_newton(land, at=path),
        ("functional", "output"): functional(land, at=path),
        ("total", "logits"): hessian(land),
    }
    for (part, split), H in splits.items():
        for row, column in (("query", "query"), ("query", "key"), ("value", "key"), ("value", "value")):
            block = H.block(f"layer.{top}.attn.{row}", f"layer.{top}.attn.{column}").dense()
            ours = made.norm(part, row, column, split)
            # sums of 9 scored tokens in float64; autodiff loses what it subtracts of the whole
            assert abs(ours - block.norm().item()) <= 1e-10 * max(1e-3, block.norm().item()), (
                part,
                split,
                row,
            )


def test_tokens_left_out_add_nothing():
    """Where tokens are wider than sequences are long, sums over keys take the place of those over queries."""
    net = network(24, seed=1, device="cpu")
    made = of_network(net, *addition(2, seed=1, device="cpu"))
    for part in ("outer", "functional", "total"):
        for row, column in combinations_with_replacement(("query", "key", "value", "out"), 2):
            whole = frobenius(made.operator(part).block(row, column)).item()
            assert made.norm(part, row, column) == pytest.approx(whole, rel=1e-12)


def test_scaling_the_embeddings():
    net = network(4, seed=0, device="cpu")
    embed(net, 0.1, seed=3)
    small = [net.token.weight.clone(), net.position.weight.clone()]
    embed(net, 1.0, seed=3)
    torch.testing.assert_close(net.token.weight * 0.1, small[0])
    torch.testing.assert_close(net.position.weight * 0.1, small[1])


def test_exponents():
    scales = (0.01, 0.1, 1.0, 10.0)
    norms = [s**2 for s in scales[:3]] + [1e9]
    assert abs(exponent(scales, norms, 0, 1) - 2) < 1e-12
    assert local_slopes(scales, norms)[:2] == pytest.approx([2, 2])
