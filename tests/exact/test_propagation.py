"""The recursion against the loss's own Hessian by the input of each sublayer, by autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian, jacobian

from curvlens.exact.block import stack
from curvlens.exact.linear import Linear
from curvlens.exact.norm import LayerNorm
from curvlens.exact.propagation import flattened, propagation
from tests.exact.test_block import block, plain_attention, plain_mlp, plain_norm, randn


def plain_steps(model, placement, heads):
    """The steps of a stack of two blocks with norm and head, as plain functions."""
    w = model.weights
    steps = {}
    for p in ("layer.0.", "layer.1."):

        def norm(x, name, p=p):
            return plain_norm(w, x, p + name, 1e-5)

        def attn(x, p=p):
            return plain_attention(w, x, heads, False, f"{p}attn.")

        def mlp(x, p=p):
            return plain_mlp(w, x, "gelu", f"{p}mlp.")

        if placement == "pre":
            steps[f"{p}attn"] = lambda x, norm=norm, attn=attn: x + attn(norm(x, "norm1"))
            steps[f"{p}mlp"] = lambda x, norm=norm, mlp=mlp: x + mlp(norm(x, "norm2"))
        else:
            steps[f"{p}attn"] = lambda x, attn=attn: x + attn(x)
            steps[f"{p}norm1"] = lambda x, norm=norm: norm(x, "norm1")
            steps[f"{p}mlp"] = lambda x, mlp=mlp: x + mlp(x)
            steps[f"{p}norm2"] = lambda x, norm=norm: norm(x, "norm2")
    steps["norm"] = lambda x: plain_norm(w, x, "norm", 1e-5)
    steps["head"] = lambda x: x @ w["head"] + w["head.bias"]
    return steps


def extent(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return matrix.trace(), matrix.norm(), values[0], values[-1]


def same(got, matrix, size):
    """1e-10 of the largest matrix's norm: two blocks deep, and norms of rows of three entries."""
    for a, b in zip((got.trace, got.frobenius, got.smallest, got.largest), extent(matrix), strict=True):
        assert abs(a - b) < 1e-10 * size


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_sublayer_of_every_block(placement):
    blocks = [block(placement=placement, heads=2, seed=s) for s in (0, 100)]
    head = Linear(randn(3, 4, seed=9), randn(4, seed=10))
    model = stack(blocks, LayerNorm(randn(3, seed=7), randn(3, seed=8)), head)
    X, Y = randn(3, 3), torch.tensor([1, -100, 3])
    found = propagation(model, (X, Y), loss="cross-entropy")
    steps = plain_steps(model, placement, 2)
    assert [s.name for s in found.sublayers] == list(steps)
    x, inputs = X, []
    for step in steps.values():
        inputs.append(x)
        x = step(x)
    for i, (name, step) in enumerate(steps.items()):
        above = list(steps.values())[i:]

        def loss(v, above=above):
            x = v.view(3, -1)
            for f in above:
                x = f(x)
            return F.cross_entropy(x, Y)

        v = inputs[i].flatten()
        z = step(inputs[i]).flatten()
        total, J = hessian(loss, v), jacobian(lambda v, step=step: step(v.view(3, -1)).flatten(), v)
        Gamma = hessian(lambda z, loss=loss, above=above: loss(z, above[1:]), z)
        passed = J.T @ Gamma @ J
        same(found[name].total, total, total.norm())
        same(found[name].passed, passed, total.norm())
        same(found[name].created, total - passed, total.norm())
    same(found.output, hessian(lambda z: F.cross_entropy(z.view(3, -1), Y), x.flatten()), 1)


def test_parts_of_a_step():
    """Norm and attention within one skip: what each creates adds up, and the norm's alone is what it would be."""
    layer = block(placement="pre")
    X, Y = randn(4, 3), randn(4, 3, seed=1)
    step = propagation(layer, (X, Y))["attn"]
    assert list(step.parts) == ["norm1", "attn"]
    # the traces add, exactly up to rounding
    assert (
        abs(sum(p.trace for p in step.parts.values()) - step.created.trace) < 1e-12 * step.created.frobenius
    )
    w = layer.weights
    steps = dict(flattened(layer))
    Y1 = (steps["attn"](X)).detach().requires_grad_()
    g = torch.autograd.grad(((steps["mlp"](Y1) - Y) ** 2).mean(), Y1)[0]
    n = plain_norm(w, X, "norm1", 1e-5).requires_grad_()
    g_norm = torch.autograd.grad((g * plain_attention(w, n, 1, False, "attn.")).sum(), n)[0]
    by_norm = hessian(lambda v: (g_norm * plain_norm(w, v.view(4, 3), "norm1", 1e-5)).sum(), X.flatten())
    # 1e-11: norms of rows of three entries
    same(step.parts["norm1"], by_norm, by_norm.norm() / 10)


def test_uneven_sequences_are_blocks_of_one_matrix():
    layer = block(placement="post", heads=2)
    X, Y = [randn(4, 3), randn(2, 3, seed=1)], [randn(4, 3, seed=2), randn(2, 3, seed=3)]
    both = propagation(layer, (X, Y))
    # each sequence alone weighs twice what it weighs among two
    alone = [propagation(layer, (x, y)) for x, y in zip(X, Y, strict=True)]
    for step in both.sublayers:
        for kind in ("passed", "created", "total"):
            got, parts = getattr(step, kind), [getattr(a[step.name], kind) for a in alone]
            size = max(p.frobenius for p in parts)
            # 1e-12: the same sums, halved
            assert abs(got.trace - sum(p.trace for p in parts) / 2) < 1e-12 * size
            assert abs(got.largest - max(p.largest for p in parts) / 2) < 1e-12 * size
            assert abs(got.smallest - min(p.smallest for p in parts) / 2) < 1e-12 * size


def test_printed():
    layer = block(placement="post")
    text = str(propagation(layer, (randn(2, 3), randn(2, 3, seed=1))))
    for name in ("passed down", "created", "attn", "norm1", "mlp", "norm2", "loss"):
        assert name in text


def test_unknown_sublayer():
    found = propagation(block(placement="none"), (randn(2, 3), randn(2, 3, seed=1)))
    with pytest.raises(KeyError, match="expected a sublayer among"):
        found["norm1"]
