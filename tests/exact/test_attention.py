import pytest
import torch

import curvlens.exact as exact
from curvlens.exact import literal
from curvlens.exact.attention_map import Elementwise, RowMap
from tests.exact.oracle import autodiff, mse, relative
from tests.structured.contract import check_operator

# float64: a Hessian entry is a sum of some thousand products, so a few hundred roundings of 1e-16 at most.
TOLERANCE = 1e-11


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(d=3, k=2, v=4, seed=0):
    return randn(d, k, seed=seed), randn(d, k, seed=seed + 1), randn(d, v, seed=seed + 2)


def full_softmax(T):
    return T.softmax(-1)


def full_first(T):
    A = T.softmax(-1)
    return torch.diag_embed(A) - A[..., :, None] * A[..., None, :]


def full_second(T, u):
    A = T.softmax(-1)
    mean = (A * u).sum(-1, keepdim=True)
    D = A * (u - mean)
    return torch.diag_embed(D) - D[..., :, None] * A[..., None, :] - A[..., :, None] * D[..., None, :]


GENERAL = RowMap(full_softmax, full_first, full_second)
CUBE = Elementwise(lambda T: T**3, lambda T: 3 * T**2, lambda T: 6 * T)


def causal_mask(L):
    return torch.ones(L, L, dtype=torch.bool).tril()


def layers():
    W = weights()
    yield "softmax", exact.SelfAttention(*W)
    yield "temperature", exact.SelfAttention(*W, temperature=0.6)
    yield "linear", exact.SelfAttention(*W, activation="linear")
    yield "sigmoid", exact.SelfAttention(*W, activation="sigmoid")
    yield "cube", exact.SelfAttention(*W, activation=CUBE)
    yield "row map", exact.SelfAttention(*W, activation=GENERAL)
    yield "row map, causal", exact.SelfAttention(*W, activation=GENERAL, causal=True)
    yield "causal", exact.SelfAttention(*W, causal=True)
    yield "sigmoid, causal", exact.SelfAttention(*W, activation="sigmoid", causal=True)
    yield "single", exact.SelfAttention(W_QK=randn(3, 3), W_V=W[2])
    yield (
        "single, out, biases",
        exact.SelfAttention(W_QK=randn(3, 3), W_V=W[2], W_O=randn(4, 2), b_V=randn(4), b_O=randn(2)),
    )
    yield "wide keys", exact.SelfAttention(*weights(3, 5, 2))
    yield "out", exact.SelfAttention(*W, W_O=randn(4, 2, seed=7))
    yield (
        "biases",
        exact.SelfAttention(
            *W, W_O=randn(4, 2, seed=7), b_Q=randn(2), b_K=randn(2, seed=1), b_V=randn(4), b_O=randn(2)
        ),
    )
    yield (
        "sigmoid, biases",
        exact.SelfAttention(*W, activation="sigmoid", b_Q=randn(2), b_K=randn(2, seed=1), b_V=randn(4)),
    )
    yield "two heads", exact.SelfAttention(*weights(3, 4, 4), heads=2)
    yield (
        "two heads, out",
        exact.SelfAttention(*weights(3, 4, 6), heads=2, W_O=randn(6, 3, seed=8), causal=True),
    )
    yield "stack", exact.SelfAttention(randn(2, 3, 2), randn(2, 3, 2, seed=1), randn(2, 3, 4, seed=2))
    yield (
        "stack, out",
        exact.SelfAttention(
            randn(2, 3, 2),
            randn(2, 3, 2, seed=1),
            randn(2, 3, 2, seed=2),
            W_O=randn(2, 2, 3, seed=3),
            b_Q=randn(2, 2),
        ),
    )
    yield (
        "grouped",
        exact.SelfAttention(
            randn(3, 8),
            randn(3, 4, seed=1),
            randn(3, 6, seed=2),
            heads=4,
            W_O=randn(12, 2, seed=3),
            b_K=randn(4),
            b_V=randn(6),
            b_Q=randn(8),
        ),
    )


