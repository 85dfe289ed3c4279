"""The layer-by-layer engine gives what double backward gives, whatever is asked of it, and leaves the model alone."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvlens as cl
from curvlens import nets
from curvlens.engine import head, layered
from curvlens.engine.cut import cut
from curvlens.engine.segments import Uncut
from models import MODELS, randomise

UNCUT = ("torch_attention", "linear_mlp")  # models without layers
# float64, the same sums in another order; the parts of H are compared at its own scale
TIGHT = 1e-12
QUANTITIES = {
    "hessian": cl.hessian,
    "gauss-newton": cl.gauss_newton,
    "functional": cl.functional,
    "empirical": cl.fisher,
    "sampled": lambda land, engine: cl.fisher(land, "sampled", engine=engine, seed=3),
}


def landscape(name, **more):
    model, batch = MODELS[name]()
    return cl.Landscape(model, batch, **more)


def vectors(land, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(land.blocks.size, count, generator=generator, dtype=torch.float64)


def agree(land, quantity=cl.hessian, rows="*", columns="*", count=2, tight=TIGHT):
    ours = quantity(land, engine="layered").block(rows, columns)
    theirs = quantity(land, engine="double-backward").block(rows, columns)
    stack = torch.randn(ours.shape[1], count, dtype=torch.float64)
    expected = theirs @ stack
    scale = max(expected.norm(), 1e-3 * stack.norm())
    for found, image in ((ours @ stack, expected), (ours @ stack[:, 0], expected[:, 0])):
        assert (found - image).norm() <= tight * scale


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNCUT])
def test_every_quantity_of_every_family(name):
    land = landscape(name)
    for quantity in QUANTITIES.values():
        agree(land, quantity)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNCUT])
def test_blocks_of_every_family(name):
    land = landscape(name)
    names = land.blocks.heads().names
    some = [names[i * (len(names) - 1) // 3] for i in range(4)]
    for row, column in [(some[0], some[3]), (some[3], some[0]), (some[1], some[2]), (some[2], some[2])]:
        agree(land, cl.hessian, row, column)
        agree(land, cl.gauss_newton, row, column, count=1)


@pytest.mark.parametrize("name", UNCUT)
def test_a_model_without_layers_says_so(name):
    land = landscape(name)
    with pytest.raises(Uncut, match=r"cannot: no family knows its layers.*double-backward"):
        cl.hessian(land, engine="layered") @ vectors(land, 1)[:, 0]
    cl.hessian(land) @ vectors(land, 1)[:, 0]


def test_logits_are_cut_off_where_a_model_ends_with_them():
    assert cut(landscape("gpt2")).projection.weight == "transformer.wte.weight"  # tied
    assert cut(landscape("bert")).projection.bias is not None
    assert cut(landscape("own_tied")).projection.transposed
    assert not cut(landscape("own_gpt")).projection.transposed
    assert cut(landscape("gpt2_classifier")).projection is None  # takes one token's logits of all


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "own_gpt"])
def test_chunks_of_tokens_change_nothing(name, monkeypatch):
    for tokens in (1, 3, 1000):
        monkeypatch.setattr(layered, "chunk_of_tokens", lambda *_, tokens=tokens: tokens)
        land = landscape(name)
        for quantity in QUANTITIES.values():
            agree(land, quantity)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_chunks_of_vectors_change_nothing(quantity, monkeypatch):
    land = landscape("gpt2")
    stack = vectors(land, 5)
    expected = QUANTITIES[quantity](land, engine="double-backward") @ stack
    for size in (1, 2, 5):
        monkeypatch.setattr("curvlens.engine.chunk_size", lambda *_, size=size, **__: size)
        found = QUANTITIES[quantity](land, engine="layered") @ stack
        assert (found - expected).norm() < TIGHT * expected.norm()


def test_batches_and_micro_batches():
    model, _ = MODELS["llama"]()
    batches = [torch.randint(3, 11, (size, tokens)) for size, tokens in ((3, 5), (1, 7), (2, 4))]
    whole = cl.hessian(cl.Landscape(model, batches), engine="double-backward")
    stack = vectors(whole.landscape, 2)
    for size in (None, 1, 2):
        found = cl.hessian(cl.Landscape(model, batches, micro_batch=size), engine="layered") @ stack
        assert (found - whole @ stack).norm() < TIGHT * (whole @ stack).norm()


def test_frozen_parameters_are_constants():
    model, batch = MODELS["gpt2"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn" in name)
    agree(cl.Landscape(model, batch))


def test_weights_in_half_precision_are_computed_in_single():
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model.to(torch.bfloat16), batch)
    v = torch.randn(land.blocks.size)
    expected = cl.hessian(land, engine="double-backward") @ v
    found = cl.hessian(land, engine="layered") @ v
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-5 * expected.norm()  # float32


@pytest.mark.parametrize("loss", ["mse", "own"])
def test_other_losses(loss):
    model = nets.GPT(7, 5, 8, 2, 2, norm="pre").double()
    ids = torch.randint(0, 7, (3, 5))
    target = torch.randn(3, 5, 7, dtype=torch.float64)
    function = "mse" if loss == "mse" else lambda output, target: (output - target).pow(4).sum(-1)
    agree(cl.Landscape(model, (ids, target), function))


class Shaped(nets.GPT):
    """With a bias in its head, whose logits it shapes."""

    shape = staticmethod(lambda logits: logits)

    def __init__(self):
        super().__init__(11, 5, 8, 2, 2, norm="pre", tied=True)
        self.readout = nn.Linear(11, 11)

    def forward(self, ids):
        return self.shape(self.readout(super().forward(ids)))


SHAPES = {
    "scaled": lambda logits: logits * 0.3,
    "divided": lambda logits: logits / 2,
    "capped": lambda logits: 1.5 * torch.tanh(logits / 1.5),
    "capped and scaled": lambda logits: (torch.tanh((logits * 0.5).double()) * 2) / 3,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shaped_logits_never_exist_as_a_whole(name, monkeypatch):
    monkeypatch.setattr(layered, "chunk_of_tokens", lambda *_: 4)
    model = randomise(Shaped().double(), torch.Generator().manual_seed(1))
    model.shape = SHAPES[name]
    land = cl.Landscape(model, torch.randint(0, 11, (3, 5)))
    assert not cut(land).projection.shaping.plain
    assert cut(land).projection.bias == "readout.bias"
    for quantity in QUANTITIES.values():
        agree(land, quantity)


def test_logits_that_are_shaped_otherwise_exist():
    model = randomise(Shaped().double(), torch.Generator().manual_seed(1))
    for shape in (torch.sin, lambda x: x + 1, lambda x: x * x, lambda x: x * model.table):
        model.table = torch.arange(1.0, 12, dtype=torch.float64)
        model.shape = shape
        land = cl.Landscape(model, torch.randint(0, 11, (3, 5)))
        assert cut(land).projection is None
        agree(land)


def test_soft_capped_logits_of_gemma():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=12,
        final_logit_softcapping=1.5,
        attn_implementation="sdpa",
        pad_token_id=0,
    )
    model = transformers.Gemma3ForCausalLM(config).double().eval()
    for module in model.modules():  # in its own precision: that of Transformers computes in float32
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_gemma_norm, module)
    land = cl.Landscape(model, torch.randint(3, 11, (3, 5)))
    assert cut(land).projection.shaping == head.Shaping(1.5, 1 / 1.5)
    for quantity in QUANTITIES.values():
        agree(land, quantity)


def _gemma_norm(module, x):
    return (1 + module.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps)


# -- models of one's own


class Mixing(nn.Module):
    """Layers shared, called twice, given what earlier layers made; code with weights of its own between them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Twin() for _ in range(3))
        self.between = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        table = x.mean(1, keepdim=True) * self.between
        x, first = self.layers[0](x, table)
        x, second = self.layers[1](x * self.between, table + first)
        x, first = self.layers[0](x, second)
        x, _ = self.layers[2](x, table)
        return self.head(x + first)


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)

    def forward(self, x, table):
        y = F.gelu(self.up(self.norm(x)) + table)
        return x + y, y * table


