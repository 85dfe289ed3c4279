"""The nets are what their formulas say."""

import math

import pytest
import torch
from torch.nn import functional as F

from curvlens import nets
from models import randomise

# float64 sums of a few dozen products of order one
EXACT = 1e-13
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def net(*args, **kwargs):
    return randomise(nets.GPT(*args, **kwargs).double(), torch.Generator().manual_seed(0))


def written_out(gpt, ids, heads, norm, activation, attention, causal, scale):
    """The logits by the papers' formulas, sequence by sequence and head by head."""
    width = gpt.token.embedding_dim

    def normed(layer, x):
        return layer(x) if layer is not None else x

    logits = []
    for sequence in ids:
        x = gpt.token.weight[sequence] + gpt.position.weight[: len(sequence)]
        future = torch.ones(len(sequence), len(sequence)).triu(1).bool() & causal
        for block in gpt.blocks:
            a = block.attn
            y = normed(block.norm1, x) if norm == "pre" else x
            q, k, v = (
                (y @ w + (0 if b is None else b)).chunk(heads, 1)
                for w, b in ((a.W_Q, a.b_Q), (a.W_K, a.b_K), (a.W_V, a.b_V))
            )
            out = 0 if a.b_O is None else a.b_O
            for h, rows in enumerate(a.W_O.chunk(heads, 0)):
                scores = q[h] @ k[h].T * (scale if scale is not None else 1 / math.sqrt(q[h].shape[1]))
                if attention == "softmax":
                    weights = scores.masked_fill(future, -math.inf).softmax(-1)
                else:
                    weights = scores.masked_fill(future, 0)
                out = out + weights @ v[h] @ rows
            x = normed(block.norm1, x + out) if norm == "post" else x + out
            if activation is not None:
                m = block.mlp
                y = normed(block.norm2, x) if norm == "pre" else x
                b_1, b_2 = (0, 0) if m.b_1 is None else (m.b_1, m.b_2)
                out = {"relu": F.relu, "gelu": F.gelu}[activation](y @ m.W_1 + b_1) @ m.W_2 + b_2
                x = normed(block.norm2, x + out) if norm == "post" else x + out
        if norm == "pre":
            x = gpt.norm(x)
        logits.append(x @ (gpt.head.W_U if gpt.head.W_E is None else gpt.token.weight.T))
    assert x.shape[1] == width
    return torch.stack(logits)


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"depth": 2, "heads": 2, "bias": True, "activation": "gelu"},
        {"heads": 2, "key_width": 6, "value_width": 4, "activation": None, "causal": False},
        {"tied": True, "scale": 0.7, "hidden": 5},
    ],
)
def test_logits(norm, attention, more):
    gpt = net(10, 6, 8, norm=norm, attention=attention, **more)
    settings = {"heads": 1, "activation": "relu", "causal": True, "scale": None, **more}
    settings = {name: settings[name] for name in ("heads", "activation", "causal", "scale")}
    expected = written_out(gpt, IDS, norm=norm, attention=attention, **settings)
    torch.testing.assert_close(gpt(IDS), expected, rtol=EXACT, atol=EXACT * expected.abs().max().item())


def test_shapes_are_those_of_the_papers():
    gpt = nets.GPT(10, 6, 8, heads=2, key_width=6, value_width=4)
    attn, mlp = gpt.blocks[0].attn, gpt.blocks[0].mlp
    assert attn.W_Q.shape == attn.W_K.shape == (8, 6)
    assert attn.W_V.shape == (8, 4)
    assert attn.W_O.shape == (4, 8)
    assert mlp.W_1.shape == (8, 32)
    assert mlp.W_2.shape == (32, 8)
    assert gpt.head.W_U.shape == (8, 10)


def test_initial_weights():
    gpt = nets.GPT(12, 18, 64, depth=2, norm="pre", bias=True)
    for name, parameter in gpt.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all()
        else:
            # five standard errors of a variance from that many draws
            error = 5 * math.sqrt(2 / parameter.numel())
            assert parameter.var().item() == pytest.approx(0.64 / 64, rel=error)
            assert abs(parameter.mean().item()) < 5 * 0.1 / math.sqrt(parameter.numel())


def test_seeds():
    one, same, other = (nets.GPT(10, 6, 8, seed=seed).token.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_later_token_changes_nothing_before_it():
    gpt = net(10, 6, 8, depth=2)
    changed = IDS.clone()
    changed[:, 3] = 0
    moved = (gpt(IDS) - gpt(changed)).abs().amax((0, 2))
    assert (moved[:3] == 0).all()
    assert (moved[3:] > 1e-3).all()


def test_linear_mlp():
    mlp = nets.LinearMLP([4, 6, 3]).double()
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = mlp.weights
    torch.testing.assert_close(mlp(x), x @ (first @ second), rtol=EXACT, atol=EXACT)
    assert torch.equal(first, nets.LinearMLP([4, 6, 3]).double().weights[0])


def small(**more):
    return nets.GPT(10, 6, 8, **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: small(heads=3),
            "expected widths that 3 heads divide, got 8 for keys, 8 for values",
        ),
        (
            lambda: small(attention="hard"),
            "expected attention to be one of 'softmax', 'linear', got 'hard'",
        ),
        (
            lambda: small(norm="rms"),
            "expected norm to be one of 'none', 'pre', 'post', got 'rms'",
        ),
        (
            lambda: small(activation="tanh"),
            "expected activation to be one of 'relu', 'gelu', got 'tanh'",
        ),
        (lambda: nets.GPT(10, 4, 8)(IDS), "expected at most 4 tokens, got 5"),
        (lambda: nets.LinearMLP([4]), r"expected at least two widths, got \[4\]"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
