import math

import pytest
import torch

from curvlens.estimate.copies import MISS, Chain, longest, risk
from curvlens.estimate.lanczos import eigsh
from curvlens.structured import Dense
from spectra import from_spectrum

VALUES = [5.0, 3, -4, 2, *torch.linspace(-1, 1, 60, dtype=torch.float64).tolist()]


def recurrence(values, w, steps):
    """Lanczos on a diagonal matrix from w: α and β."""
    values, basis, chain = torch.as_tensor(values, dtype=torch.float64), [w / w.norm()], []
    for _ in range(steps):
        image = values * basis[-1]
        alpha = (image @ basis[-1]).item()
        for _ in range(2):
            for q in basis:
                image = image - (image @ q) * q
        chain.append((alpha, image.norm().item()))
        basis.append(image / image.norm())
    return chain


@pytest.mark.parametrize(("at", "upper"), [(0, True), (2, False)])
def test_no_component_is_larger_than_the_bound(at, upper):
    """The Christoffel function at an eigenvalue is at least its mass, and its probability that of a normal."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = torch.randn(len(VALUES), generator=generator, dtype=torch.float64)
        w[at] *= 1e-4  # hidden from the chain
        found = risk(recurrence(VALUES, w, 6), VALUES[at], upper, len(VALUES))
        mass = (w[at] / w.norm()).square().item()
        assert math.erf(math.sqrt(len(VALUES) * mass / 2)) <= found * (1 + 1e-9) < 1


def test_the_risk_falls_with_every_product_and_shows_what_lies_beyond():
    w = torch.randn(len(VALUES), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chain = recurrence(VALUES, w, 12)
    risks = [risk(chain[:j], 8.0, True, len(VALUES)) for j in range(13)]
    assert risks == sorted(risks, reverse=True)
    assert risks[-1] < 1e-6
    assert risk(chain, 4.0, True, len(VALUES)) == 1  # an eigenvalue, 5, has shown itself beyond
    assert risk(chain, -8.0, False, len(VALUES)) < 1e-6
    assert risk([(1.0, 0.0)], 2.0, True, 10) == 0  # an invariant space


def test_copies_are_missed_no_more_often_than_said():
    """A second copy, half as large again as the smallest value wanted, over a bulk without a gap."""
    values = torch.tensor([6.0, 6.0, *(4 * 0.96**i for i in range(120))], dtype=torch.float64)
    H = Dense(torch.diag(values))
    missed = sum(eigsh(H, k=3, seed=seed).values[1].item() < 5.9 for seed in range(60))
    # of 60 at a probability of 0.1 at most: 13 or more once in 100
    assert missed <= 12


def test_a_gap_ends_the_search_early():
    H = from_spectrum([10, 9, 8, *(0.01 * x for x in torch.linspace(-1, 1, 400).tolist())])
    with_search, without = eigsh(H, k=3), eigsh(H, k=3, copies=False)
    assert 0 < with_search.products - without.products < longest(403)


def test_a_chain_that_was_cut_runs_to_its_full_length():
    chain = Chain(1, [1.0])
    chain.went_on(0.0, 0.1)
    chain.went_on(0.0, 0.1)
    chain.went_on(0.0, 0.1)
    assert chain.suffices([(1.25, True)], 100)
    chain.coefficients = None
    assert not chain.suffices([(1.25, True)], 100)
    for _ in range(longest(100)):
        chain.went_on(0.0, 0.1)
    assert chain.suffices([(1.25, True)], 100)
    assert MISS < 1
