"""`attention` under every transform, against torch's plain attention under the same, in float64."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from curvlens.kernels import Pattern, attention, chunked
from plain_attention import plain

B, L, M, D = 2, 9, 11, 4
QKV = (0, 1, 2)
CASES = {"causal": (2, 2), "keys": (4, 2), "bias": (2, 2), "rows": (3, 1)}  # mask: H, G


def math_attention(*tensors, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def written_out(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """Second derivatives of torch's are NaN in rows that see no key; these are zero."""
    return plain(q, k, v, attn_mask, Pattern(q.shape[-1] ** -0.5, is_causal))


class Case:
    def __init__(self, kind):
        H, G = CASES[kind]
        g = torch.Generator().manual_seed(1)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.at = (draw(B, H, L, D), draw(B, G, M, D), draw(B, G, M, D))
        self.tangents = tuple(draw(*x.shape) for x in self.at)
        self.weight = draw(B, H, L, D)
        mask = {
            "causal": None,
            "keys": torch.rand(B, 1, 1, M, generator=g) > 0.3,
            "bias": draw(1, H, L, M),
            "rows": torch.rand(L, M, generator=g) > 0.6,
        }[kind]
        if kind == "rows":
            mask[3] = False
        self.options = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": H != G}
        self.stack = tuple(torch.stack([t, t**2, t.sin()]) for t in self.tangents)

    def loss(self, attend):
        """Curved in the output, and of two attentions."""

        def value(*at):
            first = attend(*at, **self.options)
            return (first * self.weight).sum().sin() + (
                attend(at[0] + first, *at[1:], **self.options) ** 3
            ).sum()

        return value


TRANSFORMS = {}


def transform(function):
    TRANSFORMS[function.__name__] = function
    return function


@transform
def value(c, attend):
    return attend(*c.at, **c.options)


@transform
def grad_(c, attend):
    return grad(c.loss(attend), QKV)(*c.at)


@transform
def vjp_(c, attend):
    return vjp(lambda *a: attend(*a, **c.options), *c.at)[1](c.weight)


@transform
def jvp_(c, attend):
    return jvp(lambda *a: attend(*a, **c.options), c.at, c.tangents)


@transform
def jvp_of_grad(c, attend):
    return jvp(grad(c.loss(attend), QKV), c.at, c.tangents)


@transform
def jvp_of_grad_in_one(c, attend):
    """Only the keys move."""
    return jvp(lambda k: grad(c.loss(attend), QKV)(c.at[0], k, c.at[2]), c.at[1:2], c.tangents[1:2])


@transform
def grad_of_jvp(c, attend):
    return grad(lambda *a: jvp(c.loss(attend), a, c.tangents)[1], QKV)(*c.at)


@transform
def grad_of_jvp_in_tangents(c, attend):
    def f(*tangents):
        return jvp(lambda *a: attend(*a, **c.options).sin(), c.at, tangents)[1].pow(3).sum()

    return grad(f, QKV)(*c.tangents)


@transform
def grad_of_grad(c, attend):
    """A gradient penalty."""
    return grad(lambda *a: sum(g.pow(2).sum() for g in grad(c.loss(attend), QKV)(*a)), QKV)(*c.at)


@transform
def autograd_twice(c, attend):
    at = [x.clone().requires_grad_() for x in c.at]
    first = torch.autograd.grad(c.loss(attend)(*at), at, create_graph=True)
    one = torch.autograd.grad(first, at, c.tangents, retain_graph=True)
    return one, torch.autograd.grad(first, at, c.stack, is_grads_batched=True)


@transform
def forward_ad_(c, attend):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            c.loss(attend)(*[forward_ad.make_dual(x, t) for x, t in zip(c.at, c.tangents, strict=True)])
        ).tangent