LAYERS = dict(layers())
BATCHES = {
    "one": randn(4, 3, seed=20),
    "equal": randn(2, 3, 3, seed=21),
    "uneven": [randn(4, 3, seed=22), randn(1, 3, seed=23), randn(2, 3, seed=24)],
}


def stacked(X):
    return torch.cat(X) if isinstance(X, list) else X.reshape(-1, X.shape[-1])


def lengths(X):
    return [len(x) for x in X] if isinstance(X, list) or X.dim() == 3 else [len(X)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_block_against_autodiff(name, batch):
    layer, X = LAYERS[name], BATCHES[batch]
    n = len(stacked(X))
    Y = randn(n, layer.outputs, seed=30)
    targets = list(Y.split(lengths(X))) if isinstance(X, list) else Y.view(*X.shape[:-1], -1)
    R = exact.hessian(layer, X, targets)
    outer, functional = autodiff(layer, X, mse(Y, lengths(X)))
    assert relative(R.outer.dense(), outer) < TOLERANCE
    assert relative(R.functional.dense(), functional, outer) < TOLERANCE
    assert relative(R.total.dense(), outer + functional) < TOLERANCE
    assert relative(R.loss.value, mse(Y, lengths(X))(stacked_output(layer, X))) < TOLERANCE


def stacked_output(layer, X):
    return stacked(layer(X))


def cross_entropy(classes):
    def loss(F):
        return torch.nn.functional.cross_entropy(F, classes, ignore_index=-100)

    return loss


@pytest.mark.parametrize("name", ["softmax", "out", "biases", "two heads, out", "stack", "grouped", "single"])
def test_cross_entropy_scores_tokens_and_skips_the_ignored(name):
    layer, X = LAYERS[name], BATCHES["uneven"]
    classes = torch.arange(7) % layer.outputs
    classes[[1, 5]] = -100
    R = exact.hessian(layer, X, list(classes.split(lengths(X))), loss="cross-entropy")
    outer, functional = autodiff(layer, X, cross_entropy(classes))
    assert relative(R.outer.dense(), outer) < TOLERANCE
    assert relative(R.functional.dense(), functional, outer) < TOLERANCE
    assert relative(R.loss.value, cross_entropy(classes)(stacked_output(layer, X))) < TOLERANCE
    check_operator(R.total, outer + functional, tolerance=1e-10)


def test_any_loss_by_its_derivatives():
    layer, X = LAYERS["out"], BATCHES["equal"]
    Y = randn(2, 3, 2, seed=40)

    def loss(F):
        return (F - Y.flatten(0, 1)).pow(4).sum()

    outer, functional = autodiff(layer, X, loss)
    R = exact.hessian(
        layer, X, Y, g=lambda F, Y: 4 * (F - Y) ** 3, B=lambda F, Y: torch.diag_embed(12 * (F - Y) ** 2)
    )
    assert relative(R.outer.dense(), outer) < TOLERANCE
    assert relative(R.functional.dense(), functional, outer) < TOLERANCE
    difference = layer(X) - Y
    arrays = exact.hessian(layer, X, g=4 * difference**3, B=torch.diag_embed(12 * difference**2))
    assert relative(arrays.total.dense(), R.total.dense()) < TOLERANCE
    linear = exact.hessian(layer, X, g=4 * difference**3)
    assert float(linear.outer.frobenius()) == 0
    assert relative(linear.functional.dense(), R.functional.dense()) < TOLERANCE


@pytest.mark.parametrize("name", LAYERS)
def test_operators_keep_their_contract(name):
    layer, X = LAYERS[name], BATCHES["uneven"]
    Y = randn(7, layer.outputs, seed=31)
    R = exact.hessian(layer, X, list(Y.split(lengths(X))))
    for H in (R.outer, R.functional, R.total):
        assert H.symmetric
        check_operator(H, tolerance=1e-10)  # norms of nearly cancelling sums lose two digits


def compare(layer, X, Y, tolerance=TOLERANCE):
    """Both parts against autodiff, each block relative to the outer part's largest entry."""
    n = len(stacked(X))
    R = exact.hessian(layer, X, Y)
    outer, functional = autodiff(layer, X, mse(Y.reshape(n, -1), lengths(X)))
    assert relative(R.outer.dense(), outer) < tolerance
    assert relative(R.functional.dense(), functional, outer) < tolerance
    return R


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed):
    g = torch.Generator().manual_seed(seed)
    L, d, k, v = (int(torch.randint(1, 6, (), generator=g)) for _ in range(4))
    X, Y = randn(L, d, seed=seed), randn(L, v, seed=seed + 50)
    compare(exact.SelfAttention(*weights(d, k, v, seed=100 + seed)), X, Y)


