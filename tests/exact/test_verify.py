"""The claims themselves are the tests of the closed forms; here, that all of them hold and that a wrong one is seen."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import curvlens as cl
from curvlens.exact import literal
from curvlens.exact.attention_map import WeightedMoments
from curvlens.exact.verification import CLAIMS, verify
from curvlens.exact.verification.claims import TOLERANCE, Bound, Claim, Equal, Law, claim
from curvlens.exact.verification.problems import Draw, attentions
from curvlens.exact.verification.run import check


@pytest.fixture(scope="module")
def verification():
    return cl.verify()


def test_every_claim_holds(verification):
    assert verification.passed, str(verification)
    assert len(verification.claims) == len(CLAIMS)
    assert max(c.largest_error or 0 for c in verification.claims) <= TOLERANCE
    assert verification.seconds < 60


PAPER_A = """Theorem 3.1, Theorem 3.2, Lemma 4.1, Lemma B.1, Lemma B.2, Lemma B.3, Lemma C.1, Lemma D.1, Lemma D.2,
Remark 3.1, Remark 4.1, Remark C.1, Remark D.1, Remark E.1, Definition 3.1, Definition A.1, Definition A.2, Table 1"""
PAPER_B = "Theorem 1, Theorem 2, Theorem 3, Theorem 4, Theorem 5, Theorem 6, Theorem 7, Lemma 1"


def test_every_numbered_statement_is_a_claim():
    names = [f"A {number}" for number in re.split(r",\s+", PAPER_A)]
    names += [f"B {number}" for number in re.split(r",\s+", PAPER_B)]
    assert set(names) <= set(CLAIMS)
    equations = set()
    for made in CLAIMS.values():
        found = re.fullmatch(r"Equations? (\d+)(?:-(\d+))?", made.number)
        if found:
            equations |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    # paper A numbers its equations 1 to 24; 20 is Lemma B.2, 23 is in Lemma C.1
    assert equations == set(range(1, 25)) - {20, 23}
    assert any(c.case.startswith("equation 20") for c in check(CLAIMS["A Lemma B.2"], 0).checks)
    assert any(c.case == "equation 23" for c in check(CLAIMS["A Lemma C.1"], 0).checks)


def test_shapes_and_edge_cases():
    problems = list(attentions(Draw(0)))
    shapes = [(*p.X.shape, p.W["query"].shape[1], p.Y.shape[1]) for p in problems]
    assert any(k < d for _, d, k, _ in shapes)
    assert any(k > d for _, d, k, _ in shapes)
    assert any(v != d for _, d, _, v in shapes)
    assert any(L == 1 for L, *_ in shapes)
    maps = {p.case: literal.attention(p.layer(), p.X) for p in problems}
    assert torch.equal(maps["one-hot attention"].max(1).values, torch.ones(4, dtype=torch.float64))
    assert maps["one-hot attention"].sum() == 4
    assert torch.allclose(maps["uniform attention"], torch.tensor(0.25, dtype=torch.float64))
    assert {p.case for p in attentions(Draw(0), square=True)} == {p.case for p in problems}


def test_another_seed_draws_other_problems(verification):
    again = verify(claims="A Theorem 3.1")["A Theorem 3.1"]
    other = verify(seed=1, claims="A Theorem 3.1")["A Theorem 3.1"]
    values = [c.value for c in verification["A Theorem 3.1"].checks]
    assert [c.value for c in again.checks] == values  # whichever others run
    assert [c.value for c in other.checks] != values
    assert other.passed


def test_an_error_in_a_printed_form_is_seen(monkeypatch):
    right = literal.theorem_31

    def wrong(layer, X, Y):
        return {**right(layer, X, Y), ("value", "query"): -right(layer, X, Y)["value", "query"]}

    monkeypatch.setattr(literal, "theorem_31", wrong)
    found = verify(claims="Theorem 3.*")
    assert not found.passed
    assert found["A Theorem 3.2"].passed
    failed = [c.case for c in found["A Theorem 3.1"].checks if not c.passed]
    assert failed
    assert all("as printed" in case for case in failed)
    assert "FAILED" in str(found)
    assert "at ('value', 'query')" in re.sub(r"\s+", " ", str(found))


def test_a_small_error_in_the_closed_form_is_seen(monkeypatch):
    """One part in 10⁸ of the third moment."""
    right = WeightedMoments.third_weights
    monkeypatch.setattr(WeightedMoments, "third_weights", lambda self, u: (1 + 1e-8) * right(self, u))
    found = verify(claims="A Theorem 3.2")["A Theorem 3.2"]
    failed = [c for c in found.checks if not c.passed]
    assert failed
    assert all(1e-10 < c.value < 1e-7 for c in failed)


def test_an_exception_fails_its_claim_alone(monkeypatch):
    def broken(layer, X, Y):
        raise RuntimeError("no such matrix")

    monkeypatch.setattr(literal, "theorem_32", broken)
    found = verify(claims="Theorem 3.*")
    assert found["A Theorem 3.1"].passed
    assert not found["A Theorem 3.2"].passed
    assert found["A Theorem 3.2"].failure == "RuntimeError: no such matrix"
    assert "no such matrix" in str(found)


def test_nan_and_other_shapes_are_errors():
    x = torch.ones(2, dtype=torch.float64)
    assert not Equal("nan", lambda: x * float("nan"), lambda: x).run().passed
    assert not Equal("shape", lambda: x[:1], lambda: x).run().passed
    assert not Equal("not zero", lambda: 1e-300 * x, lambda: 0 * x).run().passed
    assert Equal("zero", lambda: 0 * x, lambda: 0 * x).run().passed
    assert not Bound("nan", lambda: x * float("nan"), lambda: x).run().passed
    assert not Law("nan", 1.0, lambda: float("nan")).run().passed


def test_bounds_and_laws_can_fail():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    met = Bound("met", lambda: x, lambda: x).run()
    assert (met.passed, met.value) == (True, 1.0)
    exceeded = Bound("exceeded", lambda: x * torch.tensor([2.0, 0.99]), lambda: x).run()
    assert not exceeded.passed
    assert exceeded.value == pytest.approx(0.99)
    law = Law("another exponent", 2.0, lambda: 2.01).run()
    assert not law.passed
    assert law.message == "predicted 2, fitted 2.010000"


def test_a_claim_without_checks_does_not_hold():
    assert not check(Claim("A", "Nothing", "", "", lambda draw: iter(())), 0).passed


def test_each_number_once():
    with pytest.raises(ValueError, match=r"one claim of each number, got a second A Theorem 3\.1"):
        claim("A", "Theorem 3.1", "again")(lambda draw: iter(()))


def test_patterns():
    assert {c.paper for c in verify(claims="lemma b.*").claims} == {"A"}
    assert [c.number for c in verify(claims="B Lemma*").claims] == ["Lemma 1"]
    with pytest.raises(
        ValueError, match=r"expected a pattern of claims .* got 'Theorem 99', which matches none"
    ):
        verify(claims="Theorem 99")


def test_json(verification, tmp_path):
    path = tmp_path / "claims.json"
    text = verification.to_json(path)
    assert json.loads(text) == json.loads(path.read_text(encoding="utf-8"))
    read = json.loads(text)
    assert read["passed"] is True
    assert read["complete"] is True
    assert [c["number"] for c in read["claims"]] == [c.number for c in verification.claims]
    first = verification.claims[0]
    assert read["claims"][0]["largest_error"] == first.largest_error
    assert [c["case"] for c in read["claims"][0]["checks"]] == [c.case for c in first.checks]


def test_table(verification):
    text = str(verification)
    assert max(map(len, text.splitlines())) <= 80
    for made in CLAIMS.values():
        assert re.search(rf"^{re.escape(made.number)} +\d+ .* ok$", text, re.MULTILINE)
    assert "all hold" in text
    with pytest.raises(KeyError, match="expected a claim among"):
        verification["A Theorem 99"]


def test_the_interrupted_keeps_what_is_done(monkeypatch):
    name = "A Definition A.1"

    def interrupted(draw):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(CLAIMS, name, replace(CLAIMS[name], checks=interrupted))
    found = verify(claims="Definition*")
    assert [c.name for c in found.claims] == ["A Definition 3.1"]
    assert found.asked == 3
    assert not found.complete
    assert not found.passed
    assert "1 claims of 3, interrupted" in str(found)


def test_documentation_lists_every_claim():
    page = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
    for made in CLAIMS.values():
        assert re.search(rf"^{re.escape(made.number)} ", page, re.MULTILINE), made.name
        assert made.statement in page
