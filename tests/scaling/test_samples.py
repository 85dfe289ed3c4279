import pytest
import torch

import curvlens as cl
from curvlens.scaling.samples import Samples
from tests.scaling.lands import one_by_one, ragged


@pytest.fixture(scope="module")
def known():
    land, ids, labels = ragged()
    return land, Samples(land), one_by_one(land, ids, labels)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_losses_and_weights_of_every_sample(known):
    land, samples, (losses, weights, _, _) = known
    assert len(samples) == 7  # one of eight has no scored token
    assert samples.weights.tolist() == weights.tolist()
    close(samples.losses(), losses)
    close((samples.losses() * weights).sum() / weights.sum(), land.value())


def test_losses_elsewhere_leave_the_model_alone(known):
    land, samples, _ = known
    before = {name: p.clone() for name, p in land.model.named_parameters()}
    step = torch.randn(land.blocks.size, dtype=torch.float64)
    moved = samples.losses(0.1 * step)
    assert all(torch.equal(before[name], p) for name, p in land.model.named_parameters())
    with torch.no_grad():
        for name, change in land.blocks.to_parameters(0.1 * step).items():
            dict(land.model.named_parameters())[name].add_(change)
        there = samples.losses()
        for name, p in land.model.named_parameters():
            p.copy_(before[name])
    close(moved, there)


def test_derivatives_along_directions(known):
    land, samples, (_, _, gradients, hessians) = known
    basis, _ = torch.linalg.qr(torch.randn(land.blocks.size, 3, dtype=torch.float64))
    first, second = samples.within(basis)
    close(first, gradients @ basis)
    close(second, torch.einsum("pa,ipq,qb->iab", basis, hessians, basis))
    one, two = samples.along(basis[:, 0])
    close(one, first[:, 0])
    close(two, second[:, 0, 0])


def test_gradients_one_after_the_other(known):
    _, samples, (_, _, gradients, _) = known
    close(torch.stack(list(samples.gradients())), gradients)


def test_norms_are_those_of_the_dense_hessians(known):
    _, samples, (_, _, _, hessians) = known
    true = torch.linalg.matrix_norm(hessians, ord=2)
    found = samples.norms(tol=1e-6)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=0)
    assert (found >= true * (1 - 1e-12)).all()
    assert len(samples.norms(3)) == 3


def test_micro_batches_change_nothing(known):
    land, samples, _ = known
    small = Samples(cl.Landscape(land.model, land.batches, loss="next-token", micro_batch=2))
    direction = torch.randn(land.blocks.size, dtype=torch.float64)
    for a, b in zip(samples.along(direction), small.along(direction), strict=True):
        close(a, b)
    close(samples.losses(), small.losses())


def test_a_model_without_curvature_has_zeros():
    model = torch.nn.Linear(3, 1, bias=False).double()
    land = cl.Landscape(
        model, (torch.ones(4, 3).double(), torch.ones(4, 1).double()), lambda f, y: (f - y)[:, 0]
    )
    first, second = Samples(land).along(torch.ones(3, dtype=torch.float64))
    assert torch.equal(first, torch.full((4,), 3.0, dtype=torch.float64))
    assert not second.any()


class Contrastive(cl.losses.Loss):
    name = "contrastive"

    def value(self, output, target):
        return torch.logsumexp(output @ output.T, dim=1).sum()

    def count(self, target):
        return len(target)


def test_a_loss_that_compares_samples_is_refused():
    model = torch.nn.Linear(3, 2).double()
    land = cl.Landscape(model, (torch.randn(4, 3).double(), torch.zeros(4)), Contrastive())
    with pytest.raises(ValueError, match="expected a loss that is a sum over samples"):
        Samples(land)
