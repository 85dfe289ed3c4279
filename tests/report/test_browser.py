"""The page in a browser: no error, no request, switches and keys work, and the numbers are those of the data."""

import json

import pytest

from curvlens.report import page
from curvlens.report.document import stored
from curvlens.report.packing import unpacked
from report import synthetic
from report.browser import Browser, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")

SHOWN = (
    """return [...document.querySelectorAll(arguments[0])].filter(e => e.getBoundingClientRect().width > 0)"""
)
KEY = """document.querySelector(arguments[0]).dispatchEvent(
    new KeyboardEvent('keydown', {key: arguments[1], bubbles: true}))"""
VISIBLE = "#blocks .panel svg"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page.html(synthetic.large()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def content(path):
    return unpacked(stored(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def opened(browser, path):
    """The page, freshly opened on a wide screen; afterwards nothing was asked for and nothing went wrong."""
    browser.size(1280)
    browser.open("about:blank")
    browser.logs(), browser.requests()
    browser.open(path)
    yield browser
    assert browser.logs() == []
    assert [url for url in browser.requests() if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


def test_nothing_is_asked_for_and_nothing_goes_wrong(opened):
    assert opened.run("return document.title").endswith("· curvlens")
    assert opened.run("return document.querySelectorAll('.tools button').length") > 10


def test_the_policy_holds(browser, tmp_path, path):
    """A script or style that someone adds later does not run: the console says so, and the page is as before."""
    text = path.read_text(encoding="utf-8").replace(
        "</main>", "<script>document.title = 'changed'</script></main>"
    )
    (tmp_path / "changed.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "changed.html")
    assert browser.run("return document.title") != "changed"
    assert any("Content Security Policy" in entry["message"] for entry in browser.logs())


def test_switches(opened):
    shown = lambda: opened.run(SHOWN + ".map(e => e.dataset.panel)", "#blocks .panel")  # noqa: E731
    assert shown() == ["blocks-H-layers"]
    opened.run("document.querySelector('#blocks-0-2').click()")
    assert shown() == ["blocks-H_f-layers"]
    opened.run("document.querySelector('#blocks-1-1').click()")
    assert shown() == ["blocks-H_f-blocks"]


def test_switches_without_scripts(browser, path):
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.size(1280)
        browser.open(path)
        root = browser.command("DOM.getDocument", depth=-1)["root"]

        def find(query):
            return browser.command("DOM.querySelector", nodeId=root["nodeId"], selector=query)["nodeId"]

        def visible(query):
            try:
                return bool(browser.command("DOM.getBoxModel", nodeId=find(query)))
            except AssertionError:  # no layout object: it is not shown
                return False

        assert visible('[data-panel="blocks-H-layers"]')
        assert not visible('[data-panel="blocks-H_o-layers"]')
        quad = browser.command("DOM.getContentQuads", nodeId=find("#blocks-0-1 + span"))["quads"][0]
        browser.command("DOM.scrollIntoViewIfNeeded", nodeId=find("#blocks-0-1 + span"))
        quad = browser.command("DOM.getContentQuads", nodeId=find("#blocks-0-1 + span"))["quads"][0]
        at = {"x": (quad[0] + quad[2]) / 2, "y": (quad[1] + quad[5]) / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            browser.command("Input.dispatchMouseEvent", type=kind, **at)
        assert visible('[data-panel="blocks-H_o-layers"]')
        assert not visible('[data-panel="blocks-H-layers"]')
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_numbers_equal_the_data(opened, content):
    shown = opened.run(
        "return [...document.querySelectorAll('[data-key]')].map(e => [e.dataset.key, e.dataset.v])"
    )
    assert {key: float(v) for key, v in shown if v} == {
        key: n["value"] for key, n in content["numbers"].items() if n["value"] is not None
    }


def test_every_cell_of_the_large_map_says_its_number(opened, content):
    """Moved to by keys, in the picture of 99 × 99 cells; read from packed data by the page's own script."""
    opened.run("document.querySelector('#blocks-1-1').click()")
    svg = '[data-panel="blocks-H-blocks"] svg'
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp"):
        opened.run(KEY, svg, key)
    text = opened.run("return document.querySelector('#blocks .readout').textContent")
    names, m = content["maps"]["H"]["names"], content["maps"]["H"]
    assert text.startswith(f"{names[1]} × {names[2]}: ‖H‖_F ")
    value, error = (part.strip("()×10⁻¹²³⁴⁵⁶⁷⁸⁹") for part in text.split("‖_F ")[1].split(" ± "))
    scale = m["value"][1][2] / float(value)
    assert float(error) * scale == pytest.approx(m["stderr"][1][2], rel=0.06)


def test_script_and_page_write_numbers_alike(opened, content):
    """The readout of a small map was written in Python, that of heads by the script from the same data."""
    from curvlens.report.figures.words import measured

    opened.run("document.querySelector('#heads-0-0').click()")
    svg = '[data-panel="heads-norm-QQ"] svg'
    opened.run(KEY, svg, "ArrowRight")
    for h in range(12):
        text = opened.run("return document.querySelector('#heads .readout').textContent")
        assert text == f"layer.0.attn × head {h}: ‖QQ‖ " + measured(
            content["heads"]["norms"]["QQ"][0][h], 0.0
        )
        opened.run(KEY, svg, "ArrowRight")


def test_a_layer_opens_into_its_blocks(opened, content):
    svg = '[data-panel="blocks-H-layers"] svg.wide'
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        opened.run(KEY, svg, key)
    assert opened.run("return location.hash") == "#blocks-H-layers@1,1"
    assert opened.run("return document.querySelector('.detail h4').textContent") == "Inside of layer.0"
    opened.run(KEY, ".detail svg", "ArrowRight")
    text = opened.run("return document.querySelector('#blocks .readout').textContent")
    assert text.startswith("layer.0.norm1 × layer.0.norm1: ‖H‖_F ")
    assert len(opened.run("return document.querySelectorAll('.detail rect:not(.cursor)')")) == 64


def test_an_address_leads_back_to_its_cell(browser, path):
    browser.size(1280)
    browser.open("about:blank")
    browser.open(path.as_uri() + "#blocks-H_o-blocks@4,7")
    assert browser.run("return document.querySelector('#blocks-0-1').checked")
    text = browser.run("return document.querySelector('#blocks .readout').textContent")
    assert text.startswith("layer.0.attn.key × layer.0.norm2: ‖H_o‖_F")


def test_tips_under_the_pointer(opened):
    tip = opened.run(
        """const svg = [...document.querySelectorAll('#depth svg')].find(s => s.getBoundingClientRect().width);
        const dot = svg.querySelector('circle'); svg.scrollIntoView({block: 'center'});
        const box = dot.getBoundingClientRect();
        dot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.x, clientY: box.y, bubbles: true}));
        return document.querySelector('.tip').textContent"""
    )
    assert tip.startswith("layer.0.attn, passed down: ")
    assert " ± " in tip


def test_tables_sort(opened, content):
    opened.run("document.querySelector('details[data-name=heads]').open = true")
    column = """const t = document.querySelector('details[data-name=heads] table');
        return [...t.tBodies[0].rows].map(r => Number(r.cells[2].textContent))"""
    click = "document.querySelectorAll('details[data-name=heads] th button')[2].click()"
    opened.run(click)
    down = opened.run(column)
    assert down == sorted(down, reverse=True)
    opened.run(click)
    assert opened.run(column) == down[::-1]
    norms = sorted(v for row in content["heads"]["norms"]["QQ"] for v in row)
    assert down[::-1] == pytest.approx(norms, rel=1e-3)
    assert (
        opened.run("return document.querySelector('details[data-name=heads] th[aria-sort]').ariaSort")
        == "ascending"
    )


def test_all_pairs_of_a_large_map(opened, content):
    opened.run(
        """const d = document.querySelector('details[data-name=blocks]'); d.open = true;
        [...d.querySelectorAll('button')].find(b => b.textContent === 'Show all pairs').click()"""
    )
    rows = opened.run(
        """return [...document.querySelectorAll('details[data-name=blocks] tbody tr')]
            .map(r => [...r.cells].map(c => c.textContent))"""
    )
    assert len(rows) == 3 * 99 * 100 // 2
    part, row, column, value, error = rows[5000]
    m = content["maps"][part]
    i, j = m["names"].index(row), m["names"].index(column)
    assert float(value) == pytest.approx(m["value"][i][j], rel=1e-4)
    assert float(error) == pytest.approx(m["stderr"][i][j], rel=0.06)


def test_files_to_save(opened):
    """What the buttons would write: the drawing in the colours on the screen, the table with all its rows."""
    saved = opened.run(
        """const found = {}; const make = URL.createObjectURL;
        URL.createObjectURL = blob => { found.last = blob; return make.call(URL, blob); };
        const press = (root, label) => {
            [...document.querySelectorAll(root + ' button')].find(b => b.textContent === label).click();
            return found.last.text();
        };
        return Promise.all([press('#blocks', 'SVG'), press('#depth', 'SVG'), press('#heads', 'CSV')])"""
    )
    import xml.etree.ElementTree as ET

    for text in saved[:2]:
        root = ET.fromstring(text)
        assert len(list(root.iter())) > 20
        assert 'class="wide"' not in text
        assert any("rgb(" in (e.get("fill") or "") for e in root.iter())
    assert len(saved[2].splitlines()) == 145
    assert saved[2].startswith("layer,head,‖QQ‖")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (820, False), (1400, False), (1400, True)])
def test_widths_and_themes(browser, path, width, dark):
    browser.size(width, dark=dark)
    browser.open(path)
    assert browser.run("return document.documentElement.scrollWidth") == width  # nothing sticks out
    small = browser.run(SHOWN + ".length", "svg.small")
    wide = browser.run(SHOWN + ".length", "svg.wide")
    assert (small > 0, wide > 0) == ((True, False) if width < 720 else (False, True))
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert browser.run(SHOWN + ".length", ".night" if dark else ".day") > 0
    assert browser.run(SHOWN + ".length", ".day" if dark else ".night") == 0


def test_print(browser, path):
    browser.size(1000)
    browser.open(path)
    browser.command("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run(SHOWN + ".length", "nav, .tools, .switch, details:not([open])") == 0
        assert browser.run(SHOWN + ".length", ".finding") == 5
        assert browser.run(SHOWN + ".length", "#blocks svg") > 0
    finally:
        browser.command("Emulation.setEmulatedMedia", media="")


def test_every_figure_has_a_name_and_can_be_reached(opened):
    drawings = opened.run(
        SHOWN + ".map(e => [e.getAttribute('aria-label'), e.getAttribute('tabindex')])",
        "figure svg:not(.shared)",
    )
    assert len(drawings) >= 8
    assert all(label for label, _ in drawings)
    assert [label for label, index in drawings if index != "0"] == [
        "Spectral densities of the diagonal blocks"
    ]
    labels = opened.run("return [...document.querySelectorAll('input')].every(i => i.labels.length === 1)")
    assert labels


@pytest.mark.parametrize("kind", ["exact_report", "estimated_report", "nothing", "comparison"])
def test_other_pages(kind, browser, request, tmp_path):
    if kind == "comparison":
        text = page.comparison(synthetic.large(), synthetic.large(seed=1))
    else:
        text = page.html(synthetic.nothing() if kind == "nothing" else request.getfixturevalue(kind))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    browser.logs()
    for width in (390, 1280):
        browser.size(width)
        browser.open(tmp_path / "page.html")
        assert browser.logs() == []
        assert browser.run("return document.documentElement.scrollWidth") == width
    data = json.loads(browser.run("return document.getElementById('report').textContent"))
    assert data["schema"]
    if kind != "comparison":
        shown = browser.run("return [...document.querySelectorAll('.finding')].map(e => e.id)")
        assert shown == [f"finding-{f['id']}" for f in unpacked(data)["findings"]]
