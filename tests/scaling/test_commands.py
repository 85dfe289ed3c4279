import json

import pytest

from curvlens.cli import run


def test_converge(capsys, tmp_path):
    small = ["--samples", "4", "--steps", "2", "--width", "4", "--draws", "4", "--dims", "1"]
    assert run(["converge", *small, "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["samples"] == 4
    assert (
        run(["converge", *small, "--dtype", "float64", "--task", "text", "--out", str(tmp_path / "c.json")])
        == 0
    )
    assert "samples (" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["loss"] == "next-token"


def test_scale_and_resume(capsys, tmp_path):
    small = ["--sizes", "2,4,6,8", "--seeds", "1", "--steps", "1", "--measures", "loss,gradient"]
    assert run(["scale", *small, "--resume", str(tmp_path), "--json"]) == 0
    first = capsys.readouterr().out
    assert len(json.loads(first)["points"]) == 4
    assert len((tmp_path / "scale.jsonl").read_text().splitlines()) == 4
    assert run(["scale", *small, "--resume", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == first
    assert run(["scale", "--axis", "data", "--sizes", "8,16,32", "--seeds", "1", "--steps", "1"]) == 0
    assert "data" in capsys.readouterr().out


def test_time_that_is_up_keeps_what_there_is(capsys, tmp_path):
    small = [
        "--sizes",
        "2,4,6",
        "--seeds",
        "1",
        "--steps",
        "1",
        "--measures",
        "loss",
        "--resume",
        str(tmp_path),
    ]
    assert run(["scale", *small, "--max-minutes", "0"]) == 3
    assert "1 models, 2 more not measured: the time was up" in capsys.readouterr().out
    assert run(["scale", *small]) == 0
    assert "scaling, 3 models\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale", "--axis", "heads"], "expected the axis 'width' or 'depth', got 'heads'"),
        (["scale", "--dtype", "half"], "expected the dtype float32 or float64, got 'half'"),
        (["scale", "--sizes", "many"], "expected whole numbers with commas between, got 'many'"),
        (["scale", "--measures", "weight", "--steps", "0"], "expected measures of loss"),
        (
            ["converge", "--task", "music", "--steps", "0"],
            "expected the task 'addition' or 'text', got 'music'",
        ),
        (["converge", "--sigma", "-1", "--steps", "0"], "expected a positive sigma"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, said):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
