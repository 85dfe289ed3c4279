import json

import pytest
import torch

import curvlens as cl
from curvlens.scaling.families import gpt
from curvlens.scaling.law import HELD, NOT_A_LAW


def planted(size, data, seed):
    """`L = ½ c ‖w‖²` in `size` weights: loss 0, every eigenvalue `c = size^-1 e^noise`, trace `size c`."""
    noise = torch.randn((), generator=torch.Generator().manual_seed(seed + 100 * size)).item()
    c = size**-1.0 * 2.718 ** (0.05 * noise)
    weights = {"w": torch.ones(size, dtype=torch.float64)}
    x = torch.full((data, 1), c, dtype=torch.float64)

    def model(parameters, x):
        return 0.5 * x * parameters["w"].square().sum()

    return cl.Landscape(model, (x, torch.zeros(data)), lambda out, _: out[:, 0], parameters=weights)


@pytest.fixture
def counted():
    calls = []

    def family(size, data, seed):
        calls.append((size, data, seed))
        return planted(size, data, seed)

    return family, calls


def test_planted_exponents_are_found():
    found = cl.scaling(planted, [2, 4, 8, 16, 32], seeds=4, measures=["sharpness", "trace", "loss"])
    sharp = found.law("sharpness")
    assert -1 in sharp.exponent
    assert sharp.verdict == HELD
    assert sharp.held_out.met
    assert len(found.points) == 20
    assert found.points[0].parameters == 2
    # loss = ½ c size and trace = c size do not depend on the size
    assert 0 in found.law("trace").exponent
    assert 0 in found.law("loss").exponent
    assert "parameters" in repr(found)
    json.loads(found.to_json())


def test_measures_of_one_s_own_and_the_axis_of_data():
    measures = {"scored": lambda land, seed: 50 + land.weight, "signed": lambda land, seed: -1.0}
    found = cl.scaling(planted, [2], [1, 10, 100, 1000, 10000], 1, measures)
    assert found.law("scored", "data").verdict == NOT_A_LAW
    with pytest.raises(ValueError, match="no law of signed against data: expected positive finite values"):
        found.law("signed", "data")
    with pytest.raises(KeyError, match="expected a measure and an axis"):
        found.law("scored")


def test_a_broken_run_goes_on(counted, tmp_path):
    family, calls = counted
    path = tmp_path / "points.jsonl"

    def dies(size, data, seed):
        if size == 8:
            raise KeyboardInterrupt
        return family(size, data, seed)

    whole = cl.scaling(planted, [2, 4, 8], seeds=2, measures=["loss"])
    with pytest.raises(KeyboardInterrupt):
        cl.scaling(dies, [2, 4, 8], seeds=2, measures=["loss"], path=path)
    path.write_text(path.read_text() + '{"size": 8, "da')  # killed while it wrote
    again = cl.scaling(family, [2, 4, 8], seeds=2, measures=["loss"], path=path)
    assert calls == [(2, 1, 0), (2, 1, 1), (4, 1, 0), (4, 1, 1), (8, 1, 0), (8, 1, 1)]
    assert again.points == whole.points
    cl.scaling(family, [2, 4, 8], seeds=2, measures=["loss"], path=path)
    assert len(calls) == 6
    with pytest.raises(ValueError, match="belong to another run"):
        cl.scaling(family, [2, 4, 8], seeds=2, measures=["trace"], path=path)


@pytest.mark.parametrize(("task", "axis"), [("addition", "width"), ("text", "depth")])
def test_families_of_small_gpts(task, axis):
    family = gpt(task, axis, steps=3, measured=3, width=4, dtype=torch.float64)
    small, large = family(1 if axis == "depth" else 4, 40, 0), family(2 if axis == "depth" else 8, 40, 0)
    assert small.blocks.size < large.blocks.size
    assert small.weight == large.weight
    again = family(1 if axis == "depth" else 4, 40, 0)
    assert torch.equal(small.gradient(), again.gradient())
    untrained = gpt(task, axis, steps=0, measured=3, width=4, dtype=torch.float64)(
        4 if axis == "width" else 1, 40, 0
    )
    assert untrained.value() > small.value()


def test_wrong_input():
    with pytest.raises(ValueError, match=r"expected measures of loss, .*, got width"):
        cl.scaling(planted, [1, 2, 3], measures=["width"])
    with pytest.raises(ValueError, match="expected distinct sizes"):
        cl.scaling(planted, [2, 2])
    with pytest.raises(ValueError, match="expected the axis 'width' or 'depth', got 'heads'"):
        gpt(axis="heads")
    with pytest.raises(ValueError, match="expected the task 'addition' or 'text', got 'music'"):
        gpt("music", steps=0)(4, 4, 0)


def test_the_room_and_the_function_share_a_name():
    import curvlens.scaling as room

    assert room is cl.scaling
    assert callable(cl.scaling)
    assert cl.scaling.fit([1, 2, 4], [1, 2, 4]).exponent.value == pytest.approx(1)