@transform
def linearize_(c, attend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own graph
        output, push = linearize(lambda *a: attend(*a, **c.options), *c.at)
        return output, push(*c.tangents), push(*[t**2 for t in c.tangents])


@transform
def linearize_grad(c, attend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output, push = linearize(grad(c.loss(attend), QKV), *c.at)
        return output, push(*c.tangents), push(*[t**2 for t in c.tangents])


@transform
def vmap_of_tangents(c, attend):
    return vmap(lambda *t: jvp(grad(c.loss(attend), QKV), c.at, t)[1])(*c.stack)


@transform
def vmap_of_one(c, attend):
    return vmap(grad(c.loss(attend), QKV), in_dims=(1, None, None))(c.stack[0].movedim(0, 1), *c.at[1:])


@transform
def vmap_of_vmap(c, attend):
    def inner(*at):
        return vmap(lambda *t: jvp(grad(c.loss(attend), QKV), at, t)[1])(*c.stack)

    return vmap(inner)(*[torch.stack([x, x.cos()]) for x in c.at])


@transform
def vmap_of_masks(c, attend):
    if c.options["attn_mask"] is None:
        return value(c, attend)
    masks = torch.stack([c.options["attn_mask"], c.options["attn_mask"].roll(1, -1)])

    def one(mask):
        return grad(lambda *a: attend(*a, **{**c.options, "attn_mask": mask}).pow(2).sum(), QKV)(*c.at)

    return vmap(one)(masks)


@transform
def grad_of_vmap_of_jvp(c, attend):
    def f(*at):
        return vmap(lambda *t: jvp(c.loss(attend), at, t)[1])(*c.stack).pow(2).sum()

    return grad(f, QKV)(*c.at)


@transform
def jvp_of_vjp(c, attend):
    def pulled(q, cotangent):
        return vjp(lambda q: attend(q, *c.at[1:], **c.options), q)[1](cotangent)

    return jvp(pulled, (c.at[0], c.weight), (c.tangents[0], c.weight.sin()))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform(name, kind, monkeypatch):
    monkeypatch.setattr(chunked, "CPU_TILE", 64)
    monkeypatch.setattr(chunked, "KEYS", 8)
    case = Case(kind)
    found = tree_leaves(TRANSFORMS[name](case, attention))
    expected = tree_leaves(TRANSFORMS[name](case, written_out if kind == "rows" else math_attention))
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= 1e-12 * y.norm()


def test_any_leading_dimensions():
    q, k = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    mask = torch.rand(3, 1, 5, 5) > 0.3
    assert torch.allclose(
        attention(q, k, k, mask), math_attention(q, k.expand_as(q), k.expand_as(q), attn_mask=mask)
    )
    assert torch.allclose(attention(k, k, k, scale=2.0), math_attention(k, k, k, scale=2.0))
    assert torch.allclose(attention(k[0], k[0], k[0]), math_attention(k[:1], k[:1], k[:1])[0])
    assert attention(q[..., :0, :], k, k).shape == (2, 3, 2, 0, 4)
    assert torch.equal(attention(q, k[..., :0, :], k[..., :0, :]), torch.zeros_like(q))


def test_autocast_rounds_as_it_does_for_torch():
    q = torch.randn(1, 2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = attention(q, q, q), math_attention(q, q, q)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found, expected, atol=0.02)


@pytest.mark.parametrize(
    "third",
    [
        lambda f, x: grad(lambda x: jvp(grad(f), (x,), (x,))[1].sum())(x),
        lambda f, x: jvp(lambda x: jvp(grad(f), (x,), (x,))[1], (x,), (x,)),
        lambda f, x: grad(lambda x: grad(lambda x: grad(f)(x).sum())(x).sum())(x),
    ],
)
def test_a_third_derivative_raises(third):
    x = torch.randn(1, 3, 2)
    with pytest.raises(NotImplementedError, match="second derivative"):
        third(lambda x: attention(x, x, x).sum(), x)


def test_forward_over_forward_raises():
    x = torch.randn(1, 3, 2)
    with pytest.raises(NotImplementedError, match="grad of jvp"):
        jvp(lambda x: jvp(lambda x: attention(x, x, x), (x,), (x,))[1], (x,), (x,))


def test_a_differentiated_mask_is_refused_in_either_mode():
    x, mask = torch.randn(1, 3, 2), torch.zeros(3, 3)
    for run in (
        lambda: attention(x, x, x, mask.clone().requires_grad_()),
        lambda: grad(lambda m: attention(x, x, x, m).sum())(mask),
        lambda: jvp(lambda m: attention(x, x, x, m), (mask,), (mask,)),
        lambda: vmap(lambda t: jvp(lambda m: attention(x, x, x, m), (mask,), (t,)))(mask[None]),
        lambda: grad(lambda x: grad(lambda y: attention(y, y, y, x[0] @ x[0].mT).sum())(x).sum())(x),
    ):
        with pytest.raises(ValueError, match="mask without a gradient"):
            run()


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (((2, 3, 4), (2, 3, 5), (2, 3, 5)), {}, "expected query"),
        (((2, 3, 4), (2, 3, 4), (2, 2, 4)), {}, "expected query"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), {"enable_gqa": True}, "divides the query's"),
        (((2, 3, 4),) * 3, {"window": 0}, "window of at least 1"),
        (((2, 3, 4),) * 3, {"attn_mask": torch.ones(5, 3, dtype=torch.bool)}, "broadcasts to"),
        (((2, 3, 4),) * 3, {"attn_mask": torch.ones(3, 3, dtype=torch.int64)}, "boolean or floating-point"),
    ],
)
def test_wrong_input_is_named(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        attention(*[torch.zeros(s) for s in tensors], **options)


def test_precisions_must_agree():
    x = torch.zeros(1, 2, 2)
    with pytest.raises(ValueError, match="one floating-point precision"):
        attention(x, x.double(), x)