def test_values_that_run_beside_the_chain():
    torch.manual_seed(1)
    model = Mixing().double()
    land = cl.Landscape(model, torch.randint(0, 7, (2, 4)))
    assert cut(land).projection is not None
    for quantity in QUANTITIES.values():
        agree(land, quantity)
    for name in ("between", "layers.0.up.weight", "layers.2.norm.weight"):
        agree(land, cl.hessian, name, "layers.1.up.weight")
        agree(land, cl.hessian, "layers.1.up.weight", name)


class Secretive(nn.Module):
    """Its second layer takes from the first what is no argument."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Twin() for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, ids):
        x, self.layers[0].seen = self.layers[0](self.embed(ids), torch.ones(6, dtype=torch.float64))
        x, _ = self.layers[1](x, self.layers[0].seen.detach())
        return self.head(x)


class Aside(Secretive):
    def forward(self, ids):
        x = self.embed(ids)
        kept = []
        for layer in self.layers:
            layer.forward = _stash(layer, kept)
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            for layer in self.layers:
                del layer.forward
        return self.head(x)


def _stash(layer, kept):
    def forward(x):
        x, y = Twin.forward(layer, x, kept[-1] if kept else torch.ones(6, dtype=x.dtype))
        kept.append(y)
        return x

    return forward


def test_a_detached_value_is_a_constant():
    agree(cl.Landscape(Secretive().double(), torch.randint(0, 7, (2, 4))))


class Whisper(Twin):
    heard = None

    def forward(self, x):
        table = torch.ones(6, dtype=x.dtype) if Whisper.heard is None else Whisper.heard
        x, Whisper.heard = super().forward(x, table)
        return x


class Whispering(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Whisper() for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, ids):
        x, Whisper.heard = self.embed(ids), None
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_values_handed_on_in_secret_are_noticed():
    land = cl.Landscape(Whispering().double(), torch.randint(0, 7, (2, 4)))
    with pytest.raises(Uncut):
        cl.hessian(land, engine="layered") @ vectors(land, 1)[:, 0]


def test_hooks_of_the_user_run_and_count():
    model, batch = MODELS["gpt2"]()
    hooked = model.transformer.h[0].register_forward_hook(lambda module, args, out: out * 1.5)
    agree(cl.Landscape(model, batch))
    hooked.remove()


def test_the_model_is_left_alone_after_an_error(monkeypatch):
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model, batch)
    H = cl.hessian(land, engine="layered")
    v = vectors(land, 1)[:, 0]
    H @ v
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            H @ v
    for module in model.modules():
        assert "forward" not in module.__dict__
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_an_inner_split_is_refused():
    with pytest.raises(ValueError, match="split at the model's output"):
        cl.functional(landscape("gpt2"), engine="layered", at="transformer.h.0")
