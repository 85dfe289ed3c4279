"""Products of every curvature matrix against dense double backward, on a tiny instance of every family."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import curvlens as cl
from curvlens import nets
from models import MODELS
from reference import Reference, hessian_of, rows_one_by_one

# float64 sums of a few thousand terms of order one: 1e-13 in the worst case; the issue is a wrong term, not rounding
TIGHT = 1e-10
ENGINES = ("double-backward", "forward-over-reverse")
_known = {}


def landscape(name):
    model, batch = MODELS[name]()
    return cl.Landscape(model, batch)


def reference(name, what):
    if (name, what) not in _known:
        model, batch = MODELS[name]()
        land = cl.Landscape(model, batch)
        _known[name, what] = getattr(Reference(model, batch, land.loss.name, land.blocks), what)().detach()
    return _known[name, what]


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def names_of(land, count=4):
    """A few blocks spread over the model, heads among them."""
    names = land.blocks.heads().names
    return [names[i * (len(names) - 1) // (count - 1)] for i in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradient(name):
    land = landscape(name)
    model, batch = MODELS[name]()
    plain = Reference(model, batch, land.loss.name, land.blocks)
    assert land.value().item() == pytest.approx(plain.value().item(), rel=1e-12)
    flat = torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(
                plain.leaves,
                torch.autograd.grad(plain.value(), plain.leaves, allow_unused=True),
                strict=True,
            )
        ]
    )
    assert error(land.gradient(), flat[plain.order]) < TIGHT


def test_the_reference_is_a_row_by_row_double_backward():
    model, batch = MODELS["gpt2"]()
    plain = Reference(model, batch, "next-token", cl.Landscape(model, batch).blocks)
    slow = hessian_of(plain.value(), plain.leaves, rows=rows_one_by_one)[plain.order][:, plain.order]
    assert error(reference("gpt2", "hessian"), slow) < 1e-14


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_hessian_is_that_of_double_backward(name, engine):
    H = cl.hessian(landscape(name), engine=engine)
    assert H.engine == engine
    assert error(H.dense(), reference(name, "hessian")) < TIGHT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_gauss_newton_and_functional_parts(name, engine):
    land = landscape(name)
    outer, whole = reference(name, "outer"), reference(name, "hessian")
    assert error(cl.gauss_newton(land, engine=engine).dense(), outer) < TIGHT
    functional = cl.functional(land, engine=engine).dense()
    assert (functional - (whole - outer)).norm() < TIGHT * whole.norm()


@pytest.mark.parametrize("name", MODELS)
def test_empirical_fisher(name):
    assert error(cl.fisher(landscape(name)).dense(), reference(name, "fisher")) < TIGHT


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_block(name):
    land = landscape(name)
    for what, operator in (("hessian", cl.hessian(land)), ("outer", cl.gauss_newton(land))):
        whole = reference(name, what)
        for row in names_of(land):
            for column in names_of(land):
                i = land.blocks.positions(land.blocks.select(row))
                j = land.blocks.positions(land.blocks.select(column))
                block = operator.block(row, column)
                assert block.shape == (len(i), len(j))
                assert (block.dense() - whole[i][:, j]).norm() <= TIGHT * whole.norm()
                assert (block.T.dense() - whole[j][:, i]).norm() <= TIGHT * whole.norm()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "t5", "torch_transformer"])
def test_vectors_matrices_and_dictionaries_agree(name, engine):
    land = landscape(name)
    H = cl.hessian(land, engine=engine)
    vectors = torch.randn(land.blocks.size, 3, dtype=torch.float64)
    images = H @ vectors
    assert error(images, reference(name, "hessian") @ vectors) < TIGHT
    assert error(H @ vectors[:, 1], images[:, 1]) < TIGHT
    # linear and symmetric
    a, b = vectors[:, 0], vectors[:, 1]
    assert error(H @ (2 * a - 3 * b), 2 * images[:, 0] - 3 * images[:, 1]) < TIGHT
    assert abs(a @ (H @ b) - b @ (H @ a)) < TIGHT * a.norm() * images[:, 1].norm()
    by_block = H @ land.blocks.split(a)
    assert set(by_block) == set(land.blocks.names)
    assert error(land.blocks.join(by_block), images[:, 0]) < TIGHT
    by_parameter = H @ land.blocks.to_parameters(a)
    assert set(by_parameter) == {n for n, p in land.model.named_parameters() if p.requires_grad}
    assert error(land.blocks.from_parameters(by_parameter), images[:, 0]) < TIGHT
    one = land.blocks.names[-1]
    padded = torch.zeros_like(a)
    padded[land.blocks.ranges[one]] = a[land.blocks.ranges[one]]
    assert error(land.blocks.join(H @ {one: land.blocks.split(a)[one]}), H @ padded) < TIGHT
    heads = [n for n in land.blocks.heads().names if n.endswith(".head.1")][:2]
    padded = torch.zeros_like(a)
    for head in heads:
        at = land.blocks.positions(land.blocks.select(head))
        padded[at] = a[at]
    parts = {n: a[land.blocks.positions(b)].view(b[0].shape) for n in heads for b in [land.blocks.select(n)]}
    assert error(land.blocks.join(H @ parts), H @ padded) < TIGHT
    block = heads[0].removesuffix(".head.1")
    with pytest.raises(ValueError, match="expected disjoint blocks"):
        H @ {**parts, block: land.blocks.split(a)[block]}


@pytest.mark.parametrize("name", ["gpt2", "bert", "own_gpt"])
def test_finite_differences_of_the_gradient_meet_it_at_their_order(name):
    model, batch = MODELS[name]()
    land = cl.Landscape(model, batch)
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    exact = cl.hessian(land) @ v
    steps = land.blocks.to_parameters(v)
    parameters = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in parameters.items()}

    def gradient(size):
        with torch.no_grad():
            for name, step in steps.items():
                parameters[name].copy_(start[name] + size * step)
        return land.gradient()

    errors = [error((gradient(h) - gradient(-h)) / (2 * h), exact) for h in (2e-3, 1e-3, 5e-4)]
    # central differences: halving the step divides the error by four
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("at", ["transformer.h.0.attn", "transformer.h.1.mlp", "transformer.ln_f"])
def test_split_at_an_inner_module(at):
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model, batch, "next-token")
    plain = Reference(model, batch, "next-token", land.blocks)
    seen = []
    handle = model.get_submodule(at).register_forward_hook(
        lambda m, i, o: seen.append(o[0] if isinstance(o, tuple) else o)
    )
    plain = Reference(model, batch, "next-token", land.blocks)
    handle.remove()
    (inner,) = seen
    (g,) = torch.autograd.grad(plain.value(), inner, retain_graph=True)
    expected = hessian_of((g.detach() * inner).sum(), plain.leaves)[plain.order][:, plain.order]
    scale = reference("gpt2", "hessian").norm()
    for engine in ENGINES:
        assert (cl.functional(land, engine=engine, at=at).dense() - expected).norm() < TIGHT * scale
    outer = cl.gauss_newton(land, at=at)
    assert outer.engine == "double-backward"
    assert (outer.dense() - (reference("gpt2", "hessian") - expected)).norm() < TIGHT * scale
    i = land.blocks.positions(land.blocks.select("layer.0.attn.query"))
    j = land.blocks.positions(land.blocks.select("head"))
    block = cl.gauss_newton(land, at=at).block("layer.0.attn.query", "head").dense()
    assert (block - (reference("gpt2", "hessian") - expected)[i][:, j]).norm() < TIGHT * scale


def test_forward_engine_refuses_an_inner_split():
    land = landscape("gpt2")
    v = torch.zeros(land.blocks.size, dtype=torch.float64)
    with pytest.raises(ValueError, match='use engine="double-backward"'):
        cl.gauss_newton(land, engine="forward-over-reverse", at="transformer.ln_f") @ v


def test_sampled_fisher_averages_to_gauss_newton():
    land = landscape("own_gpt")
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = v @ (cl.gauss_newton(land) @ v)
    draws = torch.stack([v @ (cl.fisher(land, "sampled", seed=s) @ v) for s in range(400)])
    stderr = draws.std() / len(draws) ** 0.5
    assert (
        abs(draws.mean() - expected) < 4 * stderr
    )  # fixed seeds: one draw of four standard errors in 16,000
    assert stderr < 0.1 * expected  # or the test would prove nothing
    again = cl.fisher(land, "sampled", seed=3)
    assert torch.equal(again @ v, again @ v)


def test_sampled_fisher_of_a_regression_averages_to_gauss_newton():
    land = landscape("linear_mlp")
    v = torch.randn(land.blocks.size, dtype=torch.float64)
    expected = v @ (cl.gauss_newton(land) @ v)
    draws = torch.stack([v @ (cl.fisher(land, "sampled", seed=s) @ v) for s in range(400)])
    stderr = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - expected) < 4 * stderr < 0.5 * expected


def test_operator_algebra_of_curvatures():
    land = landscape("own_tied")
    H, Ho, Hf = cl.hessian(land), cl.gauss_newton(land), cl.functional(land)
    v = torch.randn(land.blocks.size, 2, dtype=torch.float64)
    assert error((Ho + Hf) @ v, H @ v) < TIGHT
    assert error((H - 2 * Ho) @ v, H @ v - 2 * (Ho @ v)) < TIGHT
    name = land.blocks.names[0]
    assert error((Ho + Hf).block(name).dense(), H.block(name).dense()) < TIGHT
    assert error(H.diagonal(), H.dense().diagonal()) < TIGHT
    x = v.numpy()
    assert error(torch.from_numpy(H.to_scipy() @ x), H @ v) < TIGHT


def test_a_block_costs_what_it_must():
    """Arithmetic of a product between blocks of the last layer, counted: a small share of a full one."""
    model = nets.GPT(50, 16, 32, depth=6, heads=2, norm="pre").double()
    ids = torch.randint(0, 50, (3, 16))
    land = cl.Landscape(model, ids)

    def flops(engine, rows, columns):
        block = cl.hessian(land, engine=engine).block(rows, columns)
        v = torch.randn(block.shape[1], dtype=torch.float64)
        block @ v
        with FlopCounterMode(display=False) as counter:
            block @ v
        return counter.get_total_flops()

    forward = flops_of_forward(land)
    for engine in (*ENGINES, "layered"):
        full = flops(engine, "*", "*")
        last = flops(engine, "layer.5.mlp.down", "layer.5.mlp.up")
        assert last - forward < 0.2 * (full - forward)  # a sixth of the layers, and only a part of the last
        assert flops(engine, "layer.5", "layer.0") < 0.75 * full
        assert flops(engine, "layer.0", "layer.5") < 0.75 * full


class MatrixProducts(TorchDispatchMode):
    """Counts the products of matrices, but not by zeros: for `x W` PyTorch asks both factors for tangents."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default and all(bool(a.any()) for a in args):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_product_between_two_layers_costs_is_counted_to_the_last_multiplication(engine):
    """A chain `x_{k+1} = tanh(x_k W_k)`, for a row layer r and a column layer c, in products of matrices.

    Nothing is done that the formulas of forward-mode and reverse-mode differentiation do not ask for: no tangent below
    the column layer, no gradient below the row layer or, where it serves for tangents, below the column layer.
    """
    depth, n, d = 5, 7, 8
    torch.manual_seed(0)
    chain = nn.Sequential(
        *(m for _ in range(depth) for m in (nn.Linear(d, d, bias=False), nn.Tanh()))
    ).double()
    land = cl.Landscape(chain, (torch.randn(n, d).double(), torch.randn(n, d).double()))

    def units(r, c):
        block = cl.hessian(land, engine=engine).block(land.blocks.names[r], land.blocks.names[c])
        v = torch.randn(block.shape[1], dtype=torch.float64)
        block @ v
        with MatrixProducts() as counter:
            block @ v
        return counter.count

    top = depth - 1
    for r in range(depth):
        for c in range(depth):
            if engine == "double-backward":
                expected = depth  # forward
                expected += (top - c) + 1  # g back to layer c, and ∂L/∂W_c = x_cᵀ g_c
                expected += 1 + (top - c)  # the tangent of ⟨∂L/∂W_c, v⟩ in g_c, up again to the top
                expected += r > c  # W_r is met on the way up
                expected += r < c  # ⟨∂L/∂W_c, v⟩ by x_c
                expected += (top - r) + 1  # down to layer r
            else:
                expected = depth + 1 + (top - c)  # forward, and the tangent from layer c on
                expected += 2 * (top - r) + (r < c)  # g and its tangent down to layer r, past the moving W_c
                expected += 2 + (r > c)  # ∂L/∂W_r = x_rᵀ g_r and its tangent, in g_r and in x_r if that moves
            assert units(r, c) == expected, (r, c)


