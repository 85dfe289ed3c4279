"""`curvlens reproduce`."""

import json

import pytest

from curvlens import cli
from curvlens.studies import data_dependence, names


def test_list(capsys):
    assert cli.run(["reproduce", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(names())
    assert cli.run(["reproduce", "--json"]) == 0
    assert [study["study"] for study in json.loads(capsys.readouterr().out)] == list(names())


def test_a_study(capsys, tmp_path):
    arguments = ["reproduce", "A-tab*", "--preset", "smoke", "--out", str(tmp_path)]
    assert cli.run([*arguments, "--dry-run"]) == 0
    assert "A-table1 (smoke): 0 of 2 units done" in capsys.readouterr().out
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    assert "reproduced (smoke" in out
    assert "holds" in out
    assert cli.run([*arguments, "--dry-run"]) == 0
    assert "2 of 2 units done" in capsys.readouterr().out
    assert cli.run([*arguments, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "reproduced"
    assert len(list(tmp_path.rglob("figure.png"))) == 1


@pytest.mark.parametrize(("wrong", "said"), [
    (["A-99"], "expected 'all' or a study among A-1"),
    (["A-table1", "--preset", "huge"], "expected preset smoke or cpu or paper, got 'huge'"),
])  # fmt: skip
def test_wrong_input(wrong, said, capsys, tmp_path):
    assert cli.run(["reproduce", *wrong, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    def interrupted(config, unit):
        raise KeyboardInterrupt

    study = data_dependence.STUDY
    monkeypatch.setattr(data_dependence, "STUDY", type(study)(**{**vars(study), "measure": interrupted}))
    assert cli.run(["reproduce", "A-table1", "--preset", "smoke", "--out", str(tmp_path)]) == 3
    assert "after 0 of 2 units of A-table1; the same command goes on from there" in capsys.readouterr().err


def test_a_claim_that_fails_is_exit_code_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(data_dependence.LAWS, "MLP outer", (3, 0))
    assert (
        cli.run(["reproduce", "A-table1", "--preset", "smoke", "--out", str(tmp_path), "--no-figures"]) == 1
    )
    assert "does not hold" in capsys.readouterr().out
