"""Propagation along the stream of whole models: products against dense autograd, estimates against their own errors."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens.exact as exact
from curvlens.exact.of_net import embedded, of_net
from curvlens.exact.stream import Place, StreamCurvatures, find_steps, stream_propagation
from curvlens.landscape import Landscape
from curvlens.nets import GPT
from tests.models import MODELS


def gpt(norm="pre"):
    model = GPT(7, 4, 4, depth=2, heads=2, activation="gelu", norm=norm, bias=True, seed=1).double()
    batches = [torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    batches[1] = batches[1][:1, :3]  # uneven
    return Landscape(model, batches, "next-token")


def dense_stream(land, start, scalar):
    """The Hessian of a scalar of the model with its own hooks, by `torch.autograd.functional`, batch by batch."""
    blocks = []
    for piece in land.pieces():

        def value(delta, piece=piece):
            module = land.model.get_submodule(start.path)
            if start.side == "input":
                handle = module.register_forward_pre_hook(lambda m, args: (args[0] + delta, *args[1:]))
            else:
                handle = module.register_forward_hook(lambda m, args, out: out + delta)
            try:
                return scalar(piece)
            finally:
                handle.remove()

        ids = piece.args[0] if piece.args else piece.kwargs["input_ids"]
        zero = torch.zeros(*ids.shape, 4, dtype=torch.float64)
        size = zero.numel()
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            blocks.append(torch.autograd.functional.hessian(value, zero).view(size, size))
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_totals_are_the_hessian_by_the_stream(norm):
    land = gpt(norm)
    curvatures = StreamCurvatures(land)
    assert [s.name for s in curvatures.steps] == [
        "layer.0.attn",
        "layer.0.mlp",
        "layer.1.attn",
        "layer.1.mlp",
        "head",
    ]

    def loss(piece):
        return land.loss.value(land.output(land.parameters(), piece), piece.target) / land.weight

    for step in curvatures.steps:
        H = curvatures.total(step).dense()
        expected = dense_stream(land, step.start, loss)
        # 1e-12 of the largest entry: float64, the same derivatives by another route
        assert (H - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_what_is_not_created_is_passed_down(norm):
    """`total − created = Jᵀ Γ J` as a matrix, positive semidefinite at the head, where `Γ` is the loss's."""
    land = gpt(norm)
    curvatures = StreamCurvatures(land)
    for step, above in zip(curvatures.steps, curvatures.steps[1:], strict=False):
        total, created = curvatures.total(step).dense(), curvatures.created(step).dense()
        size = len(total)
        J = torch.cat([curvatures._pushed(step, e[None]) for e in torch.eye(size, dtype=torch.float64)]).T
        passed = J.T @ curvatures.total(above).dense() @ J
        assert (total - created - passed).abs().max() < 1e-12 * total.abs().max()
    head = curvatures.steps[-1]
    passed = curvatures.total(head).dense() - curvatures.created(head).dense()
    assert torch.linalg.eigvalsh(passed)[0] > -1e-13 * passed.abs().max()


def test_estimates_agree_with_dense_numbers_within_their_errors():
    land = gpt()
    curvatures = StreamCurvatures(land)
    found = stream_propagation(land, samples=64, tol=1e-10, seed=3)
    for step in curvatures.steps:
        dense = {"total": curvatures.total(step).dense(), "created": curvatures.created(step).dense()}
        dense["passed"] = dense["total"] - dense["created"]
        for name, matrix in dense.items():
            got = getattr(found[step.name], name)
            # five standard errors: 30 numbers, each beyond them once in two million draws; the seed is fixed
            assert abs(got.trace.value - matrix.trace()) <= 5 * got.trace.stderr
            assert abs(got.frobenius.value - matrix.norm()) <= 5 * got.frobenius.stderr
            values = torch.linalg.eigvalsh(matrix)
            size = values.abs().max()
            # an eigenvalue is as near as the residual, which was asked to be 1e-10 of the largest
            assert abs(got.largest.value - values[-1]) <= 1e-9 * size
            assert abs(got.smallest.value - values[0]) <= 1e-9 * size


def test_closed_forms_agree_with_products():
    """The same GPT as a chain of layers with jets, and as a model that is differentiated."""
    land = gpt()
    curvatures = StreamCurvatures(land)
    ids = list(land.batches)
    X = [x for batch in ids for x in embedded(land.model, batch)]
    Y = [torch.cat([row[1:], torch.tensor([-100])]) for batch in ids for row in batch]
    found = exact.propagation(of_net(land.model), (X, Y), loss="cross-entropy")
    for step in curvatures.steps[:-1]:
        for name, operator in (("total", curvatures.total(step)), ("created", curvatures.created(step))):
            got, values = getattr(found[step.name], name), torch.linalg.eigvalsh(operator.dense())
            expected = values.sum(), values.norm(), values[0], values[-1]
            for a, b in zip((got.trace, got.frobenius, got.smallest, got.largest), expected, strict=True):
                # 1e-11 of the norm: float64, two blocks deep
                assert abs(a - b) < 1e-11 * values.norm()


def test_batching_changes_nothing():
    one = gpt()
    ids = list(one.batches)
    split = Landscape(one.model, [*ids[0].split(1), ids[1]], "next-token")
    a = StreamCurvatures(one).total(find_steps(one.model)[0]).dense().trace()
    b = StreamCurvatures(split).total(find_steps(one.model)[0]).dense().trace()
    assert abs(a - b) < 1e-12 * abs(a)


def test_the_model_is_left_as_it_was():
    land = gpt()
    before = {name: p.clone() for name, p in land.model.state_dict().items()}
    stream_propagation(land, samples=2, eigenvalues=False)
    assert all(torch.equal(p, before[name]) for name, p in land.model.state_dict().items())
    assert all(p.grad is None for p in land.model.parameters())
    for module in land.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_models_of_transformers(name):
    model, batch = MODELS[name]()
    found = exact.propagation(model, batch, samples=2, eigenvalues=False)
    names = [step.name for step in found.sublayers]
    assert names[-1] == "head"
    assert sum(n.endswith((".attn", ".mlp")) for n in names) == len(names) - 1 == 4
    for step in found.sublayers:
        assert step.total.frobenius.value > 0
    assert "created: trace" in str(found)


class Parallel(nn.Module):
    """A block whose attention and MLP read the same stream."""

    def __init__(self, block):
        super().__init__()
        self.attn, self.mlp, self.norm = block.attn, block.mlp, block.norm1

    def forward(self, x):
        return x + self.attn(self.norm(x)) + self.mlp(self.norm(x))


def test_a_parallel_block_is_one_step():
    land = gpt()
    model = land.model
    model.blocks[0] = Parallel(model.blocks[0])
    parallel = Landscape(model, land.batches, "next-token")
    curvatures = StreamCurvatures(parallel)
    assert [s.name for s in curvatures.steps] == ["blocks.0", "layer.1.attn", "layer.1.mlp", "head"]
    assert curvatures.steps[0].end == Place("blocks.1", "input")


@pytest.mark.parametrize("name", ["t5", "gpt2_cross"])
def test_two_streams_are_refused(name):
    with pytest.raises(ValueError, match="expected one self-attention in each entry"):
        find_steps(MODELS[name]()[0])


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="expected a model with attention"):
        find_steps(nn.Linear(2, 2))
