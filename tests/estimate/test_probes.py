import math

import pytest
import torch

from curvlens.blocks import Blocks
from curvlens.estimate.probes import GROUP, KINDS, probes

BLOCKS = Blocks.of({"a": (3, 5), "b": (70,), "c": (129,)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_depends_on_its_index_alone(kind):
    together = probes(BLOCKS, range(9), seed=3, kind=kind)
    for index in (0, 4, 8):
        assert torch.equal(probes(BLOCKS, [index], seed=3, kind=kind)[0], together[index])
    assert torch.equal(probes(BLOCKS, [7, 2], seed=3, kind=kind), together[[7, 2]])
    assert not torch.equal(probes(BLOCKS, range(9), seed=4, kind=kind), together)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_a_block_of_a_probe_is_the_probe_of_the_block(kind):
    whole = probes(BLOCKS, range(3), kind=kind)
    part = probes(BLOCKS.select("b"), range(3), kind=kind)
    assert torch.equal(whole[:, BLOCKS.ranges["b"]], part)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_dtypes_round_the_same_numbers(kind):
    double = probes(BLOCKS, range(3), kind=kind)
    assert torch.equal(probes(BLOCKS, range(3), kind=kind, dtype=torch.float32), double.float())


def test_signs_are_signs_and_fair():
    signs = probes(Blocks.of({"a": (1000,)}), range(200))
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    # means of 200 000 signs, of neighbouring pairs, and of pairs of probes: within five standard deviations
    for mean in (signs.mean(), (signs[:, 1:] * signs[:, :-1]).mean(), (signs[1:] * signs[:-1]).mean()):
        assert abs(mean) < 5 / math.sqrt(200_000)


def test_gaussians_have_the_moments_of_a_normal():
    normal = probes(Blocks.of({"a": (1000,)}), range(200), kind="gaussian")
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((normal**power).mean() - moment) < 5 * math.sqrt(variance / 200_000)


def test_orthogonal_probes_are_orthogonal_within_a_group():
    stack = probes(BLOCKS, range(GROUP + 2), kind="orthogonal")
    n = BLOCKS.size
    # Gram-Schmidt twice: orthogonal to rounding
    torch.testing.assert_close(
        stack[:GROUP] @ stack[:GROUP].T, n * torch.eye(GROUP).double(), atol=1e-10, rtol=0
    )
    assert (stack[GROUP:] @ stack[0]).abs().min() > 1e-3


def test_orthogonal_probes_resolve_the_identity():
    small = Blocks.of({"a": (6,)})
    stack = probes(small, range(12), kind="orthogonal")
    for group in (stack[:6], stack[6:]):
        torch.testing.assert_close(group.T @ group / 6, torch.eye(6).double(), atol=1e-13, rtol=0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of the probes rademacher, gaussian, orthogonal"):
        probes(BLOCKS, [0], kind="sobol")
