"""curvlinops as a further channel: its operators and ours are one map, in both directions."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import curvlens as cl
import models
from curvlens.blocks import Blocks
from curvlens.structured import Dense

curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)

TOLERANCE = 1e-12  # rounding of sums of some hundred terms in float64, relative to the largest entry


class Attention(nn.Module):
    """A fused query, key and value in two heads, stored as `[out, in]`, and no norm."""

    def __init__(self):
        super().__init__()
        self.attn, self.head = models.CausalSelfAttention(), nn.Linear(models.WIDTH, 3)

    def forward(self, x):
        return self.head(self.attn(x)).flatten(0, 1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.inner(x)))).flatten(0, 1)


def both(kind):
    """A landscape of two uneven batches, and its Hessian and Gauss-Newton matrix as curvlinops has them."""
    generator = torch.Generator().manual_seed(1)
    model = models.randomise(kind().double(), generator)
    batches = [
        (
            torch.randn(samples, 3, models.WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (3 * samples,), generator=generator),
        )
        for samples in (2, 1)
    ]
    theirs = [
        kind(
            model,
            nn.CrossEntropyLoss(),
            list(model.parameters()),
            batches,
            num_data=9,
            batch_size_fn=lambda x: x.shape[0] * x.shape[1],
            check_deterministic=False,
        )
        for kind in (curvlinops.HessianLinearOperator, curvlinops.GGNLinearOperator)
    ]
    return cl.Landscape(model, batches, loss="cross-entropy"), *theirs


@pytest.fixture(scope="module")
def attention():
    return both(Attention)


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def dense(operator):
    """The matrix of one of curvlinops."""
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


def positions(blocks, among=None):
    """Where each entry of the blocks lies in their concatenated parameters, or in those of more blocks."""
    starts, start = {}, 0
    for name, shape in (among or blocks).parameters.items():
        starts[name], start = start, start + torch.Size(shape).numel()
    return torch.cat([starts[b.source.parameter] + b.source.entries() for b in blocks])


def test_both_compute_the_same_matrices(attention):
    land, *theirs = attention
    for ours, other in zip((cl.hessian(land), cl.gauss_newton(land)), theirs, strict=True):
        assert_close(dense(cl.as_curvlinops(ours)), dense(other))
        assert_close(cl.from_curvlinops(other, land.blocks).dense(), ours.dense())


def test_entries_go_from_the_storage_to_the_orientation_of_blocks(attention):
    land, theirs, _ = attention
    order = positions(land.blocks)
    assert not order.equal(torch.arange(len(order)))
    assert_close(cl.from_curvlinops(theirs, land.blocks).dense(), dense(theirs)[order][:, order])


def test_lists_of_tensors(attention):
    land, theirs, _ = attention
    ours = cl.as_curvlinops(cl.hessian(land))
    generator = torch.Generator().manual_seed(2)
    for lead in ((), (3,)):
        x = [
            torch.randn(*shape, *lead, generator=generator, dtype=torch.float64)
            for shape in land.blocks.parameters.values()
        ]
        for found, expected in zip(ours @ x, theirs @ x, strict=True):
            assert_close(found, expected)


def test_they_compose_with_those_of_curvlinops(attention):
    land, theirs, _ = attention
    ours = cl.as_curvlinops(cl.hessian(land))
    assert (ours.dtype, ours.device, ours.SELF_ADJOINT) == (torch.float64, torch.device("cpu"), True)
    assert_close(dense(ours + theirs), 2 * dense(theirs))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ours.shape[1], 2, generator=generator, dtype=torch.float64).numpy()
    assert_close(torch.as_tensor(ours.to_scipy() @ x), torch.as_tensor(theirs.to_scipy() @ x))


def test_a_round_trip_changes_nothing(attention):
    land, theirs, _ = attention
    ours = cl.hessian(land)
    back = cl.from_curvlinops(cl.as_curvlinops(ours), land.blocks, parameters=land.blocks.parameters)
    assert back.symmetric
    assert back.domain == ours.domain
    assert back.dense().equal(ours.dense())
    assert dense(cl.as_curvlinops(cl.from_curvlinops(theirs, land.blocks))).equal(dense(theirs))


def test_without_blocks_each_tensor_is_one(attention):
    land, theirs, _ = attention
    found = cl.from_curvlinops(theirs)
    assert found.domain == Blocks.of(land.blocks.parameters)
    assert found.dense().equal(dense(theirs))
    assert cl.from_curvlinops(2.0 * theirs).domain.names == ("0", "1", "2", "3", "4", "5")


def test_heads_keep_their_rows_and_columns_alone(attention):
    land, theirs, _ = attention
    rows = land.blocks.select("attn.key.head.1", "head")
    columns = land.blocks.select("attn.query.head.0")
    whole, at, across = dense(theirs), positions(rows, land.blocks), positions(columns, land.blocks)
    assert_close(cl.from_curvlinops(theirs, rows).dense(), whole[at][:, at])
    there = cl.as_curvlinops(cl.hessian(land).block(rows, columns))
    expected = torch.zeros(there.shape, dtype=torch.float64)
    expected[torch.meshgrid(positions(rows), positions(columns), indexing="ij")] = whole[at][:, across]
    assert_close(dense(there), expected)
    assert not there.SELF_ADJOINT
    assert_close(dense(there.adjoint()), expected.T)


def test_operators_that_belong_to_no_model():
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    ours = Dense(matrix, Blocks.of({"a": (2,), "b": (3,)}), Blocks.of({"c": (2, 3)}))
    there = cl.as_curvlinops(ours)
    assert dense(there).equal(matrix)
    assert [tuple(part.shape) for part in there @ [torch.ones(2, 3, dtype=torch.float64)]] == [(2,), (3,)]
    back = cl.from_curvlinops(there)
    assert back.dense().equal(matrix)
    assert back.T.dense().equal(matrix.T)
    with pytest.raises(ValueError, match="same rows and columns for blocks"):
        cl.from_curvlinops(there, Blocks.of({"c": (2, 3)}))


def test_blocks_must_be_of_the_parameters(attention):
    land, theirs, _ = attention
    with pytest.raises(ValueError, match="expected the names of the operator's parameters"):
        cl.from_curvlinops(2.0 * theirs, land.blocks)
    with pytest.raises(ValueError, match="expected blocks of the operator's parameters"):
        cl.from_curvlinops(theirs, Blocks.of({"head.weight": (4, 4)}))
    with pytest.raises(ValueError, match="expected 6 distinct names"):
        cl.from_curvlinops(theirs, land.blocks, parameters=["head.weight"])
    names = list(land.blocks.parameters)
    doubled = cl.from_curvlinops(2.0 * theirs, land.blocks, parameters=names)
    assert_close(doubled.dense(), 2 * cl.hessian(land).dense())


def test_where_curvlinops_differs_the_finite_difference_is_ours():
    """`jvp(jacrev)`, which curvlinops uses, is wrong in the rows of a LayerNorm's learned weight."""
    land, theirs, gauss_newton = both(Normed)
    ours, other = cl.hessian(land).dense(), cl.from_curvlinops(theirs, land.blocks).dense()
    rows = land.blocks.positions(Blocks([land.blocks["norm.weight"]]))
    outside = torch.ones(len(ours), dtype=torch.bool)
    outside[rows] = False
    assert_close(other[outside], ours[outside])
    assert_close(cl.from_curvlinops(gauss_newton, land.blocks).dense(), cl.gauss_newton(land).dense())

    measured = finite_differences(land)
    scale = measured.abs().max()
    # truncation is h⁴/30 times a fifth derivative of the order of 1e5 here, rounding 1e-16/h; h = 2e-4
    assert (ours - measured).abs().max() <= 1e-10 * scale
    if fault := (other - measured)[rows].abs().max() > 1e-3 * scale:
        assert not other[rows].allclose(other[:, rows].T)
    # a torch without the fault makes all rows agree; nothing lies between
    assert fault or (other - measured).abs().max() <= 1e-10 * scale


