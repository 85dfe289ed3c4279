"""What is averaged, and that the same data gives the same curvature however it is handed over."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvlens as cl
from models import MODELS

# sums of the same float64 terms in another order
SAME = 1e-12


def product(model, batches, loss="auto", **options):
    land = cl.Landscape(model, batches, loss, **options)
    v = torch.randn(land.blocks.size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.cat([land.value()[None], cl.hessian(land) @ v, cl.gauss_newton(land) @ v])


def same(a, b):
    return (a - b).norm() <= SAME * b.norm()


def rows(batch, *indices):
    return {name: t[list(indices)] for name, t in batch.items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "gpt2_classifier"])
def test_batching_order_and_micro_batches_change_nothing(name):
    model, batch = MODELS[name]()
    whole = product(model, batch)
    assert same(product(model, [rows(batch, 0, 1), rows(batch, 2)]), whole)
    assert same(product(model, [rows(batch, 2), rows(batch, 0), rows(batch, 1)]), whole)
    assert same(product(model, batch, micro_batch=2), whole)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_padding_left_or_right_or_none_changes_nothing(name):
    model, batch = MODELS[name]()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    right = product(model, {"input_ids": ids, "attention_mask": mask}, "next-token")
    lengths = mask.sum(1).tolist()
    left_ids, left_mask = torch.zeros_like(ids), torch.zeros_like(mask)
    for row, n in enumerate(lengths):
        left_ids[row, -n:], left_mask[row, -n:] = ids[row, :n], 1
    assert same(product(model, {"input_ids": left_ids, "attention_mask": left_mask}, "next-token"), right)
    alone = [ids[row : row + 1, :n] for row, n in enumerate(lengths)]
    assert same(product(model, alone, "next-token"), right)
    # labels that were cloned from padded ids do not score the padding
    cloned = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    assert same(product(model, cloned, "next-token"), right)
    assert cl.Landscape(model, cloned).weight == sum(lengths) - len(lengths)


def test_the_mean_is_over_tokens_not_batches():
    model, _ = MODELS["own_gpt"]()
    short, long = torch.randint(0, 11, (1, 2)), torch.randint(0, 11, (3, 5))
    land = cl.Landscape(model, [short, long])
    assert land.weight == 1 + 12
    logits = [model(b)[:, :-1].flatten(0, 1) for b in (short, long)]
    labels = [b[:, 1:].flatten() for b in (short, long)]
    expected = nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
    torch.testing.assert_close(land.value(), expected.detach())


def test_value_is_that_of_hugging_face():
    for name in ("gpt2", "gpt2_classifier", "bert", "t5", "vit"):
        model, batch = MODELS[name]()
        # the library upcasts logits to float32 in its causal loss
        assert cl.Landscape(model, batch).value().item() == pytest.approx(
            model(**batch).loss.item(), rel=1e-6
        )


def test_a_loader_a_list_an_iterator_and_a_single_batch():
    model, (x, y) = MODELS["linear_mlp"]()
    whole = product(model, (x, y), "mse")
    assert same(product(model, DataLoader(TensorDataset(x, y), batch_size=2), "mse"), whole)
    assert same(product(model, [(x[:3], y[:3]), (x[3:], y[3:])], "mse"), whole)
    assert same(product(model, ((x[i : i + 2], y[i : i + 2]) for i in range(0, 5, 2)), "mse"), whole)
    assert same(product(model, [((x,), y)], "mse"), whole)


def test_a_loader_of_token_ids_alone_and_labels_of_any_integer_type():
    model, (ids, _) = MODELS["own_gpt"]()
    whole = product(model, ids, "next-token")
    assert same(product(model, DataLoader(TensorDataset(ids), batch_size=2)), whole)
    assert same(product(model, DataLoader(ids, batch_size=2)), whole)
    assert same(product(model, (ids, ids.int()), "next-token"), whole)
    assert same(product(model, ids.int(), "next-token"), whole)


def test_data_that_changes_between_passes_is_refused():
    model, (x, y) = MODELS["linear_mlp"]()
    with pytest.raises(ValueError, match=r"a DataLoader that shuffles; use shuffle=False.*list\(loader\)"):
        cl.Landscape(model, DataLoader(TensorDataset(x, y), shuffle=True))

    class Noisy:
        def __init__(self, quiet=0):
            self.passes, self.quiet = 0, quiet

        def __iter__(self):
            self.passes += 1
            noise = self.passes > self.quiet
            yield x, y
            yield (x + torch.randn_like(x) if noise else x), y

    land = cl.Landscape(model, Noisy())
    with pytest.raises(ValueError, match="the same batches on every pass, got another batch 1 than before"):
        land.gradient()

    class Shrinking(Noisy):
        def __iter__(self):
            self.passes += 1
            yield x, y
            if self.passes < 3:
                yield x, y

    with pytest.raises(ValueError, match="expected 2 batches on every pass, got 1"):
        cl.Landscape(model, Shrinking()).gradient()

    class Shuffled(Noisy):
        def __iter__(self):
            self.passes += 1
            yield (x, y) if self.passes % 2 else (x.flip(0), y)

    with pytest.raises(ValueError, match="another first batch the second time"):
        cl.Landscape(model, Shuffled())


def test_a_function_with_parameters():
    torch.manual_seed(1)
    W, x, y = (torch.randn(s, dtype=torch.float64) for s in ((3, 2), (5, 3), (5, 2)))

    def model(parameters, inputs):
        return (inputs @ parameters["W"]).sin()

    land = cl.Landscape(model, (x, y), parameters={"W": W})
    assert land.loss.name == "mse"
    expected = torch.autograd.functional.hessian(lambda w: ((x @ w).sin() - y).square().mean(), W)
    torch.testing.assert_close(cl.hessian(land).dense(), expected.view(6, 6), rtol=1e-12, atol=1e-13)
    assert land.blocks.names == ("W",)
    with pytest.raises(ValueError, match="expected parameters="):
        cl.Landscape(model, (x, y))


def test_losses_of_ones_own():
    model, (x, y) = MODELS["linear_mlp"]()
    own = product(model, (x, y), lambda o, t: (o - t).square().mean(-1))
    assert same(own, product(model, (x, y), "mse"))

    class Huber(cl.losses.Loss):
        name = "huber"

        def value(self, output, target):
            return nn.functional.huber_loss(output, target, reduction="sum")

        def count(self, target):
            return target.numel()

        def gradient(self, output, target):  # its Hessian product is left to automatic differentiation
            return (output - target).clamp(-1, 1)

    land = cl.Landscape(model, (x, y), Huber())
    plain = torch.autograd.functional.hessian(
        lambda p: nn.functional.huber_loss(
            torch.func.functional_call(model, cl.families.blocks(model).to_parameters(p), (x,)), y
        ),
        land.blocks.from_parameters(dict(model.named_parameters())),
    )
    torch.testing.assert_close(cl.hessian(land).dense(), plain, rtol=1e-10, atol=1e-12)
    vectors = torch.randn(land.blocks.size, 5, dtype=torch.float64)
    torch.testing.assert_close(cl.hessian(land) @ vectors, plain @ vectors, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "batch", "loss"),
    [
        ("own_gpt", torch.zeros(1, 4, dtype=torch.long), "next-token"),
        ("gpt2", None, "next-token"),
        ("gpt2_classifier", None, "cross-entropy"),
        ("bert", None, "cross-entropy"),
        ("t5", None, "cross-entropy"),
        ("vit", None, "cross-entropy"),
        ("linear_mlp", None, "mse"),
        ("own_gpt", (torch.ones(1, 4).long(), torch.zeros(1, 4).long()), "cross-entropy"),
        ("digit_addition", None, "next-token"),
    ],
)
def test_auto_tells_the_loss(model, batch, loss):
    built, own = MODELS[model]()
    land = cl.Landscape(built, own if batch is None else batch)
    assert land.loss.name == loss
    assert loss in repr(land)


def test_nanogpt_gives_all_logits_only_with_targets():
    plain, (ids, labels) = MODELS["nanogpt"]()

    class Karpathy(type(plain)):
        def forward(self, idx, targets=None):
            logits = super().forward(idx)
            return (logits, None) if targets is not None else (logits[:, [-1]], None)

    model = Karpathy().double()
    model.load_state_dict(plain.state_dict())
    assert same(product(model, (ids, labels), "next-token"), product(plain, (ids, labels), "next-token"))


def test_frozen_parameters_are_no_part_of_it():
    model, batch = MODELS["gpt2"]()
    full = cl.hessian(cl.Landscape(model, batch))
    for name, p in model.named_parameters():
        p.requires_grad_("h.1" in name)
    land = cl.Landscape(model, batch)
    assert all(name.startswith("layer.1.") for name in land.blocks.names)
    part = full.block("layer.1").dense()
    assert same(cl.hessian(land).dense(), part)


def test_half_precision_weights_are_computed_in_float32_and_it_is_said():
    model, batch = MODELS["own_gpt"]()
    half = model.bfloat16()
    land = cl.Landscape(half, batch)
    assert land.dtype == torch.float32
    assert land.notes == ["weights are torch.bfloat16, computed in torch.float32"]
    exact = cl.Landscape(half, batch, dtype=torch.float64)
    v = torch.randn(land.blocks.size)
    error = (cl.hessian(land) @ v - (cl.hessian(exact) @ v.double()).float()).norm()
    assert error < 1e-5 * (cl.hessian(land) @ v).norm()  # float32 arithmetic on the same weights
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    assert cl.Landscape(half, batch, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("engine", ["double-backward", "forward-over-reverse", "layered"])
def test_at_other_weights(engine):
    """Value, gradient, products and parts are those of a model that holds the weights, which this one does not."""
    model, batch = MODELS["gpt2"]()
    other, _ = MODELS["gpt2"]()
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p)
    land, there = cl.Landscape(model, batch), cl.Landscape(other, batch)
    kept = [p.detach().clone() for p in model.parameters()]
    for weights in (there.parameters(), there.blocks.from_parameters(there.parameters())):
        moved = land.at(weights)
        assert moved.value() == there.value()
        assert torch.equal(moved.gradient(), there.gradient())
        v = there.gradient()
        assert same(cl.hessian(moved, engine) @ v, cl.hessian(there, engine) @ v)
        assert moved.parts(2)[0].value() == there.parts(2)[0].value()
    assert all(torch.equal(p, q) for p, q in zip(kept, model.parameters(), strict=True))
    assert land.value() != moved.value()


def test_at_wrong_weights():
    model, batch = MODELS["gpt2"]()
    land = cl.Landscape(model, batch)
    with pytest.raises(KeyError, match="expected names of trainable parameters"):
        land.at({"nobody": torch.ones(1)})
    with pytest.raises(ValueError, match=r"expected weights \[\d+\], got \[3\]"):
        land.at(torch.ones(3))
    name = next(iter(land.parameters()))
    with pytest.raises(ValueError, match="expected shape"):
        land.at({name: torch.ones(1)})
