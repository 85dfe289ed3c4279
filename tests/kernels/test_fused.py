"""The kernels for a GPU against float64 autodiff: on one where there is one, else by Triton's interpreter,
which conftest.py asks for.

On a machine with a GPU: `python -m pytest tests/kernels/test_fused.py --run-slow`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from curvlens.kernels import Pattern, chunked, fused
from plain_attention import draw, error, oracle

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# B, H, G, L, M, d, e: odd lengths, one token, grouped heads, unequal lengths and sizes, sizes that are no power of 2
LAYOUTS = [
    (2, 2, 2, 37, 37, 16, 16),
    (1, 4, 2, 19, 40, 24, 16),
    (2, 2, 1, 1, 1, 16, 20),
    (1, 3, 1, 33, 18, 16, 16),
]
PATTERNS = [(False, None), (True, None), (False, 5), (True, 5)]
MASKS = ["none", "keys", "full", "bias", "heads"]


def second_order(case, mask, pattern, dtype, count):
    """`ȯ, l̇, dq̇, dk̇, dv̇` of the kernels, with the primals of plain PyTorch, for the tangent and its multiples."""
    (q, k, v, do), dots = ([x.to(DEVICE, dtype) for x in part] for part in case)
    mask = None if mask is None else mask.to(DEVICE, mask.dtype if mask.dtype == torch.bool else dtype)
    o, lse = chunked.forward(q, k, v, mask, pattern)
    stacks = [torch.stack([(i + 1) * x for i in range(count)]) for x in dots]
    return fused._second(fused.jvp, fused.backward_tangent, q, k, v, o, lse, do, stacks, mask, pattern)


def against_autodiff(layout, kind, causal, window, dtype=torch.float32, count=1, seed=0, **more):
    pattern = Pattern(0.3, causal, window)
    at, dots, mask = draw(layout, kind, seed, **more)
    found = second_order((at, dots), mask, pattern, dtype, count)
    at, dots = ([x.to(dtype).double() for x in part] for part in (at, dots))  # what the kernels were given
    expected = oracle(at, dots, mask, pattern)
    exact = [expected[1], *expected[-3:]]
    for n in range(count):
        ours = [x[n].double().cpu() / (n + 1) for x in (found[0], *found[2:])]
        assert error(ours, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("causal", "window"), PATTERNS)
def test_every_layout_and_pattern(layout, causal, window):
    against_autodiff(layout, "none", causal, window)


@pytest.mark.parametrize("kind", MASKS[1:])
def test_every_mask(kind):
    against_autodiff(LAYOUTS[0], kind, True, None)
    against_autodiff(LAYOUTS[1], kind, False, None)


@pytest.mark.parametrize("count", [2, 3])
def test_several_tangents_share_a_pass(count):
    against_autodiff(LAYOUTS[1], "full", False, None, torch.float16, count=count)


def test_heads_too_large_for_both_results_at_once(monkeypatch):
    monkeypatch.setattr(fused, "FITTING", 8)
    against_autodiff(LAYOUTS[0], "none", True, None, count=2)


def test_half_precision():
    against_autodiff(LAYOUTS[0], "keys", True, None, torch.float16)


def test_an_offset_that_all_keys_share_costs_no_digits():
    at, dots, _ = draw(LAYOUTS[0], "none")
    at[1] += 30.0
    dots[1] += 30.0
    pattern = Pattern(0.25, causal=True)
    found = second_order((at, dots), None, pattern, torch.float32, 1)
    at, dots = ([x.float().double() for x in part] for part in (at, dots))
    expected = oracle(at, dots, None, pattern)
    ours = [x[0].double().cpu() for x in (found[0], *found[2:])]
    assert error(ours, [expected[1], *expected[-3:]]) < 1e-4  # scores of a hundred in float32


def test_without_a_tangent_of_the_gradient():
    """As a double backward asks for it."""
    at, dots, _ = draw(LAYOUTS[1], "none")
    pattern = Pattern(0.3)
    (q, k, v, do), (q_dot, k_dot, v_dot, _) = ([x.float().to(DEVICE) for x in part] for part in (at, dots))
    o, lse = chunked.forward(q, k, v, None, pattern)
    stack = [x[None] for x in (q_dot, k_dot, v_dot)]
    o_dot, lse_dot = fused.jvp(q, k, v, o, lse, *stack, None, pattern)
    found = fused.backward_tangent(q, k, v, o, lse, do, o_dot, lse_dot, *stack, None, None, pattern)
    expected = oracle(at, [*dots[:3], torch.zeros_like(dots[3])], None, pattern)[-3:]
    assert error([x[0].double().cpu() for x in found], expected) < 2e-5


def test_every_element_is_written():
    """Results do not depend on what was in their memory."""
    at, dots, mask = draw(LAYOUTS[0], "full")
    pattern = Pattern(0.3, True)
    first = second_order((at, dots), mask, pattern, torch.float32, 2)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        second = second_order((at, dots), mask, pattern, torch.float32, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_map_is_symmetric():
    """`⟨a, S b⟩ = ⟨b, S a⟩` for the Hessian S of `⟨do, attention(q, k, v)⟩`."""
    at, a, mask = draw(LAYOUTS[0], "keys", seed=1)
    _, b, _ = draw(LAYOUTS[0], "keys", seed=2)
    pattern = Pattern(0.3, True)
    images = {}
    for name, dots in (("a", a), ("b", b)):
        o_dot, _, *rest = second_order((at, dots), mask, pattern, torch.float32, 1)
        images[name] = [x[0].double().cpu() for x in (*rest, o_dot)]
    ab = sum((x * y).sum() for x, y in zip(a, images["b"], strict=True))
    ba = sum((x * y).sum() for x, y in zip(b, images["a"], strict=True))
    assert abs(ab - ba) < 1e-4 * abs(ab)


def test_kernels_that_disagree_are_left_alone(monkeypatch):
    monkeypatch.setattr(fused, "jvp", lambda q, k, v, o, lse, *rest: (2 * o[None], lse[None]))
    fused._agrees.cache_clear()
    with pytest.warns(
        UserWarning, match=r"expected attention kernels \(Triton, torch.float32, heads of 16\)"
    ):
        assert not fused._agrees("Triton", torch.device(DEVICE), torch.float32, 16, 16, False)
    fused._agrees.cache_clear()


def test_what_the_kernels_take():
    half = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16)
    assert not fused.serves(half)  # on a CPU
    if GPU:
        assert fused.serves(half.cuda())
    for other in (half.double(), half[..., :8]):
        assert not fused.serves(other.to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_check_before_first_use(dtype):
    fused._agrees.cache_clear()
    assert fused._agrees("Triton", torch.device(DEVICE), dtype, 16, 24, True, True, "torch.bool")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_on_the_gpu(dtype, size):
    for causal, kind in ((True, "none"), (False, "keys")):
        against_autodiff((2, 4, 2, 301, 301, size, size), kind, causal, None, dtype, count=3)
    device = torch.device("cuda")
    assert fused._agrees("library", device, dtype, size, size, True)
    assert fused._agrees("Triton", device, dtype, size, size, True)
