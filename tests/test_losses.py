import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from curvlens.losses import MSE, CrossEntropy, Loss, PerToken, named, require_derivatives

TARGETS = torch.tensor([[1, -100, 3, 0], [2, 2, -100, -100]])


def cases():
    output = torch.randn(2, 4, 5, dtype=torch.float64)
    absolute = PerToken(lambda o, t: (o - t).abs().pow(3).sum(-1), "cubic")
    return [
        (CrossEntropy(), output, TARGETS, 5),
        (CrossEntropy(shift=True), output, TARGETS, 3),
        (CrossEntropy(), output[0], torch.tensor([1, 0, 4, 2]), 4),
        (MSE(), output, torch.randn_like(output), 8),
        (MSE(), output[0, 0], torch.randn(5, dtype=torch.float64), 5),
        (MSE(), output[0, :, :1], torch.randn(4, dtype=torch.float64), 4),
        (absolute, output, torch.randn_like(output), 8),
    ]


@pytest.mark.parametrize("case", range(7))
def test_gradient_and_hessian_product_are_derivatives_of_the_value(case):
    loss, output, target, count = cases()[case]

    def value(o):
        return loss.value(o, target)

    loss.check(output, target)
    if isinstance(loss, PerToken):
        assert loss.count_terms(output, target) == count
    else:
        assert loss.count(target) == count
    torch.testing.assert_close(loss.gradient(output, target), jacobian(value, output), rtol=1e-12, atol=1e-12)
    B = hessian(value, output).reshape(output.numel(), output.numel())
    v = torch.randn(3, *output.shape, dtype=torch.float64)
    found = loss.hessian_product(output, target, v)
    torch.testing.assert_close(found.flatten(1), v.flatten(1) @ B, rtol=1e-12, atol=1e-12)


def test_closed_forms_of_ones_own_that_are_wrong_are_refused():
    class Cubic(Loss):
        def value(self, output, target):
            return (output - target).pow(3).sum()

        def count(self, target):
            return target.numel()

    class Right(Cubic):
        def gradient(self, output, target):
            return 3 * (output - target).square()

        def hessian_product(self, output, target, vectors):
            return 6 * (output - target) * vectors

    class WrongGradient(Cubic):
        def gradient(self, output, target):
            return 2 * (output - target).square()

    class WrongProduct(Right):
        def hessian_product(self, output, target, vectors):
            return 3 * (output - target) * vectors

    output, target = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    for loss in (Cubic(), Right()):
        require_derivatives(loss, output, target)
    with pytest.raises(
        ValueError, match=r"expected WrongGradient.gradient to be the derivative of its value"
    ):
        require_derivatives(WrongGradient(), output, target)
    with pytest.raises(ValueError, match=r"expected WrongProduct.hessian_product to be the derivative"):
        require_derivatives(WrongProduct(), output, target)


def test_fisher_product_is_a_sum_over_tokens():
    loss, output = CrossEntropy(shift=True), torch.randn(2, 4, 5, dtype=torch.float64)
    g = loss.gradient(output, TARGETS)
    v = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    expected = torch.zeros_like(output)
    for b in range(2):
        for i in range(4):
            expected[b, i] = g[b, i] * (g[b, i] @ v[0, b, i])
    torch.testing.assert_close(loss.fisher_product(output, TARGETS, v)[0], expected)


def test_a_sum_over_nothing_is_zero():
    loss = CrossEntropy()
    nothing = torch.full((1, 3), -100)
    output = torch.randn(1, 3, 4)
    assert loss.value(output, nothing) == 0 == loss.count(nothing)
    assert loss.gradient(output, nothing).abs().max() == 0


def test_drawn_labels_follow_the_model_and_keep_what_is_not_scored():
    logits = torch.randn(1, 2, 4, dtype=torch.float64).expand(5000, 2, 4)
    target = torch.tensor([[0, -100]]).expand(5000, 2)
    drawn = CrossEntropy().sample(logits, target, torch.Generator().manual_seed(0))
    assert (drawn[:, 1] == -100).all()
    frequency = drawn[:, 0].bincount(minlength=4) / 5000
    # three standard errors of a frequency are at most 3 * 0.5 / sqrt(5000) = 0.021
    torch.testing.assert_close(frequency.double(), logits[0, 0].softmax(-1), rtol=0, atol=0.021)


def test_draws_do_not_depend_on_padding():
    logits = torch.randn(1, 3, 4, dtype=torch.float64)
    padded = torch.cat([torch.randn(1, 2, 4, dtype=torch.float64), logits], dim=1)
    target = torch.tensor([[1, 2, 3]])
    padded_target = torch.tensor([[-100, -100, 1, 2, 3]])
    draw = CrossEntropy().sample(logits, target, torch.Generator().manual_seed(1))
    padded_draw = CrossEntropy().sample(padded, padded_target, torch.Generator().manual_seed(1))
    assert torch.equal(draw, padded_draw[:, 2:])


def test_wrong_input_is_told():
    logits = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"expected labels \[2, 3\] for logits \[2, 3, 4\], got \[2\]"):
        CrossEntropy().check(logits, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="labels from 0 to 3 or -100, got 0 to 7"):
        CrossEntropy().check(logits, torch.tensor([[0, 7, 1]] * 2))
    with pytest.raises(ValueError, match="use loss='mse' for regression"):
        CrossEntropy().check(logits, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"mse: expected targets \[2, 3, 4\]"):
        MSE().check(logits, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="got a scalar; return the losses before they are averaged"):
        PerToken(torch.nn.functional.mse_loss).value(logits, logits)
    with pytest.raises(ValueError, match="expected a loss out of next-token"):
        named("nll")
    with pytest.raises(TypeError, match="expected a loss name"):
        named(3)
    with pytest.raises(NotImplementedError, match='use kind="empirical"'):
        PerToken(lambda o, t: o).sample(logits, logits, torch.Generator())


def test_names():
    assert isinstance(named("mse"), MSE)
    assert named("next-token").name == "next-token"
    own = CrossEntropy()
    assert named(own) is own
    assert isinstance(own, Loss)
