"""Runs are kept unit by unit, resumed, and cached by the hash of config and code."""

import json
import math
from dataclasses import dataclass

import pytest

from curvlens.studies import code, registry, run
from curvlens.studies.study import (
    DIFFERENCE,
    NOT,
    REPRODUCED,
    UNDECIDED,
    Config,
    Finding,
    Study,
    between,
    mean95,
    near,
    ratio,
    verdict,
)


@dataclass(frozen=True, kw_only=True)
class Size(Config):
    count: int = 3
    scales: tuple[float, ...] = (1.0, 2.0)


@pytest.fixture
def counted(monkeypatch):
    """A study that notes what it measures, and is interrupted where it is told."""
    done, stop_at = [], []

    def measure(config, unit):
        if unit in stop_at:
            raise KeyboardInterrupt
        done.append(unit)
        return {"value": config.seed + int(unit) * config.scales[1], "none": math.inf}

    study = Study(
        name="T",
        title="a test",
        source="here",
        claim="three is three",
        presets={"smoke": Size(), "cpu": Size(count=4)},
        units=lambda config: [str(i) for i in range(config.count)],
        measure=measure,
        numbers=lambda config, measured: {"sum": sum(unit["value"] for unit in measured.values())},
        judge=lambda config, numbers: [near("the sum", 6, numbers["sum"], 0.1, "it is a sum")],
        plot=lambda config, numbers: None,
    )
    monkeypatch.setitem(registry.MODULES, "T", "study")
    monkeypatch.setattr(run, "load", lambda name: study)
    return done, stop_at


def reproduce(tmp_path, preset="smoke", **options):
    return run.reproduce("T", preset, out=tmp_path, figure=False, progress=False, **options)


def test_a_finished_run_is_read_and_not_measured_again(counted, tmp_path):
    done, _ = counted
    first = reproduce(tmp_path)
    assert first.verdict == REPRODUCED
    assert first.numbers["sum"] == 6
    assert done == ["0", "1", "2"]
    second = reproduce(tmp_path)
    assert done == ["0", "1", "2"]
    assert second.to_json() == first.to_json()


def test_an_interrupted_run_goes_on(counted, tmp_path):
    done, stop_at = counted
    stop_at.append("1")
    with pytest.raises(KeyboardInterrupt, match="interrupted after 1 of 3 units of T"):
        reproduce(tmp_path)
    stop_at.clear()
    assert reproduce(tmp_path).numbers["sum"] == 6
    assert done == ["0", "1", "2"]


def test_another_config_or_other_code_is_another_run(counted, tmp_path, monkeypatch):
    done, _ = counted
    reproduce(tmp_path)
    assert reproduce(tmp_path, seed=1).verdict == NOT
    assert len(done) == 6
    reproduce(tmp_path, "cpu")
    assert len(done) == 10
    monkeypatch.setattr(run, "code_hash", lambda module: "changed")
    reproduce(tmp_path)
    assert len(done) == 13


def test_results_are_json_and_complete(counted, tmp_path):
    made = reproduce(tmp_path)
    kept = json.loads((made.folder / "result.json").read_text())
    assert kept["verdict"] == REPRODUCED
    assert kept["measured"]["0"]["none"] is None
    again = run.read(made.folder / "result.json")
    assert again.config == made.config
    assert again.findings == made.findings
    assert not list(made.folder.rglob("*.tmp"))


def test_a_study_or_preset_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="expected a study among A-1"):
        run.reproduce("A-99", out=tmp_path)
    with pytest.raises(ValueError, match="expected preset smoke or cpu or paper, got 'huge'"):
        run.reproduce("A-3a", "huge", out=tmp_path)


def test_the_hash_of_code_reaches_what_a_module_imports():
    reached = code.reached("curvlens.studies.growth_without_norm")
    assert "curvlens.exact.attention_hessian" in reached
    assert "curvlens.structured.kronecker" in reached
    assert not {name for name in reached if name.startswith("curvlens.cli")}
    assert "curvlens.studies.plot" not in reached


def test_the_hash_of_code_changes_with_the_code(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("from curvlens.b import x")
    (tmp_path / "b.py").write_text("x = 1")
    (tmp_path / "c.py").write_text("y = 1")
    monkeypatch.setattr(code, "ROOT", tmp_path)

    def fresh():
        code.code_hash.cache_clear()
        code._imports.cache_clear()
        return code.code_hash("curvlens.a")

    try:
        before = fresh()
        (tmp_path / "c.py").write_text("y = 2")
        assert fresh() == before
        (tmp_path / "b.py").write_text("x = 2")
        assert fresh() != before
    finally:
        code.code_hash.cache_clear()
        code._imports.cache_clear()


def test_findings():
    assert near("x", 2.0, 2.05, 0.1, "").holds
    assert near("x", 2.0, (2.2, 0.04), 0.1, "").outcome == "does not hold"
    assert near("x", 2.0, (2.12, 0.04), 0.1, "").holds  # the interval meets the range
    assert near("x", 2.0, (2.0, 0.2), 0.1, "").outcome == "undecided"
    assert near("x", 2.0, math.nan, 0.1, "").outcome == "undecided"
    assert ratio("x", 10.0, 19.0, 2.0, "").holds
    assert not ratio("x", 10.0, 4.9, 2.0, "").holds
    assert between("x", "more than 1", (3.0, 1.5), 1.0, math.inf, "").holds
    assert between("x", "more than 1", (3.0, 5.0), 1.0, math.inf, "").outcome == "undecided"
    assert between("x", "more than 1", (0.5, 0.1), 1.0, math.inf, "").outcome == "does not hold"


def test_verdicts():
    good = near("x", 0, 0.0, 1, "")
    bad = near("x", 0, 5.0, 1, "")
    beside = near("x", 0, 5.0, 1, "", main=False)
    wide = Finding("x", "0", 0.0, -1, 1, "", error=9.0)
    assert verdict([good, good]) == REPRODUCED
    assert verdict([good, beside]) == DIFFERENCE
    assert verdict([good, bad, wide]) == NOT
    assert verdict([good, wide, beside]) == UNDECIDED


def test_mean95_has_students_factor():
    mean, error = mean95([1.0, 2.0, 3.0])
    assert mean == 2
    assert math.isclose(error, 4.302653 / math.sqrt(3), rel_tol=1e-6)  # t at 97.5 %, two degrees of freedom
    assert math.isinf(mean95([1.0])[1])