def test_padding_masks_and_rows_without_keys():
    X, Y = randn(4, 3), randn(4, 4, seed=1)
    padding = torch.tensor([True, True, False, True])
    nothing = causal_mask(4)
    nothing[2] = False
    for mask in (padding, causal_mask(4), nothing, torch.zeros(4, 4, dtype=torch.bool)):
        for activation in ("softmax", "sigmoid", "linear"):
            layer = exact.SelfAttention(*weights(), mask=mask, activation=activation)
            R = exact.hessian(layer, X, Y)
            outer, functional = autodiff(layer, X, mse(Y, [4]))
            size = float(outer.abs().max())
            assert float((R.outer.dense() - outer).abs().max()) <= TOLERANCE * size
            assert float((R.functional.dense() - functional).abs().max()) <= TOLERANCE * size
            if not mask.any():
                assert float(R.total.frobenius()) == 0
    assert float(exact.SelfAttention(*weights(), mask=nothing)(X)[2].abs().max()) == 0


def test_a_mask_for_each_sequence_of_a_batch():
    X, Y = randn(2, 3, 3), randn(2, 3, 4, seed=1)
    padding = torch.tensor([[True, True, False], [True, True, True]])
    R = compare(exact.SelfAttention(*weights(), mask=padding, causal=True), X, Y)
    uneven = exact.SelfAttention(*weights(), mask=[padding[0], causal_mask(2)])
    parts = [Y[0], Y[1, :2]]
    total = exact.hessian(uneven, [X[0], X[1, :2]], parts).total.dense()
    outer, functional = autodiff(uneven, [X[0], X[1, :2]], mse(torch.cat(parts), [3, 2]))
    assert relative(total, outer + functional) < TOLERANCE
    assert R.total.symmetric
    with pytest.raises(ValueError, match="expected a boolean mask"):
        exact.SelfAttention(*weights(), mask=torch.ones(3, 3))(X)


def test_what_padding_hides_does_not_count():
    X, Y = randn(3, 3), randn(3, 4, seed=1)
    padded = torch.cat([X, 1e3 * randn(2, 3, seed=2)])
    keep = torch.tensor([True] * 3 + [False] * 2)
    short = exact.SelfAttention(*weights())
    long = exact.SelfAttention(*weights(), mask=keep)
    at = exact.hessian(short, X, Y).loss
    g = torch.cat([at.gradient, torch.zeros(2, 4, dtype=torch.float64)])
    B = torch.cat([at.hessian, torch.zeros(2, dtype=torch.float64)])
    assert (
        relative(
            exact.hessian(long, padded, g=g, B=B).total.dense(), exact.hessian(short, X, Y).total.dense()
        )
        < TOLERANCE
    )


def test_a_batch_is_the_mean_of_its_sequences():
    layer, X = LAYERS["two heads, out"], BATCHES["uneven"]
    Y = [randn(len(x), layer.outputs, seed=i) for i, x in enumerate(X)]
    together = exact.hessian(layer, X, Y)
    alone = [exact.hessian(layer, x, y).total.dense() for x, y in zip(X, Y, strict=True)]
    assert relative(together.total.dense(), sum(alone) / len(X)) < TOLERANCE
    equal = torch.stack([X[0], 2 * X[0]])
    assert (
        relative(
            exact.hessian(layer, equal, torch.stack([Y[0], Y[0]])).total.dense(),
            exact.hessian(layer, list(equal), [Y[0], Y[0]]).total.dense(),
        )
        < TOLERANCE
    )


