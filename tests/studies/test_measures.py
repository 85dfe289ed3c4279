"""What studies measure beside the package's own estimates, each against another way to the same number."""

import math

import pytest
import torch

import curvlens as cl
from curvlens.studies import (
    block_map,
    images,
    recurrent_layer,
    spectra_of_blocks,
    third_order,
    through_training,
)
from curvlens.studies.embedding_scale import addition, network
from curvlens.studies.landscape_of_digits import places
from curvlens.studies.sgd_and_adam import QUADRATICS, quadratic, shown


def test_gradient_lies_in_the_order_of_the_hessian():
    net = network(4, 0, "cpu", norm="pre")
    ids, labels = addition(3, 1, "cpu")
    land = cl.Landscape(net, [(ids, labels)], loss="next-token")
    found, _ = through_training.described(net, (ids, labels), top=2)
    space = land.blocks.select("layer.0.*")
    ours = through_training.gradient(net, ids, labels, space.names)
    whole = dict(zip(land.blocks.names, land.gradient().split([b.size for b in land.blocks]), strict=True))
    torch.testing.assert_close(ours, torch.cat([whole[name] for name in space.names]))
    # the numbers of the closed form are those of autodiff
    H = cl.hessian(land).block(space).dense()
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    top = vectors[:, values.abs().argsort(descending=True)[:2]]
    assert found["sharpness"] == pytest.approx(values[-1].item(), rel=1e-10)
    assert found["trace"] == pytest.approx(values.sum().item(), rel=1e-10)
    assert found["gradient in top"] == pytest.approx(
        ((top.mT @ ours).norm() / ours.norm()).item() ** 2, rel=1e-8
    )


@pytest.mark.parametrize("kind", images.KINDS)
def test_classifiers_are_drawn_anew_from_their_seed_and_learn(kind):
    size = {"channels": 4} if kind == "CNN" else {"width": 8}
    x, y = images.handwritten(0)
    assert x.shape == (1797, 8, 8)
    assert 0 <= x.min() < x.max() == 1
    net, again, other = (images.classifier(kind, seed, **size) for seed in (0, 0, 1))
    assert net(x[:3]).shape == (3, 10)
    torch.testing.assert_close(net(x[:3]), again(x[:3]), rtol=0, atol=0)
    assert not torch.equal(net(x[:3]), other(x[:3]))
    losses = images.train(net, x, y, 60, torch.optim.Adam(net.parameters(), lr=1e-2), seed=0)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_divergence_of_spectra_is_zero_for_the_same_and_ln_2_for_disjoint_ones():
    values = torch.linspace(0.5, 1, 50, dtype=torch.float64)
    (_, same, scaled, disjoint), *_ = spectra_of_blocks.divergences(
        [values, values.clone(), values / 1000, -values], "size and shape"
    )
    assert same == 0
    assert disjoint == pytest.approx(math.log(2), rel=1e-6)
    assert scaled > 0.5
    (_, shape), _ = spectra_of_blocks.divergences([values, values / 1000], "shape")
    assert shape == pytest.approx(0, abs=1e-12)  # only the size is another


@pytest.mark.parametrize("name", QUADRATICS)
def test_quadratics_converge_at_the_rate_of_their_condition(name):
    steps = 40
    made = quadratic(QUADRATICS[name], steps, seed=3)
    assert made["descent"][0] == pytest.approx(5000, rel=1e-9)
    kappa = made["descent"][0]
    for at, loss in zip(shown(steps), made["losses, descent"], strict=True):
        assert loss <= ((kappa - 1) / (kappa + 1)) ** (2 * at) * (1 + 1e-9)


def test_laws_of_the_third_derivative():
    q, k, v = third_order.NAMES
    assert third_order.laws((q, q, q)) == {"functional": 7, "mixed": 8}
    assert third_order.laws((q, k, v)) == {"functional": 3, "mixed": 4}
    assert third_order.laws((q, v, v)) == {"functional": None, "mixed": 4}
    assert third_order.laws((v, v, v)) == {"functional": None, "mixed": None}


def test_a_state_space_that_forgets_nothing_is_linear_attention():
    generator = torch.Generator().manual_seed(0)
    W = {n: torch.randn(3, 3, generator=generator, dtype=torch.float64) for n in ("query", "key", "value")}
    X = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    Q, K, V = (X @ W[n] for n in ("query", "key", "value"))
    torch.testing.assert_close(recurrent_layer.ungated(W, X), (Q @ K.mT).tril() @ V)
    # the gate closed: a step of almost nothing, which neither forgets nor writes
    closed = {**W, "gate": torch.full((3,), -1e3, dtype=torch.float64)}
    assert recurrent_layer.selective(closed, X.abs()).abs().max() < 1e-9


def test_places_of_a_curve_are_distinct_and_reach_both_ends():
    for count in (2, 15, 511):
        found = places(count)
        assert found[0] == 0
        assert found[-1] == count - 1
        assert found == sorted(set(found))


def test_shares_of_a_block_add_up():
    generator = torch.Generator().manual_seed(0)
    pairs = torch.rand(10, 10, generator=generator, dtype=torch.float64)
    pairs = (pairs + pairs.mT).tolist()
    names = list(block_map.GROUPS)
    groups = (block_map.ATTENTION, block_map.NORMS, block_map.FEED)
    parts = [block_map.share(pairs, a, b, names) for i, a in enumerate(groups) for b in groups[i:]]
    assert sum(parts) == pytest.approx(1)
