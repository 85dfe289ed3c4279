"""Each trap is met before the run, with one message, and the model is left as it was."""

import copy
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvlens as cl
from curvlens import nets
from models import MODELS


def state(model):
    """All that must not change, down to the bits."""
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "same objects": {n: id(p) for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in model.named_modules()},
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "switches": (
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_autocast_enabled("cpu"),
        ),
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


@pytest.fixture
def net():
    model, batch = MODELS["own_gpt"]()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model, batch


@pytest.mark.parametrize("name", ["gpt2", "bert", "torch_encoder", "t5"])
@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse"])
def test_the_model_is_left_as_it_was(name, engine):
    model, batch = MODELS[name]()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state(model)
    land = cl.Landscape(model, batch)
    v = torch.randn(land.blocks.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    land.value(), land.gradient()
    for operator in (cl.hessian, cl.gauss_newton, cl.functional):
        operator(land, engine=engine) @ v
    cl.fisher(land, "sampled") @ v
    inner = next(
        path for path, m in model.named_modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__
    )
    cl.gauss_newton(land, at=inner) @ v
    after = state(model)
    for what in before:
        assert equal(before[what], after[what]), what


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [1, 3, 4])
def test_also_after_an_exception_or_an_interrupt(net, error, calls):
    model, batch = net
    land = cl.Landscape(model, batch)
    before = state(model)
    count = 0

    def interrupt(module, inputs, output):
        nonlocal count
        count += 1
        if count == calls:
            raise error("stop")

    handle = model.get_submodule("blocks.1").register_forward_hook(interrupt)
    with pytest.raises(error):
        cl.gauss_newton(land, at="blocks.0") @ torch.randn(
            land.blocks.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
    assert count == calls
    handle.remove()
    after = state(model)
    for what in before:
        assert equal(before[what], after[what]), what


@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse", "layered"])
def test_also_after_an_interrupt_amid_an_exchange_of_weights(net, engine, monkeypatch):
    from torch.nn.utils._named_member_accessor import NamedMemberAccessor

    model, batch = net
    land = cl.Landscape(model, batch)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = cl.hessian(land, engine=engine) @ v
    before = state(model)
    exchange = NamedMemberAccessor.swap_tensors_dict

    def interrupted(self, *args, **options):
        exchange(self, *args, **options)
        raise KeyboardInterrupt  # the weights are exchanged, and those who did it do not know which were there

    monkeypatch.setattr(NamedMemberAccessor, "swap_tensors_dict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cl.hessian(land, engine=engine) @ v
    monkeypatch.undo()
    after = state(model)
    for what in before:
        assert equal(before[what], after[what]), what
    assert torch.equal(cl.hessian(land, engine=engine) @ v, expected)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer that interrupts")
@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse", "layered"])
def test_also_after_interrupts_at_any_moment(net, engine):
    """Wherever Ctrl-C strikes: the model is what it was, and the next product is right."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread is interrupted")
    model, batch = net
    land = cl.Landscape(model, batch)
    v = torch.randn(land.blocks.size, 2, dtype=torch.float64)
    start = time.perf_counter()
    expected = cl.hessian(land, engine=engine) @ v
    duration = time.perf_counter() - start
    before = state(model)
    moments, interrupts, armed = random.Random(0), 0, False

    def strike(number, frame):
        if armed:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(40):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, duration))
                cl.hessian(land, engine=engine) @ v
                armed = False
            except (
                KeyboardInterrupt,
                RuntimeError,
            ):  # torch reports one that strikes its own code as its error
                armed = False
                interrupts += 1
            after = state(model)
            for what in before.keys() - {"python"}:
                assert equal(before[what], after[what]), what
        assert torch.equal(cl.hessian(land, engine=engine) @ v, expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupts > 0


def test_what_a_forward_pass_writes_on_its_modules_is_dropped(net):
    _, (ids, labels) = net

    class Remembering(nets.GPT):
        def forward(self, ids):
            self.last = super().forward(ids)  # with its graph
            self._buffers["late"] = torch.ones(1)
            return self.last

    model = Remembering(11, 5, 8).double()
    cl.Landscape(model, (ids, labels)).gradient()
    assert not hasattr(model, "last")
    assert not hasattr(model, "late")


def test_a_data_loader_moves_no_random_state(net):
    model, (ids, labels) = net
    loader = DataLoader(TensorDataset(ids, labels), batch_size=2)
    before = torch.get_rng_state()
    land = cl.Landscape(model, loader, "next-token")
    land.parts(2)
    list(land.pieces())
    land.value()
    assert torch.equal(torch.get_rng_state(), before)

    class Shuffled(torch.utils.data.Sampler):  # by the global random state
        def __iter__(self):
            return iter(torch.randperm(len(ids)).tolist())

        def __len__(self):
            return len(ids)

    shuffled = DataLoader(TensorDataset(ids, labels), sampler=Shuffled())
    torch.manual_seed(0)  # under which the first three permutations begin differently
    with pytest.raises(ValueError, match="got another first batch the second time"):
        cl.Landscape(model, shuffled, "next-token")


def test_it_works_whatever_is_switched_outside(net):
    model, batch = net
    land = cl.Landscape(model, batch)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = cl.hessian(land) @ v
    with torch.no_grad():
        assert torch.equal(cl.hessian(land) @ v, expected)
    with torch.inference_mode():
        assert torch.equal(cl.hessian(land) @ v, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cl.hessian(land) @ v, expected)


def test_writing_into_a_buffer_is_undone(net):
    _, (ids, labels) = net

    class Counting(nets.GPT):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, ids):
            self.seen += 1
            return super().forward(ids)

    model = Counting(11, 5, 8).double()
    cl.Landscape(model, (ids, labels)).gradient()
    assert model.seen == 0


def test_active_dropout():
    model, batch = MODELS["gpt2"]()
    model.train()
    expected = r"active dropout \(p = 0.1\) in 'transformer.drop'; call model.eval\(\)"
    with pytest.raises(ValueError, match=expected):
        cl.Landscape(model, batch)
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    data = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="active dropout"):
        cl.Landscape(encoder, data)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5)
    with pytest.raises(ValueError, match="active dropout"):
        cl.Landscape(attention, (torch.randn(2, 3, 8), torch.randn(2, 3, 8)))


def test_batch_norm_in_training_mode():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    data = torch.randn(5, 3), torch.randn(5, 4)
    with pytest.raises(ValueError, match="batch normalisation in training mode in '1'"):
        cl.Landscape(model, data)
    land = cl.Landscape(model.eval(), data)
    assert cl.hessian(land).shape == (24, 24)


def test_weights_that_have_no_derivative():
    model = nn.Linear(3, 2)
    data = torch.randn(4, 3), torch.randn(4, 2)
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    with pytest.raises(ValueError, match=r"got 'codes' in torch.int8; load the model without quantisation"):
        cl.Landscape(model, data)
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), {"0"})
    with pytest.raises(ValueError, match="the quantised module '0'"):
        cl.Landscape(quantised, data)
    with pytest.raises(ValueError, match="on the meta device; load the weights first"):
        cl.Landscape(nn.Linear(3, 2, device="meta"), data)
    with pytest.raises(ValueError, match=r"got none; call model.requires_grad_\(\)"):
        cl.Landscape(nn.Linear(3, 2).requires_grad_(False), data)


def test_attention_without_second_derivatives():
    model, batch = MODELS["gpt2"]()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r'got \'flash_attention_2\'; call model.set_attn_implementation\("sdpa"\)'
    ):
        cl.Landscape(model, batch)


def test_a_random_loss(net):
    model, batch = net

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            logits = self.model(ids)
            return logits + torch.randn_like(logits)

    noisy = Noisy()
    land = cl.Landscape(noisy, batch)
    before = state(noisy)
    with pytest.raises(ValueError, match=r"the same loss from the same batch.*call model.eval\(\)"):
        cl.hessian(land) @ torch.zeros(land.blocks.size, dtype=torch.float64)
    assert equal(before, state(noisy))


def test_nan_names_the_first_module(net):
    model, batch = net
    broken = copy.deepcopy(model)

    class Broken(nn.Module):
        def forward(self, x):
            return x / torch.zeros_like(x)

    broken.blocks[1].mlp.register_forward_hook(lambda m, i, o: o / 0)
    with pytest.raises(
        FloatingPointError, match=r"expected a finite loss.*first in the output of 'blocks.1.mlp'"
    ):
        cl.Landscape(broken, batch).value()
    with torch.no_grad():
        model.blocks[0].attn.W_K[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"in the weight 'blocks.0.attn.W_K'"):
        cl.Landscape(model, batch).gradient()


def test_vectors_that_are_not_finite_are_told(net):
    model, batch = net
    land = cl.Landscape(model, batch)
    v = torch.zeros(land.blocks.size, dtype=torch.float64)
    v[3] = float("nan")
    with pytest.raises(FloatingPointError, match="expected finite vectors to multiply, got NaN"):
        cl.hessian(land) @ v


def test_infinite_second_derivatives_are_told():
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    land = cl.Landscape(
        model, (torch.ones(3, 2).double(), torch.ones(3, 1).double()), lambda o, t: o.abs().pow(1.5)[..., 0]
    )
    assert land.value() == 0
    with pytest.raises(
        FloatingPointError, match=r"expected a finite product.*the outputs of all modules are finite"
    ):
        cl.hessian(land) @ torch.ones(2, dtype=torch.float64)


class Square(torch.autograd.Function):
    """Right at second order: its backward is made of differentiable operations on what was saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Once(Square):
    """Its author gave a first derivative alone, as fused kernels do: read as a constant by autograd."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Detached(Square):
    """Wrong at second order without a word."""

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0].detach() * g


def squared(function):
    class Model(nn.Linear):
        def forward(self, x):
            return function(super().forward(x))

    torch.manual_seed(2)
    data = torch.ones(3, 2).double(), torch.ones(3, 1).double()
    return cl.Landscape(Model(2, 1).double(), data), torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("function", [Once, Detached])
def test_an_autograd_function_without_second_derivative(function):
    land, v = squared(function.apply)
    with pytest.raises(RuntimeError, match=rf"differentiated twice.*{function.__name__}.*by plain PyTorch"):
        cl.hessian(land) @ v


def test_an_autograd_function_with_second_derivative():
    land, v = squared(Square.apply)
    plain, _ = squared(torch.square)
    torch.testing.assert_close(cl.hessian(land) @ v, cl.hessian(plain) @ v)
    with pytest.raises(RuntimeError, match=r'use engine="double-backward"'):
        cl.hessian(land, engine="forward-over-reverse") @ v


def test_no_vectors_give_none(net):
    model, batch = net
    land = cl.Landscape(model, batch)
    nothing = torch.zeros(land.blocks.size, 0, dtype=torch.float64)
    assert (cl.hessian(land) @ nothing).shape == nothing.shape


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_fully_masked_sequence_adds_nothing(name):
    model, batch = MODELS[name]()
    more = {key: torch.cat([tensor, tensor[:1]]) for key, tensor in batch.items()}
    more["attention_mask"][-1] = 0
    more["labels"][-1] = -100
    v = torch.randn(cl.Landscape(model, batch).blocks.size, dtype=torch.float64)
    expected = cl.hessian(cl.Landscape(model, batch)) @ v
    assert (cl.hessian(cl.Landscape(model, more)) @ v - expected).norm() < 1e-12 * expected.norm()


def test_ids_and_labels_out_of_range():
    model, batch = MODELS["gpt2"]()
    with pytest.raises(ValueError, match=r"token ids from 0 to 10, got 3 to 99; does the tokenizer belong"):
        cl.Landscape(model, torch.tensor([[3, 99, 4]]))
    own, _ = MODELS["own_gpt"]()
    with pytest.raises(ValueError, match="token ids from 0 to 10"):
        cl.Landscape(own, torch.tensor([[3, 99, 4]]))
    bad = {**batch, "labels": batch["labels"].clone()}
    bad["labels"][0, 2] = 50
    with pytest.raises(ValueError, match=r"labels from 0 to 10 or -100, got .* to 50"):
        cl.Landscape(model, bad).value()


def test_nothing_to_score():
    model, batch = MODELS["gpt2"]()
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(ValueError, match="at least one scored token, got none"):
        cl.Landscape(model, empty)
    with pytest.raises(ValueError, match="at least one scored token, got none"):
        cl.Landscape(model, torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one batch, got none"):
        cl.Landscape(model, [])


def test_batches_that_cannot_be_read():
    model, _ = MODELS["linear_mlp"]()
    with pytest.raises(ValueError, match="expected targets for the loss 'mse'"):
        cl.Landscape(model, torch.randn(3, 4), "mse")
    with pytest.raises(ValueError, match="expected 'labels' in the batch"):
        cl.Landscape(model, {"x": torch.randn(3, 4)}, "mse")
    with pytest.raises(TypeError, match="expected a batch or batches"):
        cl.Landscape(model, 3)
    with pytest.raises(TypeError, match="expected a batch of token ids"):
        cl.Landscape(model, ["text"], "next-token")
    with pytest.raises(TypeError, match=r"got list of 3; make it a tensor: torch.tensor\(...\)"):
        cl.Landscape(model, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(TypeError, match=r"got int; make it a tensor"):
        cl.Landscape(model, [1, 2, 3])
    with pytest.raises(TypeError, match=r"got TensorDataset; wrap it in a torch.utils.data.DataLoader"):
        cl.Landscape(model, TensorDataset(torch.zeros(2, 3)))
    with pytest.raises(
        TypeError, match=r"expected a floating-point dtype such as torch.float64, got 'float64'"
    ):
        cl.Landscape(model, (torch.zeros(2, 4), torch.zeros(2, 3)), dtype="float64")
    with pytest.raises(ValueError, match="expected kind 'empirical' or 'sampled'"):
        cl.fisher(cl.Landscape(model, (torch.zeros(2, 4).double(), torch.zeros(2, 3).double())), "true")
    with pytest.raises(ValueError, match="expected an engine out of double-backward"):
        cl.hessian(cl.Landscape(model, (torch.zeros(2, 4).double(), torch.zeros(2, 3).double())), "fast")
    with pytest.raises(ValueError, match="expected the path of a module"):
        cl.functional(
            cl.Landscape(model, (torch.zeros(2, 4).double(), torch.zeros(2, 3).double())), at="layer.9"
        )


def test_compositions_of_torch_that_this_package_trusts():
    """Forward over reverse and double backward are right through a layer norm with a learned weight on every torch."""
    x = torch.randn(5, 4, dtype=torch.float64)
    theta = torch.randn(24, dtype=torch.float64)

    def normed(t, norm):
        return norm(x @ t[8:].view(4, 4), t[:4], t[4:8]).sin().sum()

    def library(h, w, b):
        return nn.functional.layer_norm(h, (4,), w, b)

    def by_hand(h, w, b):
        centred = h - h.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b

    truth = torch.autograd.functional.hessian(lambda t: normed(t, by_hand), theta)
    double = torch.autograd.functional.hessian(lambda t: normed(t, library), theta)
    forward = torch.func.jacfwd(torch.func.grad(lambda t: normed(t, library)))(theta)
    torch.testing.assert_close(double, truth, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(forward, truth, rtol=1e-11, atol=1e-11)