def test_variants_agree_where_they_coincide():
    W_Q, W_K, W_V = weights(3, 2, 4)
    X, Y = randn(5, 3), randn(5, 4, seed=1)
    plain = exact.hessian(exact.SelfAttention(W_Q, W_K, W_V), X, Y)
    same = [
        exact.SelfAttention(W_Q, W_K, W_V, temperature=1.0),
        exact.SelfAttention(W_Q, W_K, W_V, heads=1),
        exact.SelfAttention(W_Q[None], W_K[None], W_V[None]),
        exact.SelfAttention(W_Q, W_K, W_V, activation=GENERAL),
        exact.SelfAttention(W_Q / 0.7, W_K, W_V * 1.0, temperature=1.0, scale=0.7 / 2**0.5),
    ]
    for layer in same[:4]:
        assert relative(exact.hessian(layer, X, Y).total.dense(), plain.total.dense()) < TOLERANCE
    rescaled = exact.hessian(same[4], X, Y)
    assert relative(rescaled.total.block("value").dense(), plain.total.block("value").dense()) < TOLERANCE
    single = exact.SelfAttention(W_QK=W_Q @ W_K.T, W_V=W_V, temperature=2**0.5)
    R = exact.hessian(single, X, Y)
    assert relative(R.total.block("value").dense(), plain.total.block("value").dense()) < TOLERANCE
    # H_QQ = (I ⊗ W_K)ᵀ H(W_QK) (I ⊗ W_K): the chain rule through W_QK = W_Q W_Kᵀ
    chain = torch.kron(torch.eye(3, dtype=torch.float64), W_K)
    inner = R.total.block("query_key").dense()
    assert relative(chain.T @ inner @ chain, plain.total.block("query").dense()) < TOLERANCE


def test_one_sided_limits_of_attention():
    X, Y = randn(4, 3), randn(4, 4, seed=1)
    W_Q, W_K, W_V = weights()
    alone = exact.SelfAttention(W_Q, W_K, W_V, mask=torch.eye(4, dtype=torch.bool))
    R = compare(alone, X, Y)
    assert float(R.functional.frobenius()) == 0  # one-hot rows: M2 = M3 = 0, and H is the value block alone
    assert float(R.outer.block("query", "key").frobenius()) == 0
    uniform = exact.SelfAttention(0 * W_Q, W_K, W_V)
    compare(uniform, X, Y)
    compare(exact.SelfAttention(W_Q, W_K, W_V), randn(1, 3), Y[:1])  # one token


@pytest.mark.parametrize("size", [3.0, 10.0, 30.0, 300.0])
def test_nearly_one_hot_rows_and_large_scores(size):
    W_Q, W_K, W_V = weights()
    X, Y = randn(5, 3), randn(5, 4, seed=1)
    layer = exact.SelfAttention(size * W_Q, size * W_K, W_V)
    R = exact.hessian(layer, X, Y)
    outer, functional = autodiff(layer, X, mse(Y, [5]))
    assert torch.isfinite(R.total.dense()).all()
    # the weights of autodiff's own oracle multiply rounding of size² in the scores: relative to the largest entry
    scale = (outer + functional).abs().max() * (1 + size**2)
    assert float((R.outer.dense() - outer).abs().max()) <= 1e-12 * float(scale)
    assert float((R.functional.dense() - functional).abs().max()) <= 1e-12 * float(scale)


