"""The four maps tile by tile, against float64 autodiff of attention written out."""

import itertools
import math

import pytest
import torch

from curvlens.kernels import Pattern, attention, backward_tangent, chunked, forward, jvp
from plain_attention import LAYOUTS, MASKS, PATTERNS, draw, error, four_maps, oracle


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in each direction at small lengths."""
    monkeypatch.setattr(chunked, "CPU_TILE", 64)
    monkeypatch.setattr(chunked, "KEYS", 8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_the_four_maps_match_autodiff(small_tiles, layout, kind):
    for seed, (causal, window) in enumerate(PATTERNS):
        pattern = Pattern(0.7, causal, window)
        at, tangents, mask = draw(layout, kind, seed)
        assert error(four_maps(at, tangents, mask, pattern), oracle(at, tangents, mask, pattern)) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_in_other_precisions(small_tiles, dtype, tolerance):
    """Sums are kept in float32; what is left in half precision is the rounding of o, ȯ and the results."""
    at, tangents, mask = draw(LAYOUTS[1], "keys", dtype=dtype)
    pattern = Pattern(0.5)
    found = four_maps(at, tangents, mask, pattern)
    assert {x.dtype for x in found} == {dtype}
    exact = oracle([x.double() for x in at], [x.double() for x in tangents], mask, pattern)
    assert error([x.double() for x in found], exact) < tolerance


def test_large_scores(small_tiles):
    """Scores of several thousand: softmax is a choice, and nothing overflows."""
    at, tangents, mask = draw(LAYOUTS[0], "keys", size=60.0)
    pattern = Pattern(1.0, causal=True)
    # derivatives are nearly zero beside their terms: rounding of scores of 1e4, times dP of 1e4, times q of 1e2
    for x, y in zip(four_maps(at, tangents, mask, pattern), oracle(at, tangents, mask, pattern), strict=True):
        assert (x - y).abs().max() < 1e-6
    at32, tangents32 = [x.float() for x in at], [x.float() for x in tangents]
    assert all(x.isfinite().all() for x in four_maps(at32, tangents32, mask, pattern))


def test_an_offset_that_all_keys_share_costs_no_digits(small_tiles):
    at, tangents, _ = draw((1, 2, 2, 40, 40, 8, 8), "none")
    at[1] += 30.0
    tangents[1] += 30.0
    at, tangents = [x.float() for x in at], [x.float() for x in tangents]
    pattern = Pattern(8**-0.5, causal=True)
    exact = oracle([x.double() for x in at], [x.double() for x in tangents], None, pattern)
    found = four_maps(at, tangents, None, pattern)
    assert error(found[1:2], exact[1:2]) < 2e-5
    assert error(found, exact) < 2e-4


def test_several_tangents_at_once_are_those_one_by_one(small_tiles):
    at, _, mask = draw(LAYOUTS[1], "keys")
    *qkv, do = at
    pattern = Pattern(0.5)
    draws = [draw(LAYOUTS[1], "none", seed)[1] for seed in range(3)]
    *dots, do_dot = [torch.stack(stack) for stack in zip(*draws, strict=True)]
    o, lse = forward(*qkv, mask, pattern)
    o_dot, lse_dot = jvp(*qkv, o, lse, *dots, mask, pattern)
    second = backward_tangent(*qkv, o, lse, do, o_dot, lse_dot, *dots, do_dot, mask, pattern)
    for t, tangents in enumerate(draws):
        one = four_maps(at, tangents, mask, pattern)
        assert error([o_dot[t], *(x[t] for x in second)], [one[1], *one[5:]]) < 1e-14


def test_the_second_order_map_is_symmetric(small_tiles):
    """`⟨a, H b⟩ = ⟨b, H a⟩` for the Hessian of `⟨do, o⟩` in `q, k, v, do`."""
    for layout, kind in itertools.product(LAYOUTS[:3], ["none", "full"]):
        at, a, mask = draw(layout, kind, 1)
        b = draw(layout, "none", 2)[1]
        pattern = Pattern(0.9, causal=kind == "none")
        images = []
        for tangents in (a, b):
            _, o_dot, *_, dq_dot, dk_dot, dv_dot = four_maps(at, tangents, mask, pattern)
            images.append([dq_dot, dk_dot, dv_dot, o_dot])
        left = sum((x * y).sum() for x, y in zip(a, images[1], strict=True))
        right = sum((x * y).sum() for x, y in zip(b, images[0], strict=True))
        assert abs(left - right) < 1e-11 * abs(left)


def test_every_entry_of_the_results_is_written(monkeypatch, small_tiles):
    """New buffers hold NaN before; none may be left."""
    at, tangents, mask = draw(LAYOUTS[1], "full")
    expected = four_maps(at, tangents, mask, Pattern(0.5, True, 3))
    original = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size, **o: original(self, *size, **o).fill_(math.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda x, **o: torch.full_like(x, math.nan, **o))
    for x, y in zip(four_maps(at, tangents, mask, Pattern(0.5, True, 3)), expected, strict=True):
        assert torch.equal(x, y)


def test_memory_is_linear_in_the_length():
    """Under a tenth of the plain form's at 1024 tokens, and from there on twice for twice the length."""
    from torch.profiler import ProfilerActivity, profile

    def peak(run):
        run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            run()
        now = most = 0
        for event in sorted(
            (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"),
            key=lambda e: e.start_ns(),
        ):
            now += event.nbytes()
            most = max(most, now)
        return most

    def product(length, attend):
        at = [torch.randn(1, 4, length, 16) for _ in range(3)]
        gradient = torch.func.grad(lambda *a: attend(*a, is_causal=True).pow(2).sum(), (0, 1, 2))
        return peak(lambda: torch.func.jvp(gradient, tuple(at), tuple(at)))

    def with_math(*a, **options):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*a, **options)

    one, two = product(1024, attention), product(2048, attention)
    assert one < product(1024, with_math) / 10
    assert two < 2.1 * one
