"""Models that call torch's attention are given ours, and every product stays what it was."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvlens as cl
from curvlens.kernels import chunked, functions
from curvlens.kernels.inside_models import inside_models
from models import MODELS

module = sys.modules["curvlens.kernels.inside_models"]  # whose name the function has taken
TORCHS = F.scaled_dot_product_attention
# those whose attention is a call of torch's; the others write it out
CALLERS = (
    "gpt2",
    "gpt2_cross",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen3",
    "bert",
    "roberta",
    "vit",
    "torch_encoder",
)


@pytest.fixture
def every_length(monkeypatch):
    """Also the shortest sequence is long, and has several tiles."""
    monkeypatch.setattr(module, "PLAIN", 0)
    monkeypatch.setattr(chunked, "CPU_TILE", 16)
    monkeypatch.setattr(chunked, "KEYS", 2)


@pytest.fixture
def counted(monkeypatch):
    """How often ours was called."""
    calls = []
    forward = functions.ops.forward
    monkeypatch.setattr(functions.ops, "forward", lambda *a: calls.append(1) or forward(*a))
    return calls


def products(name, engine):
    model, batch = MODELS[name]()
    land = cl.Landscape(model, batch)
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(land.blocks.size, 2, generator=generator, dtype=torch.float64)
    matrices = (cl.hessian, cl.gauss_newton, cl.functional)
    return [matrix(land, engine=engine) @ stack for matrix in matrices]


@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse", "layered"])
@pytest.mark.parametrize("name", CALLERS)
def test_products_of_every_family(monkeypatch, counted, name, engine):
    plain = products(name, engine)
    assert not counted
    with monkeypatch.context() as patch:
        patch.setattr(module, "PLAIN", 0)
        patch.setattr(chunked, "CPU_TILE", 16)
        patch.setattr(chunked, "KEYS", 2)
        ours = products(name, engine)
    assert counted
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 1e-12 * plain[0].norm()


def test_a_name_that_was_imported_is_served_and_given_back(every_length, counted):
    q = torch.randn(1, 2, 5, 4)
    with inside_models():
        assert F.scaled_dot_product_attention is not TORCHS
        with inside_models():
            scaled_dot_product_attention(q, q, q)
        assert F.scaled_dot_product_attention is not TORCHS
    assert len(counted) == 1
    assert F.scaled_dot_product_attention is TORCHS
    assert scaled_dot_product_attention is TORCHS
    with pytest.raises(KeyError), inside_models():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS


def test_short_sequences_stay_with_torch(counted):
    q = torch.randn(1, 1, 16, 2)
    with inside_models():
        F.scaled_dot_product_attention(q, q, q)
    assert not counted


class Layer(nn.Module):
    """One projection and attention, causal or with a learned bias of the scores."""

    def __init__(self, biased=False):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) if biased else None
        self.project = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        q = self.project(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, self.bias, is_causal=self.bias is None)[:, 0]


def test_a_learned_bias_goes_to_torch_with_a_warning(monkeypatch, counted):
    torch.manual_seed(0)
    batch = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    H = cl.hessian(cl.Landscape(Layer(biased=True), batch, "mse"))
    plain = H.dense()
    monkeypatch.setattr(module, "PLAIN", 0)
    with pytest.warns(UserWarning, match=r"constant mask .* got a mask that is differentiated"):
        found = H.dense()
    assert not counted
    assert torch.equal(found, plain)
    assert plain.norm() > 0


def test_dropout_goes_to_torch_with_a_warning(every_length, counted):
    q = torch.randn(1, 1, 5, 2)
    with inside_models(), pytest.warns(UserWarning, match=r"without dropout .* got dropout of 0\.5"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert not counted


def test_code_that_is_compiled_is_left_to_torch(every_length, counted, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q = torch.randn(1, 1, 5, 2)
    with inside_models():
        F.scaled_dot_product_attention(q, q, q)
    assert not counted


def test_a_product_at_a_long_sequence_forms_no_matrix_of_scores():
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor))
            return found

    for length, linear in ((500, False), (600, True)):
        x = torch.randn(1, length, 4, dtype=torch.float64)
        H = cl.hessian(cl.Landscape(Layer(), (x, x.flip(1)), "mse"), engine="double-backward")
        v = torch.randn(H.shape[1], dtype=torch.float64)
        H @ v
        sizes.clear()
        with Watch():
            H @ v
        assert (max(sizes) < length * length) == linear
