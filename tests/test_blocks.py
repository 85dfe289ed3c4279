import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvlens.blocks import Block, Blocks, Slice

D, HEADS, WIDTH = 5, 2, 3


def fused() -> Blocks:
    """Transposed, fused and interleaved matrices, as GPT-2, nn.Linear and NeoX store them."""
    inner = HEADS * WIDTH
    blocks = [Block("plain", (4, D), Slice.of("a", (4, D)))]
    blocks.append(Block("linear", (D, inner), Slice.of("b", (inner, D), lambda w: w.T), heads=(HEADS, 1)))
    for i, name in enumerate(("query", "key")):
        cut = Slice.of("c", (D, 2 * inner), lambda w, i=i: w[:, i * inner : (i + 1) * inner])
        blocks.append(Block(name, (D, inner), cut, aliases=(f"tied.{name}",), heads=(HEADS, 1)))
    for i, name in enumerate(("q", "k", "v")):
        cut = Slice.of(
            "d", (inner * 3, D), lambda w, i=i: w.unflatten(0, (HEADS, 3, WIDTH))[:, i].permute(2, 0, 1)
        )
        blocks.append(Block(f"layer.0.{name}", (D, inner), cut, heads=(HEADS, 1)))
    return Blocks(blocks)


def parameters(*lead: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(*lead, *shape) for name, shape in fused().parameters.items()}


@pytest.mark.parametrize("lead", [(), (3,)])
def test_to_and_from_parameters_are_inverse(lead):
    blocks, given_parameters = fused(), parameters(*lead)
    vector = blocks.from_parameters(given_parameters)
    assert vector.shape == (*lead, blocks.size)
    back = blocks.to_parameters(vector)
    for name, tensor in given_parameters.items():
        assert torch.equal(back[name], tensor)


def test_blocks_have_the_orientation_of_the_papers():
    blocks, p = fused(), parameters()
    parts = blocks.split(blocks.from_parameters(p))
    assert torch.equal(parts["linear"], p["b"].T)
    assert torch.equal(parts["key"], p["c"][:, HEADS * WIDTH :])
    second_head_of_k = p["d"].view(HEADS, 3, WIDTH, D)[1, 1].T
    assert torch.equal(parts["layer.0.k"][:, WIDTH:], second_head_of_k)


def test_heads_take_the_same_entries():
    blocks, p = fused(), parameters()
    vector = blocks.from_parameters(p)
    heads = blocks.heads()
    assert heads.size == blocks.size
    assert torch.equal(vector[blocks.positions(heads)], heads.from_parameters(p))
    assert torch.equal(heads.split(heads.from_parameters(p))["query.head.1"], p["c"][:, WIDTH : 2 * WIDTH])


def test_a_part_of_the_blocks_leaves_the_rest_zero():
    blocks, p = fused(), parameters()
    part = blocks.select("key.head.1", "plain")
    tensors = part.to_parameters(part.from_parameters(p))
    assert set(tensors) == {"a", "c"}
    expected = torch.zeros_like(p["c"])
    expected[:, -WIDTH:] = p["c"][:, -WIDTH:]
    assert torch.equal(tensors["c"], expected)


def test_parameters_without_a_block_are_passed_over():
    blocks, p = fused(), parameters()
    assert torch.equal(
        blocks.from_parameters({"frozen": torch.ones(3, 3, 3), **p}), blocks.from_parameters(p)
    )


def test_select_by_name_alias_prefix_pattern_and_head():
    blocks = fused()
    assert blocks.select("query").names == ("query",)
    assert blocks.select("tied.query").names == ("query",)
    assert blocks.select("layer.0").names == ("layer.0.q", "layer.0.k", "layer.0.v")
    assert blocks.select("layer.*.k", "plain").names == ("plain", "layer.0.k")
    assert blocks.select("tied.key.head.1").names == ("key.head.1",)
    assert blocks.select("layer.0.*.head.0").names == tuple(f"layer.0.{n}.head.0" for n in "qkv")
    assert blocks.select("*") == blocks


def test_select_tells_what_is_wrong():
    with pytest.raises(KeyError, match=r"got 'querry'; did you mean 'query'"):
        fused().select("querry")
    with pytest.raises(ValueError, match=r"disjoint blocks, got 'query' and its head 'query.head.0'"):
        fused().select("query", "query.head.0")
    with pytest.raises(ValueError, match="distinct block names, got 'a' twice"):
        Blocks([Block("a", (1,)), Block("b", (1,), aliases=("a",))])


def test_join_fills_what_is_missing_with_zero():
    blocks = fused()
    vector = blocks.join({"tied.key": torch.ones(D, HEADS * WIDTH)})
    assert vector.sum() == D * HEADS * WIDTH == vector[blocks.ranges["key"]].sum()
    with pytest.raises(ValueError, match=r"block 'key': expected shape \[5, 6\], got \[6, 5\]"):
        blocks.join({"key": torch.ones(HEADS * WIDTH, D)})


def test_a_slice_must_be_a_view():
    with pytest.raises(ValueError, match="expected a view of w"):
        Slice.of("w", (4, 4), lambda w: w.T.reshape(16))


def test_blocks_without_a_model():
    blocks = Blocks.of({"query": (3, 2), "key": (3, 2)})
    assert blocks.size == 12
    with pytest.raises(ValueError, match="'query' belongs to no model"):
        blocks.to_parameters(torch.zeros(12))


def test_a_whole_parameter_is_a_view_of_the_vector():
    blocks = fused()
    vector = torch.randn(blocks.size)
    tensors = blocks.to_parameters(vector)
    for name in ("a", "b"):
        assert tensors[name].untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    lead=st.integers(1, 3),
)
def test_any_transposition(shape, order, lead):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    cut = Slice.of("w", shape, lambda w: w.permute(dims))
    blocks = Blocks([Block("w", cut.size, cut)])
    w = torch.randn(lead, *shape)
    assert torch.equal(blocks.to_parameters(blocks.from_parameters({"w": w}))["w"], w)
    assert torch.equal(w[0].flatten()[cut.entries()], blocks.from_parameters({"w": w})[0])
