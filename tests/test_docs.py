"""Every Python snippet of the manual runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(code, str(page), "exec"), names)


def test_the_manual_lists_every_page():
    listed = re.findall(r": ([a-z-]+\.md)", (DOCS.parent / "mkdocs.yml").read_text())
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_reference_names_everything():
    import curvlens
    from curvlens.cli import COMMANDS

    text = (DOCS / "api.md").read_text()
    named = set(re.findall(r"`([A-Za-z_]+)", text))
    assert set(curvlens.__all__) <= named
    assert {command.__name__ for command in COMMANDS} <= named


def test_every_finding_is_explained():
    from curvlens.report.findings import NAMES
    from curvlens.training import findings as training

    table = re.findall(r"^\| `([a-z-]+)` \| ", (DOCS / "report.md").read_text(), re.M)
    assert sorted(table) == sorted({*NAMES, *training.NAMES} | {"quick", "standard", "thorough"} & set(table))
