import io
import sys
from pathlib import Path

import pytest
import torch

from curvlens import estimate
from curvlens.estimate import frobenius, trace
from curvlens.estimate.run import Run
from curvlens.structured import Dense
from spectra import SPECTRA, from_spectrum

H = from_spectrum(SPECTRA["flat"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    trace(H, samples=4, method="hutchinson")
    assert "products" in terminal.getvalue()
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    trace(H, samples=4, method="hutchinson")
    assert pipe.getvalue() == ""
    assert capsys.readouterr().out == ""  # results of a program go there, progress never


def test_progress_can_be_silenced(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    trace(H, samples=4, method="hutchinson", progress=False)
    assert terminal.getvalue() == ""


def test_a_finished_run_costs_nothing_again_and_goes_on_with_more_samples(tmp_path):
    path = tmp_path / "state"
    first = frobenius(H, samples=8, checkpoint=path)

    class Untouchable(type(H)):
        def apply(self, stack):
            raise AssertionError("no product is needed")

    again = frobenius(Untouchable(H.matrix), samples=8, checkpoint=path)
    assert vars(again) == vars(first)
    more = frobenius(H, samples=12, checkpoint=path)
    assert more.products == 12
    assert more.value == frobenius(H, samples=12).value


def test_a_state_is_replaced_whole(tmp_path, monkeypatch):
    """A failure while saving leaves the earlier state, and no litter; the result is there all the same."""
    path = tmp_path / "state"
    frobenius(H, samples=4, checkpoint=path)
    before = path.read_bytes()

    def broken(content, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.warns(UserWarning, match="disk full"):
        assert frobenius(H, samples=8, checkpoint=path).samples == 8
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_state_of_another_seed_is_refused(tmp_path):
    path = tmp_path / "state"
    frobenius(H, samples=4, checkpoint=path)
    with pytest.raises(ValueError, match=r"another run.*'seed': \(1, 0\)"):
        frobenius(H, samples=4, seed=1, checkpoint=path)


def test_saving_takes_a_small_part_of_the_time(tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr(Run, "_save", lambda self: saves.append(setattr(self, "_next_save", 1e18)))
    frobenius(H, samples=40, chunk=1, checkpoint=tmp_path / "state")
    assert len(saves) == 2  # the first step, and the end


def test_minutes_are_a_budget():
    result = frobenius(H, samples=10**6, max_minutes=0.5 / 60)
    assert result.stopped == "max_minutes"
    assert 0 < result.samples < 10**6


def test_an_unknown_budget_is_refused():
    with pytest.raises(TypeError, match="max_hours"):
        trace(H, max_hours=1)


ALL = {
    "trace": trace,
    "frobenius": frobenius,
    "diagonal": estimate.diagonal,
    "block norms": estimate.block_norms,
    "block traces": estimate.block_traces,
    "eigsh": estimate.eigsh,
    "density": estimate.density,
    "block densities": lambda H, **settings: estimate.block_densities(H, **settings)["all"],
    "effective dimension": lambda H, **settings: estimate.effective_dimension(H, 0.1, **settings),
    "effective rank": estimate.effective_rank,
    "negative fraction": estimate.negative_fraction,
    "negative count": lambda H, **settings: estimate.negative_fraction(H, by="count", **settings),
    "condition": estimate.condition,
    "heterogeneity": estimate.heterogeneity,
    "top": lambda H, **settings: estimate.heterogeneity(H, "top", **settings),
    "sharpness": estimate.sharpness,
}


@pytest.mark.parametrize("name", list(ALL))
def test_a_budget_too_small_for_anything_is_no_exception(name):
    one = Dense.over(H.matrix, {"all": (40,)})
    for budget in ({"max_products": 0}, {"max_products": 1}, {"max_minutes": 0}):
        found = ALL[name](one, **budget)
        assert not found.converged
        assert found.products <= 1
        assert repr(found)


@pytest.mark.parametrize("name", list(ALL))
def test_wrong_settings_are_refused_before_a_product(name, tmp_path):
    one = Dense.over(H.matrix, {"all": (40,)})
    one.apply = None  # none is taken
    for settings, message in (
        ({"max_products": -1}, "max_products of at least 0"),
        ({"max_minutes": float("nan")}, "max_minutes of at least 0"),
        ({"checkpoint": tmp_path / "nowhere" / "state"}, "existing folder"),
        ({"checkpoint": tmp_path}, "existing folder"),
        ({"seed": "one"}, "whole number as seed"),
    ):
        with pytest.raises(ValueError, match=message):
            ALL[name](one, **settings)


@pytest.mark.parametrize("name", ["trace", "frobenius", "diagonal", "block norms", "block traces"])
def test_wrong_samples_and_tolerances_are_refused(name):
    for settings, message in (
        ({"samples": 0}, "at least one sample"),
        ({"chunk": 0}, "chunk of at least one"),
        ({"tol": 0.0}, "positive tolerance"),
        ({"tol": -1.0}, "positive tolerance"),
    ):
        with pytest.raises(ValueError, match=message):
            ALL[name](H, **settings)


def test_a_product_that_is_not_a_number_is_an_error_that_says_so():
    broken = Dense(torch.full((4, 4), torch.nan))
    with pytest.raises(ValueError, match="expected finite products, got NaN or infinity from Dense"):
        frobenius(broken)


def test_a_file_that_is_no_state_is_refused(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="cannot be read"):
        trace(H, checkpoint=path)
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="another file of torch"):
        trace(H, checkpoint=path)


@pytest.mark.parametrize("name", ["trace", "frobenius", "block norms", "block traces", "density"])
def test_the_bar_shows_products_value_and_error(name, monkeypatch):
    shown = []
    monkeypatch.setattr("curvlens.estimate.run._bar", lambda what, progress: Bar(shown))
    found = ALL[name](Dense.over(H.matrix, {"a": (30,), "b": (10,)}))
    assert shown[-1]["completed"] == found.products
    assert shown[-1]["total"] >= found.products
    assert " ± " in shown[-1]["value"]


def test_the_bar_of_a_tolerance_foresees_its_end(monkeypatch):
    shown = []
    monkeypatch.setattr("curvlens.estimate.run._bar", lambda what, progress: Bar(shown))
    found = frobenius(H, samples=20, tol=0.02, chunk=1)
    # errors shrink with the root of the samples: what was expected half-way is near what it took
    assert found.products / 2 < shown[len(shown) // 2]["total"] < 2 * found.products


class Bar:
    def __init__(self, shown):
        self.shown = shown

    def start(self): ...

    def stop(self): ...

    def update(self, **fields):
        self.shown.append(fields)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_costs_the_state_and_not_the_result(tmp_path, monkeypatch):
    """Both ways in which torch.save says it, on a device without room."""
    expected = frobenius(H, samples=8)
    real = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *mode: real("/dev/full" if "state" in str(path) else path, *mode)
    )
    with pytest.warns(UserWarning, match="the state is not kept in"):
        got = frobenius(H, samples=8, checkpoint=tmp_path / "state")
    assert vars(got) == vars(expected)
    fault = "[enforce fail at inline_container.cc:672] . unexpected pos 1920 vs 1814"
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(RuntimeError(fault)))
    with pytest.warns(UserWarning, match="is the disk full"):
        assert vars(frobenius(H, samples=8, checkpoint=tmp_path / "other")) == vars(expected)