def finite_differences(land, h=2e-4):
    """The Jacobian of the gradient by central differences of fourth order, from a landscape's parameters alone."""
    gradient = torch.func.grad(
        lambda parameters: (
            sum(land.loss.value(land.output(parameters, piece), piece.target) for piece in land.pieces())
            / land.weight
        )
    )
    blocks, columns = land.blocks, []
    at = blocks.from_parameters(land.parameters())

    def flat(step):
        return blocks.from_parameters(gradient(blocks.to_parameters(at + step)))

    for unit in h * torch.eye(blocks.size, dtype=torch.float64):
        columns.append((8 * (flat(unit) - flat(-unit)) - (flat(2 * unit) - flat(-2 * unit))) / (12 * h))
    return torch.stack(columns, dim=1)


def test_curvlens_alone_does_not_import_curvlinops():
    run = "import sys, curvlens; assert 'curvlinops' not in sys.modules"
    subprocess.run([sys.executable, "-c", run], check=True)


def test_without_curvlinops_the_message_says_how_to_install_it():
    run = (
        "import sys, curvlens; sys.modules['curvlinops'] = None\n"
        "try: curvlens.as_curvlinops\n"
        "except ImportError as error: assert 'pip install curvlens[curvlinops]' in str(error), error\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", run], check=True)
