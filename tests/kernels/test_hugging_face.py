"""Hugging Face models set to this attention give what they gave."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlens as cl
from curvlens.kernels import functions, hugging_face
from models import MODELS

FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen3", "bert", "vit")


@pytest.fixture(autouse=True)
def _registered():
    hugging_face.register()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_second_derivatives(name, monkeypatch):
    calls = []
    forward = functions.ops.forward
    monkeypatch.setattr(functions.ops, "forward", lambda *a: calls.append(1) or forward(*a))
    model, batch = MODELS[name]()
    H = cl.hessian(cl.Landscape(model, batch))
    v = torch.randn(H.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = H @ v
    assert not calls
    model.set_attn_implementation("curvlens")
    assert (H @ v - before).norm() <= 1e-12 * before.norm()
    assert calls


def test_twice_in_ones_own_code():
    model, batch = MODELS["llama"]()
    slopes = []
    for kind in ("sdpa", "curvlens"):  # "eager" takes the softmax in float32
        model.set_attn_implementation(kind)
        weights = list(model.parameters())
        with sdpa_kernel(SDPBackend.MATH):
            value = model(**batch).loss
        first = torch.autograd.grad(value, weights, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), weights)
        slopes.append(torch.cat([g.flatten() for g in second]))
    a, b = slopes
    assert (a - b).norm() <= 1e-12 * b.norm()


def test_padding_is_not_seen():
    model, batch = MODELS["gpt2"]()
    model.set_attn_implementation("curvlens")
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] == 0, 5, batch["input_ids"])}
    seen = batch["attention_mask"].bool()
    assert torch.allclose(model(**batch).logits[seen], model(**other).logits[seen], atol=1e-12)


def test_what_it_does_not_do_is_refused():
    q = torch.randn(1, 2, 3, 4)
    for asked in ({"softcap": 30.0}, {"dropout": 0.1}):
        with pytest.raises(
            ValueError, match=r"expected plain attention without dropout, got (softcap|dropout)"
        ):
            hugging_face._attend(torch.nn.Identity(), q, q, q, None, **asked)