def flops_of_forward(land):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for piece in land.pieces():
            land.output(land.parameters(), piece)
    return counter.get_total_flops()


@settings(max_examples=12, deadline=None)
@given(
    depth=st.integers(1, 2),
    heads=st.integers(1, 3),
    head_width=st.integers(1, 4),
    norm=st.sampled_from(["none", "pre", "post"]),
    attention=st.sampled_from(["softmax", "linear"]),
    tied=st.booleans(),
    lengths=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    seed=st.integers(0, 100),
)
def test_any_small_net(depth, heads, head_width, norm, attention, tied, lengths, seed):
    torch.manual_seed(seed)
    model = nets.GPT(
        5, 5, heads * head_width, depth, heads, norm=norm, attention=attention, tied=tied, activation="gelu"
    ).double()
    batches = [torch.randint(0, 5, (1 + i, n)) for i, n in enumerate(lengths)]
    land = cl.Landscape(model, batches)
    tokens = sum(b[:, 1:].numel() for b in batches)
    expected = 0
    for batch in batches:
        plain = Reference(model, (batch, batch), "next-token", land.blocks)
        expected = expected + plain.hessian() * batch[:, 1:].numel() / tokens
    H = cl.hessian(land).dense()
    assert (H - expected).norm() < TIGHT * expected.norm().clamp(min=1e-6)
