"""A report on the terminal, and the lines about its stages."""

import io
import sys

import pytest

from analyses import tiny
from curvlens.report import terminal
from curvlens.report.data import Stage
from curvlens.report.stages import STAGES
from curvlens.report.watch import Announcer
from report import synthetic


@pytest.mark.parametrize("report", [synthetic.large(), synthetic.nothing()], ids=["large", "nothing"])
def test_eighty_columns_and_nothing_left_out(report):
    text = terminal.text(report)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for finding in report.findings:
        for part in (finding.title, finding.text, finding.uncertainty, finding.action, finding.source):
            assert " ".join(part.split()) in words
    for stage in report.stages:
        told = any(line.startswith("not complete: ") for line in text.splitlines()) and stage.title in words
        assert told or stage.status != "partial"
    assert sum(line.startswith("not complete") for line in text.splitlines()) == len(
        {stage.why for stage in report.stages if stage.status == "partial"}
    )
    assert report.meta.title in words


def test_what_is_estimated_says_its_error():
    lines = {line.split("  ")[0]: line for line in terminal.text(synthetic.large()).splitlines()}
    assert lines["largest eigenvalue of H"].split()[-4:] == ["4.3100", "±", "0.0040", "estimate"]
    assert lines["loss"].split()[-2:] == ["2.731", "exact"]
    assert lines["norm of the gradient"].endswith("not converged")
    assert "threshold 6.33e+04" in lines["sharpness as AdamW sees it"]


def test_no_finding_is_said():
    from dataclasses import replace

    assert "No finding" in terminal.text(replace(synthetic.large(), findings=[]))


def test_a_line_for_each_stage_and_the_time_left(land, monkeypatch):
    """At a hundred products in ten seconds, what is left of the products takes a tenth of a second each."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    announce = Announcer(land, tiny())
    for index, plan in enumerate(STAGES[:3]):
        announce(index, len(STAGES), plan.title, None)
        count = 100 if plan.name == "traces" else 0
        announce(index, len(STAGES), plan.title, Stage(plan.name, plan.title, "exact", "", 10.0, count))
    announce(3, len(STAGES), STAGES[3].title, None)
    lines = shown.getvalue().replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("[ 3/12] traces and norms") and "exact" in line for line in lines)
    left = sum(announce.expected[plan.name] for plan in STAGES[3:])
    assert f"about {left / 10:.0f} s left" in lines[-1] or f"about {left / 600:.0f} min left" in lines[-1]
