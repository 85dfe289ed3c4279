"""The page of results, from measurements that are kept with it."""

import json
import re
from pathlib import Path

from curvlens import studies
from curvlens.studies import page

DOCS = Path(__file__).parents[2] / "docs"


def test_keep_and_render(tmp_path):
    made = studies.reproduce("A-8", "smoke", out=tmp_path / "out", figure=False)
    docs = tmp_path / "docs"
    kept = page.keep(made.folder / "result.json", docs)
    assert set(json.loads(kept.read_text())) == set(page.KEYS)
    text = page.render(docs).read_text()
    assert made.verdict in text
    assert made.study.claim in text
    # the link of the table is the heading's anchor
    (anchor,) = re.findall(r"\| \[A-8\]\(#([^)]*)\)", text)
    assert anchor == "a-8-linear-mlps-grow-alike-at-every-depth"
    # what was not measured is said
    (left,) = re.findall(r"Not on this page yet.*: (.*)\.\n", text)
    assert left.split(", ") == [name for name in studies.names() if name != "A-8"]
    (image,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (docs / image).stat().st_size > 2000
    for finding in made.findings:
        assert finding.what in text
    # so many digits are kept that the findings are the same, those on exact laws too
    for a, b in zip(studies.read(kept).findings, made.findings, strict=True):
        assert abs(a.ours - b.ours) <= 1e-10 * max(1, abs(b.ours))
        assert a.outcome == b.outcome


def test_the_page_is_that_of_its_measurements():
    """The committed page has a section for every measurement beside it, with today's verdict."""
    text = (DOCS / "reproduction.md").read_text()
    kept = sorted(path.stem for path in (DOCS / page.KEPT).glob("*.json"))
    assert kept
    assert set(kept) <= set(studies.names())
    for name in kept:
        made = studies.read(DOCS / page.KEPT / f"{name}.json")
        section = text.split(f"## {name}: ")[1].split("\n## ")[0]
        assert f"**{made.verdict.capitalize()}**" in section
        for finding in made.findings:
            assert f"| {finding.what.replace('|', chr(92) + '|')} |" in section


def test_images_are_small():
    assert sum(path.stat().st_size for path in (DOCS / page.KEPT).glob("*.png")) < 1.5e6
