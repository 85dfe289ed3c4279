import pytest
import torch

import curvlens.exact as exact


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laws(layer, **options):
    X, Y = randn(6, 4), randn(6, layer.outputs, seed=1)
    return {(law.part, law.row, law.column): law for law in exact.growth(layer, X, Y, **options)}


LAYERS = {
    "softmax": exact.SelfAttention(randn(4, 3), randn(4, 3, seed=1), randn(4, 5, seed=2)),
    "linear": exact.SelfAttention(randn(4, 3), randn(4, 3, seed=1), randn(4, 5, seed=2), activation="linear"),
    "single": exact.SelfAttention(W_QK=randn(4, 4), W_V=randn(4, 5, seed=2)),
    "two heads": exact.SelfAttention(randn(2, 4, 3), randn(2, 4, 3, seed=1), randn(2, 4, 5, seed=2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_exponents_of_small_tokens_are_those_predicted(name):
    """Equation 5 and Table 1, with the gradient at the output held: as σ goes to zero the attention map is uniform, so
    the lowest exponent of each block is met up to the next order, σ² of the scores: 1e-4 at σ = 1e-3 to 1e-2."""
    found = laws(LAYERS[name], scales=torch.logspace(-3, -2, 4), fixed_gradient=True)
    predicted = exact.predicted_exponents(LAYERS[name])
    for part in ("outer", "functional"):
        assert {key[1:] for key in found if key[0] == part} == set(predicted[part])
    for law in found.values():
        if law.part != "total":
            assert abs(law.fitted - min(law.predicted)) < 2e-3, law
            assert law.slopes.shape == (3,)


def test_linear_attention_is_homogeneous():
    """So its laws hold at every scale."""
    law = laws(LAYERS["linear"], scales=[1.0, 10.0, 100.0], fixed_gradient=True)["outer", "query", "key"]
    assert abs(law.fitted - 6) < 1e-10
    assert float((law.slopes - 6).abs().max()) < 1e-10


def test_both_exponents_of_query_and_key():
    """`σ⁵ + σ³`: the third moments give the first, the product of two matrices in the scores the second."""
    layer, X, g = LAYERS["softmax"], randn(6, 4), randn(6, 5, seed=1)
    norms = []
    for scale in (1e-3, 1e-2):
        R = exact.hessian(layer, scale * X, g=g)  # B = 0: the functional part alone
        norms.append(
            [R.t_outer.block("query", "key").frobenius(), R.t_functional.block("query", "key").frobenius()]
        )
    fifth, third = (float(torch.log10(b / a)) for a, b in zip(*norms, strict=True))
    # the next order of the attention map is σ² = 1e-4 of the leading one
    assert abs(fifth - 5) < 2e-3
    assert abs(third - 3) < 2e-3


def test_residual_that_follows_the_target_adds_nothing():
    found = laws(LAYERS["softmax"])
    assert abs(found["functional", "query", "query"].fitted - 5) < 0.1
    assert abs(found["total", "value", "value"].fitted - 2) < 0.02


def test_blocks_that_are_zero_have_no_law():
    assert ("functional", "value", "value") not in laws(LAYERS["softmax"])
    assert ("functional", "query", "query") not in laws(LAYERS["linear"])


def test_no_law_is_claimed_for_other_layers():
    layer = exact.SelfAttention(randn(4, 3), randn(4, 3, seed=1), randn(4, 5, seed=2), activation="sigmoid")
    assert all(law.predicted is None for law in laws(layer).values())


def test_messages():
    with pytest.raises(ValueError, match="two or more positive scales in ascending order"):
        laws(LAYERS["softmax"], scales=[1.0, 0.1])


def test_any_layer_with_a_closed_form():
    layer = exact.FeedForward(randn(4, 3), randn(3, 2, seed=1), activation="relu")
    X, Y = randn(6, 4), randn(6, 2, seed=2)
    found = {(law.part, law.row): law for law in exact.growth(layer, X, Y) if law.row == law.column}
    # a ReLU layer is homogeneous in its tokens: both outer diagonal blocks grow as σ²
    for row in ("up", "down"):
        assert found["outer", row].predicted is None
        assert abs(found["outer", row].fitted - 2) < 1e-10


def test_printed_with_local_slopes():
    found = exact.growth(LAYERS["softmax"], randn(6, 4), randn(6, 5, seed=1))
    lines = str(found).splitlines()
    assert "predicted  fitted  slopes between σ = 0.01 and 0.1" in lines[0]
    line = next(line for line in lines if line.startswith("functional  query, key"))
    assert "5, 3" in line
    assert len(line.split()) == 3 + 2 + 1 + 5