@pytest.mark.parametrize("size", [1.0, 5.0, 30.0])
def test_single_precision_keeps_its_digits(size):
    """Against float64 on the same rounded numbers: cancellation of centred moments would show here first."""
    single = [W.float() for W in weights()]
    single[:2] = [size * W for W in single[:2]]
    X, Y = (5 + randn(6, 3)).float(), randn(6, 4, seed=1).float()  # far from zero: moments are about the mean
    found = exact.hessian(exact.SelfAttention(*single), X, Y)
    expected = exact.hessian(exact.SelfAttention(*(W.double() for W in single)), X.double(), Y.double())
    scores = float((X @ single[0] @ single[1].T @ X.T).abs().max())
    for part in ("outer", "functional"):
        low, high = getattr(found, part), getattr(expected, part)
        # the rounding of a score of this size, times a few dozen operations
        allowed = 30 * 6e-8 * (1 + scores) * float(high.dense().norm()) + 1e-30
        assert float((low.dense().double() - high.dense()).norm()) <= allowed
        assert abs(float(low.frobenius()) - float(high.frobenius())) <= allowed
        # products differentiate a row that may be one-hot to rounding: digits of the whole, not of a tiny part
        v = randn(high.shape[1], seed=2)
        whole = 30 * 6e-8 * (1 + scores) * float(expected.total.dense().norm())
        assert float(((low @ v.float()).double() - high @ v).norm()) <= whole * float(v.norm())


def test_sums_over_keys_replace_matrices_a_token(monkeypatch):
    """Large problems take other formulas, nothing of size d² a token: forced here on a small one."""
    import curvlens.exact.attention_head as head
    import curvlens.exact.attention_hessian as hessian_module

    for name in [
        "softmax",
        "causal",
        "sigmoid",
        "linear",
        "biases",
        "sigmoid, biases",
        "two heads, out",
        "grouped",
    ]:
        layer, X = LAYERS[name], BATCHES["uneven"]
        Y = list(randn(7, layer.outputs, seed=30).split(lengths(X)))
        small = exact.hessian(layer, X, Y)
        expected = [small.outer.dense(), small.functional.dense()]
        with monkeypatch.context() as patched:
            patched.setattr(head, "CHUNK", 1)
            patched.setattr(hessian_module, "CHUNK", 1)
            large = exact.hessian(layer, X, Y)
            assert large.curvature.heads[0].expand
            assert relative(large.functional.dense(), expected[1]) < TOLERANCE
            assert relative(large.outer.dense(), expected[0]) < TOLERANCE
            for i, H in enumerate((large.outer, large.functional)):
                assert relative(H.frobenius(), expected[i].norm()) < TOLERANCE
            assert not any("M2" in h.__dict__ or "M3" in h.__dict__ for h in large.curvature.heads)


def test_functional_part_between_heads_is_zero():
    R = exact.hessian(LAYERS["stack"], BATCHES["one"], randn(4, 4))
    assert float(R.functional.block("query.head.0", "value.head.1").frobenius()) == 0
    assert float(R.outer.block("query.head.0", "value.head.1").frobenius()) > 0
    assert float(R.functional.block("value").frobenius()) == 0


def test_value_block_has_the_spectrum_of_the_first_moment():
    R = exact.hessian(LAYERS["softmax"], BATCHES["one"], randn(4, 4))
    block = R.outer.block("value")
    assert relative(block.eigenvalues(), torch.linalg.eigvalsh(block.dense())) < TOLERANCE


