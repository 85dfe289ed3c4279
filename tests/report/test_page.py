"""The page as text: what it holds, how large it is, and that nothing is left out in silence."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from curvlens.report import notebook, page
from curvlens.report.data import Map, Number, Report
from curvlens.report.document import document, stored
from curvlens.report.figures import CHAPTERS, blocks, figures, paper, save, track
from curvlens.report.figures.pair import change
from curvlens.report.packing import packed, unpacked
from curvlens.report.schema import encode
from report import synthetic

KB = 1000


@pytest.fixture(scope="session")
def large():
    return synthetic.large()


@pytest.fixture(scope="session")
def large_page(large):
    return page.html(large)


class Checker(HTMLParser):
    """Every element that is opened is closed, but for those that HTML closes itself."""

    LOOSE = ("meta", "input", "br", "td", "th", "tr", "thead", "tbody", "li")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.refs = [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.refs += [v for k, v in attributes if k in ("href", "src") and not v.startswith(("#", "data:"))]
        assert not any(name.startswith("on") or name == "style" for name in given), given
        if tag not in self.LOOSE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.LOOSE:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.LOOSE:
            assert self.open.pop() == tag


def check(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert checker.refs == []  # nothing from outside
    return checker


def test_the_size_contract(large_page):
    assert len(large_page.encode()) <= 500 * KB
    shell = document("", [], [], {}).encode()
    assert len(shell) <= 60 * KB
    script = re.search(r"<script>(.*?)</script>", large_page, re.DOTALL)[1]
    assert len(script.encode()) <= 25 * KB
    for svg in re.findall(r"<svg.*?</svg>", large_page, re.DOTALL):
        assert svg.count("<") - svg.count("</") <= 2000


def test_the_page_is_well_formed(large_page, exact_report, estimated_report):
    for text in (large_page, page.html(exact_report), page.html(estimated_report)):
        check(text)


def test_the_policy_names_this_script_and_style(large_page):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', large_page)[1]
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", large_page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("kind", ["exact_report", "estimated_report", "large"])
def test_the_report_comes_back_from_its_page(kind, request, tmp_path):
    report = request.getfixturevalue(kind)
    path = tmp_path / "report.html"
    report.to_html(path)
    again = Report.from_json(path)
    assert encode(again) == encode(page.rounded(report))
    assert again.meta.weights_sha256 == report.meta.weights_sha256
    assert encode(page.rounded(again)) == encode(again)
    for name, n in report.numbers.items():
        assert again.numbers[name].value == pytest.approx(n.value, rel=1e-6, nan_ok=True)
    for part, m in report.maps.items():
        for row, other, errors, own in zip(
            m.value, again.maps[part].value, m.stderr, again.maps[part].stderr, strict=True
        ):
            assert other == pytest.approx(row, rel=1e-6 if m.exact else 2e-5, nan_ok=True)
            assert own == pytest.approx(errors, rel=0.01, nan_ok=True)
            assert all(
                math.isnan(e) or o >= e * (1 - 1e-6) for o, e in zip(own, errors, strict=True)
            )  # rounded up


def test_packing():
    matrix = [[float(i * 10 + j) for j in range(6)] for i in range(5)]
    square = [[float(min(i, j)) - 2.5 for j in range(6)] for i in range(6)]
    content = {
        "a": matrix, "b": square, "c": [1.5, None] * 20, "d": [1.5, None] * 20, "short": [1.0, 2.0], "text": ["x"] * 30,
        "whole": list(range(40)), "ragged": [[1.0] * 20, [2.0] * 30], "empty": [], "flags": [True] * 30,
        "deep": [{"x": matrix}, None, 0.1],
    }  # fmt: skip
    result = packed(content)
    json.dumps(result, allow_nan=False)
    assert result["b"]["symmetric"]
    assert result["d"] == {"same": "c"}
    assert unpacked(result) == content
    rows = [{"name": f"n{i}", "kind": "q", "deep": {"x": 0.5 * i, "y": None}} for i in range(20)]
    rows[3]["more"], rows[5]["more"] = [1], [2, 3]  # fields that few have
    by_field = packed({"rows": rows, "few": rows[:2], "none": [{}] * 5})
    assert by_field["rows"]["each"]["kind"] == {"all": "q"}
    assert by_field["rows"]["each"]["more"] == {"some": [[1], [2, 3]], "at": [3, 5]}
    assert list(by_field["rows"]["each"]["deep"]["each"]["x"]) == ["f4", "shape"]
    assert unpacked(by_field) == {"rows": rows, "few": rows[:2], "none": [{}] * 5}
    refers = [{"x": [float(i)] * 40, "y": [0.25] * 40} for i in range(6)]  # by their places, which stay
    assert unpacked(packed(refers)) == refers
    errors = packed({"stderr": [0.1] * 30})
    assert list(errors["stderr"]) == ["b2", "shape"]
    assert unpacked(errors)["stderr"][0] == pytest.approx(0.1, rel=0.01)
    assert unpacked(errors)["stderr"][0] >= 0.1


def test_numbers_on_the_page_are_those_of_its_data(large_page):
    numbers = stored(large_page)["numbers"]
    shown = dict(re.findall(r'data-key="([^"]+)" data-v="([^"]+)"', large_page))
    assert {key: float(v) for key, v in shown.items()} == {key: n["value"] for key, n in numbers.items()}
    text = re.search(r'data-key="lambda_max"[^>]*>(.*?)</dd>', large_page)[1]
    assert re.sub("<[^>]+>", "", text) == "4.3100 ± 0.0040"
    assert "not converged" in large_page


def test_text_from_outside_stays_text(large):
    title = '</script><script>alert(1)</script><img src=x onerror=1> "&'
    text = page.html(replace(large, meta=replace(large.meta, title=title)))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert Report.from_json(text).meta.title == title
    check(text)


def test_what_is_missing_leaves_a_sentence():
    text = page.html(synthetic.nothing("the budget was used up"))
    check(text)
    count = sum(len(parts) for *_, parts in CHAPTERS)
    assert text.count('class="absent"') == count
    assert text.count("<figure") == 0
    assert "were begun and not finished: the budget was used up." in text
    text = page.html(synthetic.nothing("not begun: the budget was used up"))
    assert "were not begun: the budget was used up." in text
    assert "were begun" not in text
    assert figures(synthetic.nothing()) == []
    skipped = [replace(s, status="skipped", why="left out as asked") for s in synthetic.nothing().stages]
    assert "were left out: left out as asked." in page.html(replace(synthetic.nothing(), stages=skipped))
    assert "are not part of this analysis." in page.html(replace(synthetic.nothing(), stages=[]))


def test_numbers_that_are_none_are_drawn(exact_report):
    """NaN, zero and negative values everywhere."""
    report = exact_report
    bad = [math.nan, 0.0, -1.0]
    spoil = lambda rows: [[bad[(i + j) % 3] for j in range(len(rows[0]))] for i in range(len(rows))]  # noqa: E731
    maps = {k: replace(m, value=spoil(m.value)) for k, m in report.maps.items()}
    heads = replace(
        report.heads,
        norms={k: spoil(v) for k, v in report.heads.norms.items()},
        entropy=spoil(report.heads.entropy),
    )
    nan = {"frobenius": Number("", math.nan), "trace": Number("", -1.0)}
    depth = [replace(s, passed=nan, created={"frobenius": Number("", 0.0)}, total={}) for s in report.depth]
    numbers = {
        k: replace(n, value=bad[i % 3], exact=False, stderr=math.nan)
        for i, (k, n) in enumerate(report.numbers.items())
    }
    pairs = [replace(p, value=math.nan) for p in report.eigenpairs]
    text = page.html(replace(report, maps=maps, heads=heads, depth=depth, numbers=numbers, eigenpairs=pairs))
    check(text)
    assert "not known" in text
    assert "nan" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_layers_are_exact_sums_of_their_blocks():
    value = [[3.0, 4.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    error = [[0.3, 0.4, 0.0], [0.4, 0.0, 0.0], [0.0, 0.0, 0.1]]
    norms, errors = blocks.coarser(Map(["a", "b", "c"], value, error, False), [[0, 1], [2]])
    whole = math.sqrt(9 + 16 + 16)
    assert norms == [[pytest.approx(whole), 0.0], [0.0, 2.0]]
    assert errors[0][0] == pytest.approx((0.9 + 1.6 + 1.6) / whole)  # as if all errors went the same way
    assert errors[1][1] == pytest.approx(0.1)
    assert blocks.coarser(Map(["a", "b", "c"], value, error, True), [[0, 1], [2]])[1] == [
        [0.0, 0.0],
        [0.0, 0.0],
    ]


def test_figures_in_a_folder(exact_report, tmp_path, monkeypatch, capsys):
    found = [figure.name for figure in figures(exact_report)]
    assert {"blocks", "roles", "heads", "depth", "spectrum", "spectra", "heterogeneity"} <= set(found)
    monkeypatch.setattr(paper, "available", lambda: False)
    paths = save(exact_report, tmp_path)
    assert "for PNG install matplotlib" in capsys.readouterr().err
    assert {path.suffix for path in paths} == {".svg", ".csv"}
    assert all(path.stat().st_size > 100 for path in paths)
    rows = (tmp_path / "roles.csv").read_text().splitlines()
    assert len(rows) == len(exact_report.groups) + 1
    assert len({len(row.split(",")) for row in rows}) == 1


def test_comparison(large, exact_report):
    other = synthetic.large(seed=1)
    numbers = {**large.numbers, "lambda_max": replace(large.numbers["lambda_max"], value=5.31)}
    text = page.comparison(large, replace(other, numbers=numbers), ("before", "after"))
    check(text)
    assert "1 of 5 estimated numbers differ by 2 errors or more" in text
    assert stored(text)["names"] == ["before", "after"]
    a, b = Number("", 1.0, 0.3, False), Number("", 2.0, 0.4, False)
    assert change(a, b) == (1.0, pytest.approx(0.5), pytest.approx(2.0))
    assert math.isnan(change(Number("", 1.0), Number("", 2.0))[2])
    check(page.comparison(large, exact_report))
    check(page.comparison(exact_report, exact_report))
    check(page.comparison(synthetic.nothing(), large))


class Recorded:
    """As `curvlens.training.record.Track`."""

    def __init__(self, measurements):
        self.header = {"model": "GPT", "optimizer": "AdamW", "blocks": ["a", "b"]}
        self.measurements = measurements
        self.steps = [m["step"] for m in measurements]

    def series(self, *path):
        found = []
        for value in self.measurements:
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            found.append(value)
        return found


def test_a_page_of_a_training_run():
    measurements = [
        {
            "step": 10 * i, "loss": 3.0 - 0.1 * i, "descent_threshold": 30.0,
            "lambda_max": {"value": None if i == 3 else 5.0 * i - 4, "error": 0.1},
            "lambda_min": {"value": -1.0, "error": 0.1},
            "preconditioned": {"value": 10.0**i, "error": 1.0, "threshold": 100.0, "rule": "38/η"},
            "blocks": {"row_norm": [1.0, None], "row_norm_error": [0.1, None], "trace": [-1.0, 0.0]},
            "train": {"step": [10 * i, 10 * i + 1], "loss": [3.0, "nan"]},
            "alignment": {"top": 0.1 * i, "gradient_curvature": 2.0},
            "heads": {
                "layers": ["0 attn", "1 attn"],
                "norms": {"QQ": [[1.0, 2.0], [3.0, None]]},
                "stderr": {"QQ": [[0, 0.1]] * 2},
            },
            "depth": {
                "names": ["attn", "mlp"],
                **{
                    kind: {"frobenius": [1.0, 2.0], "frobenius_error": [0.1, None]}
                    for kind in ("passed", "created", "total")
                },
            },
        }
        for i in range(6)
    ]  # fmt: skip
    found = synthetic.large().findings[:1]
    text = page.timeline(Recorded(measurements), [(20, "warm-up ends"), (40, "spike")], findings=found)
    check(text)
    assert text.count("<figure") == 7
    assert text.count('class="finding ') == 1
    assert "Above the limit at 3 of 6 measurements" in text
    assert "warm-up ends" in text
    few = page.timeline(Recorded([{"step": 1, "loss": 2.0}]))
    assert few.count('class="absent"') == 6
    assert list(track.figures(Recorded([]))) == ["The track holds no measurement yet."]
    check(page.timeline(Recorded([])))


def test_the_notebook(large, exact_report, tmp_path, monkeypatch):
    cell = exact_report._repr_mimebundle_()["text/html"]
    assert "<script" not in cell
    many = replace(large, findings=large.findings * 40)
    for report in (large, many, synthetic.nothing()):
        cell = notebook.cell(report)
        assert len(cell.encode()) <= 40 * KB
        assert "<script" not in cell
        assert cell.count("<div") == cell.count("</div")
    assert "more: <code>.findings</code>" in notebook.cell(many)
    opened = []
    monkeypatch.setattr(notebook.webbrowser, "open", lambda uri: opened.append(uri) or True)
    monkeypatch.setattr(notebook.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    large.show()
    assert opened == [(tmp_path / "report.html").as_uri()]