def test_split_at_the_scores():
    """Remark D.1 and Lemma D.2."""
    for k in (2, 3, 5):
        layer = exact.SelfAttention(*weights(4, k, 3))
        X, Y = randn(9, 4), randn(9, 3, seed=1)
        R = exact.hessian(layer, X, Y)
        whole = R.total.dense()[: 8 * k, : 8 * k]
        assert relative(R.t_outer.dense() + R.t_functional.dense(), whole) < TOLERANCE
        pairs = R.t_functional.eigenvalues()
        assert relative(pairs, torch.linalg.eigvalsh(R.t_functional.dense())) < TOLERANCE
        assert relative(pairs, -pairs.flip(0)) < TOLERANCE
        sigma = layer.scale * torch.linalg.svdvals(R.curvature.heads[0].B)
        assert relative(pairs[-4 * k :].flip(0), sigma.repeat_interleave(k)) < TOLERANCE
        rank = int(torch.linalg.matrix_rank(R.t_outer.dense(), rtol=1e-10))
        assert rank <= exact.t_rank_bound(layer)
        assert exact.t_rank_bound(layer) == (2 * k * 4 - k * k if k < 4 else 16)
        chain = torch.cat(
            [
                torch.kron(torch.eye(4, dtype=torch.float64), layer.weights["key"]),
                torch.kron(layer.weights["query"], torch.eye(4, dtype=torch.float64))
                @ literal.commutation(4, k),
            ],
            dim=1,
        )
        U = (
            exact.hessian(
                exact.SelfAttention(
                    W_QK=layer.weights["query"] @ layer.weights["key"].T * layer.scale,
                    W_V=layer.weights["value"],
                ),
                X,
                Y,
            )
            .total.block("query_key")
            .dense()
        )
        assert relative(R.t_outer.dense(), layer.scale**2 * chain.T @ U @ chain) < TOLERANCE


def test_split_at_the_scores_is_tight_in_rank():
    layer = exact.SelfAttention(*weights(3, 2, 3))
    R = exact.hessian(layer, randn(30, 3), randn(30, 3, seed=1))
    rank = int(torch.linalg.matrix_rank(R.t_outer.dense(), rtol=1e-10))
    assert rank == exact.t_rank_bound(layer) == 8


def test_temperature_laws():
    """At one and the same attention map, the T-outer part scales as 1/t² and the T-functional one as 1/t."""
    W_Q, W_K, W_V = weights()
    X = randn(5, 3)
    g, B = randn(5, 4, seed=1), randn(5, seed=2).abs()
    for t in (0.5, 3.0):
        cold = exact.SelfAttention(0 * W_Q, W_K, W_V)
        hot = exact.SelfAttention(0 * W_Q, W_K, W_V, temperature=t)
        a, b = (exact.hessian(layer, X, g=g, B=B) for layer in (cold, hot))
        assert relative(b.t_outer.dense(), a.t_outer.dense() / t**2) < TOLERANCE
        assert relative(b.t_functional.dense(), a.t_functional.dense() / t) < TOLERANCE


def test_derivatives_reach_the_products():
    """Products by passes over tokens are the sums over tokens."""
    for name, layer in LAYERS.items():
        X = BATCHES["uneven"]
        R = exact.hessian(layer, X, list(randn(7, layer.outputs, seed=30).split(lengths(X))))
        for H in (R.outer, R.functional, R.total):
            V = randn(3, H.shape[1], seed=5)
            cells = super(type(H), H).apply(V)
            assert relative(H.apply(V), cells) < TOLERANCE, name


def test_messages():
    W_Q, W_K, W_V = weights()
    with pytest.raises(ValueError, match="expected W_Q, W_K and W_V, or W_QK and W_V"):
        exact.SelfAttention(W_Q, None, W_V)
    with pytest.raises(ValueError, match="expected activation 'softmax'"):
        exact.SelfAttention(W_Q, W_K, W_V, activation="relu")
    with pytest.raises(ValueError, match="expected tokens of width 3"):
        exact.hessian(exact.SelfAttention(W_Q, W_K, W_V), randn(4, 2), randn(4, 4))
    with pytest.raises(TypeError, match=r"expected tokens of torch.float64"):
        exact.hessian(exact.SelfAttention(W_Q, W_K, W_V), randn(4, 3).float(), randn(4, 4))
    with pytest.raises(ValueError, match="expected targets"):
        exact.hessian(exact.SelfAttention(W_Q, W_K, W_V), randn(4, 3))
    with pytest.raises(ValueError, match="heads that divide 3"):
        exact.SelfAttention(randn(3, 6), randn(3, 4), randn(3, 4), heads=3)


def test_large_tokens_have_the_right_limit_until_scores_overflow():
    """One-hot rows: the Hessian is that of the value block alone, which grows as the square of the tokens."""
    layer, X, Y = one_layer(4, 3, 2, 5)
    norms = [exact.hessian(layer, scale * X, Y).total.frobenius() for scale in (1e60, 1e120)]
    assert norms[1].item() == pytest.approx(1e120 * norms[0].item(), rel=1e-12)
    with pytest.raises(ValueError, match=r"expected finite outputs.*token 0.*scale the tokens"):
        exact.hessian(layer, 1e200 * X, Y)
    with pytest.raises(ValueError, match="expected finite outputs"):
        exact.hessian(layer, float("nan") * X, Y)


def test_what_does_not_fit_is_refused_with_its_shapes():
    layer, X, Y = one_layer(4, 3, 2, 5)
    W_Q, W_K, W_V = (layer.weights[kind] for kind in ("query", "key", "value"))
    with pytest.raises(ValueError, match=r"key: expected heads of 3 columns.*got \[4, 2\]"):
        exact.SelfAttention(W_Q, W_K[:, :2], W_V)
    with pytest.raises(ValueError, match="temperature above zero, got 0"):
        exact.SelfAttention(W_Q, W_K, W_V, temperature=0)
    with pytest.raises(ValueError, match="at least one token"):
        exact.hessian(layer, X[:0], Y[:0])
    with pytest.raises(ValueError, match=r"classes from 0 to 1.*got 7 to 7"):
        exact.hessian(layer, X, torch.full((5,), 7), loss="cross-entropy")
    with pytest.raises(ValueError, match=r"expected a mask \[5, 5\].*got \[4, 4\]"):
        exact.hessian(exact.SelfAttention(W_Q, W_K, W_V, mask=torch.ones(4, 4).bool()), X, Y)


def one_layer(d, k, v, L):
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(d, width, generator=g, dtype=torch.float64) for width in (k, k, v)]
    X, Y = (torch.randn(L, width, generator=g, dtype=torch.float64) for width in (d, v))
    return exact.SelfAttention(*weights), X, Y


def test_spectra_of_several_heads_and_in_single_precision():
    """Where cells share nothing, their spectra are the whole's; and symmetric up to rounding is symmetric."""
    R = exact.hessian(LAYERS["stack"], BATCHES["one"], randn(4, 4))
    pairs = R.t_functional.eigenvalues()
    assert relative(pairs, torch.linalg.eigvalsh(R.t_functional.dense())) < TOLERANCE
    layer, X, Y = one_layer(30, 4, 20, 40)
    single = exact.SelfAttention(*(W.float() for W in layer.weights.values()))
    block = exact.hessian(single, X.float(), Y.float()).outer.block("value")
    expected = exact.hessian(layer, X, Y).outer.block("value").eigenvalues()
    # 1e-5: rounding of 6e-8, of sums of 40 tokens and of 30 rows
    assert relative(block.eigenvalues().double(), expected) < 1e-5


def test_parameters_of_a_model_are_taken_as_numbers():
    layer, X, Y = one_layer(4, 3, 2, 5)
    trained = exact.SelfAttention(*(torch.nn.Parameter(W) for W in layer.weights.values()))
    H = exact.hessian(trained, X.clone().requires_grad_(), Y).total
    assert not H.dense().requires_grad
    assert torch.equal(H.dense(), exact.hessian(layer, X, Y).total.dense())


def test_norms_that_overflow_are_refused():
    """Linear attention of large tokens: finite outputs of σ³, curvature of σ⁶ and factors beyond float64."""
    layer, X, Y = one_layer(4, 3, 2, 5)
    wide = exact.SelfAttention(*layer.weights.values(), activation="linear")
    R = exact.hessian(wide, 1e80 * X, Y)
    with pytest.raises(ValueError, match="expected finite entries, got NaN"):
        R.total.block_norms()
    with pytest.raises(ValueError, match=r"expected weights \[inputs, outputs\]"):
        exact.SelfAttention(X[0], X[0], X[0])
