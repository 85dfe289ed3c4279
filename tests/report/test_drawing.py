"""Scales, colours, charts: what has no place on an axis is still seen, and text can be read on every colour."""

import math
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest

from curvlens.report.figures import paper
from curvlens.report.figures.colour import LEVELS, bytes_of, contrast, diverging, luminance, sequential
from curvlens.report.figures.dots import Series, dots, log_range
from curvlens.report.figures.heatmap import Colouring, heatmap
from curvlens.report.figures.lines import Line, lines, multiples, spectrum_axis, steps_axis
from curvlens.report.figures.png import gray_png, indexed_png
from curvlens.report.figures.scale import Linear, Log, SymLog
from curvlens.report.figures.scene import Cells, Dot, Raster, Scene, Text
from curvlens.report.figures.style import COLOURS, SERIES, over, resolved
from curvlens.report.figures.words import indexed, measured, number, runs

NAN = math.nan


def words(scene):
    return [mark.words for mark in scene.marks if isinstance(mark, Text)]


def tips(scene):
    return [mark.tip for mark in scene.marks if getattr(mark, "tip", "")]


@pytest.mark.parametrize(
    "scale", [Linear(-2, 5), Log(1e-3, 1e2), SymLog(-5, 50, 1e-3), Log(0.058, 0.064), Linear(3, 3)]
)
def test_scales_rise_and_name_their_ticks(scale):
    ticks = scale.ticks()
    places = [scale.fraction(value) for value, _ in ticks]
    assert len(ticks) >= 1
    assert places == sorted(places)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert scale.fraction(NAN) is None
    assert scale.fraction(math.inf) is None


def test_a_logarithmic_scale_has_no_place_for_zero():
    assert Log(1, 10).fraction(0.0) is None
    assert Log(1, 10).fraction(-1.0) is None
    assert Log.of([0.0, -3.0, NAN]).fraction(0.5) is not None  # an axis even without a positive value


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_reaches_aa(dark):
    ground, raised = COLOURS["ground"][dark], COLOURS["raised"][dark]
    for name in ("ink", "muted", *SERIES):
        assert contrast(COLOURS[name][dark], ground) >= 4.5, name
        assert contrast(COLOURS[name][dark], raised) >= 4.5, name
    assert contrast(COLOURS["edge"][dark], ground) >= 3
    for kind in "qd":
        for level in range(LEVELS):
            role = f"{kind}{level}"
            text, cell = resolved(over(role), dark)["fill"], resolved(role, dark)["fill"]
            assert contrast(text, cell) >= 4.5, (role, dark)


@pytest.mark.parametrize("dark", [False, True])
def test_maps_are_read_without_telling_hues_apart(dark):
    light = [luminance(c) for c in sequential(dark)]
    assert light == sorted(light, reverse=not dark)
    both = [luminance(c) for c in diverging(dark)]
    half = LEVELS // 2
    assert both[:half] == sorted(both[:half], reverse=dark)
    assert both[half:] == sorted(both[half:], reverse=not dark)
    # Machado, Oliveira, Fernandes 2009, severity 1: orange and blue stay apart for all three kinds of dichromats
    for matrix in (
        ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
        ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    ):
        seen = [
            [sum(m * c for m, c in zip(row, bytes_of(diverging(dark)[level]), strict=True)) for row in matrix]
            for level in (8, LEVELS - 9)
        ]
        assert math.dist(*seen) > 60  # of 441 between black and white


def test_numbers_to_their_errors():
    assert measured(21.3771, 0.1392) == "21.38 ± 0.14"
    assert measured(1.23456e-5, 5.1e-7) == "(1.235 ± 0.051)×10⁻⁵"
    assert measured(-0.5, 0.0) == "−0.5"
    assert measured(0.0, 0.0) == "0"
    assert measured(0.01, 3.0) == "0.0 ± 3.0"
    assert measured(NAN, 1.0) == "not known"
    assert measured(2.0, NAN) == "2 (error not known)"
    assert number(-1.5e-7) == "−1.5×10⁻⁷"
    assert number(1e-7) == "10⁻⁷"
    assert number(math.inf) == "∞"
    assert indexed("H_o and λ_max, ‖H‖_F") == [
        ("H", False), ("o", True), (" and λ", False), ("max", True), (", ‖H‖", False), ("F", True), ("", False),
    ]  # fmt: skip
    assert indexed("attn_o.weight") == [("attn_o.weight", False)]
    assert runs(["embed.token", "layer.0.attn.query", "layer.0.mlp.up", "layer.1.norm", "norm"]) == [
        ("embed", 0, 1), ("layer.0", 1, 3), ("layer.1", 3, 4), ("norm", 4, 5),
    ]  # fmt: skip


VALUES = [[0.0, 1e-3, NAN], [2.0, 1e-12, 5.0]]


def test_zero_and_missing_cells_are_told_apart():
    scene = heatmap(
        "m", "t", "d", VALUES, ["a", "b"], ["x", "y", "z"], Colouring.log(v for r in VALUES for v in r)
    )
    roles = {mark.role: len(mark.corners) for mark in scene.marks if isinstance(mark, Cells)}
    assert roles["nought"] == 1
    assert roles["missing"] == 1
    assert "exactly zero" in words(scene)
    assert "not known" in words(scene)
    assert scene.cell_words["words"].split("|") == ["0", "0.001", "", "2", "10⁻¹²", "5"]
    assert Colouring.log([1e-12, 5.0]).role(1e-12) == "q0"  # below the axis: its lowest colour


def test_signs_are_centred_at_zero():
    colouring = Colouring.around_zero([-4.0, 0.5])
    assert colouring.level(-4.0) == 0
    assert colouring.level(4.0) == LEVELS - 1
    assert colouring.level(-0.5) == LEVELS - 1 - colouring.level(0.5)


def test_large_maps_are_one_picture():
    n = 60
    values = [[(i + 1) * (j + 1.0) for j in range(n)] for i in range(n)]
    names = [f"layer.{i // 6}.attn.{i % 6}" for i in range(n)]
    scene = heatmap("m", "t", "d", values, names, names, Colouring.log(v for r in values for v in r))
    assert [len(m.cells) for m in scene.marks if isinstance(m, Raster)] == [n]
    assert len(scene.marks) < 100
    ET.fromstring(scene.svg(alone=True))


def unpack(data):
    """Pixels of a PNG whose rows are unfiltered, and its palette."""
    at, found = 8, {}
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        found[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    rows = zlib.decompress(found[b"IDAT"])
    return [list(rows[i * (width + 1) + 1 : (i + 1) * (width + 1)]) for i in range(height)], found.get(
        b"PLTE"
    )


def test_png():
    pixels = [[0, 1, 2], [2, 0, 1]]
    assert unpack(indexed_png(pixels, ["#ff0000", "#00ff00", "#010203"])) == (
        pixels,
        b"\xff\0\0\0\xff\0\1\2\3",
    )
    assert unpack(gray_png(pixels)) == (pixels, None)
    with pytest.raises(ValueError, match="1 to 256 colours, got 300"):
        indexed_png(pixels, ["#000000"] * 300)


def test_dots_show_zero_negative_and_missing():
    series = [Series("a", "outer", [1.0, -2.0, 0.0, NAN], [0.5, 3.0, 0.0, 0.0])]
    scene = dots("d", "t", "d", ["p", "q", "r", "s"], series, log_range(series))
    marks = {mark.tip: mark for mark in scene.marks if isinstance(mark, Dot) and mark.tip}
    assert marks["p, a: 1.00 ± 0.50"].role == "mark-outer"
    assert marks["q, a: −2.0 ± 3.0"].role == "hollow-outer"
    assert marks["r, a: 0"].x < min(m.x for tip, m in marks.items() if not tip.startswith("r"))
    assert "?" in words(scene)
    assert "hollow: negative, at its size" in words(scene)


def test_curves_break_where_there_is_no_place():
    curve = Line("λ", "total", [0.0, 1, 2, 3, 4, 5], [1.0, 2.0, -3.0, 2.0, NAN, 1.0])
    scene = lines("c", "t", "d", [curve], steps_axis(curve.x), Log(0.5, 4))
    assert any("−3, which has no place" in tip for tip in tips(scene))
    assert any("not a finite number" in tip for tip in tips(scene))
    assert any(tip.endswith("at 5: 1") for tip in tips(scene))  # a lone point is still drawn


def test_every_chart_is_well_formed_and_on_paper(tmp_path):
    curve = Line("density", "total", [-1.0, 0.0, 2.0], [0.1, 1.0, 0.0], [0.05, 0.2, 0.1])
    axis = spectrum_axis(-1, 2)
    series = [Series("a <b> & H_o", "total", [1.0, 2.0], [0.1, 0.2])]
    scenes = [
        lines(
            "lines",
            "t",
            "d",
            [curve],
            axis,
            Log(1e-3, 1),
            floor=True,
            rug=[(1.5, 0.1, "e")],
            events=[(0, "$5 & <")],
        ),
        multiples("multiples", "t", "d", [("one", curve), ("two", curve)], axis, Log(1e-3, 1)),
        dots("dots", "t", "d", ["x", "y"], series, log_range(series), unit="‖H‖_F", lines=[(1.5, "2/η")]),
        heatmap("map", "t & <t>", "d", VALUES, ["a", "b"], ["x", "y", "z"], Colouring.around_zero([2.0])),
    ]
    for scene in scenes:
        root = ET.fromstring(scene.svg(alone=True))
        assert root.find("{http://www.w3.org/2000/svg}title").text == scene.title
        assert ET.fromstring(scene.svg(alone=True, dark=True)) is not None
        if paper.available():
            paper.save_png(scene, tmp_path / "drawing.png", scale=1)
            data = (tmp_path / "drawing.png").read_bytes()
            width, height = struct.unpack(">II", data[16:24])
            assert abs(width - scene.width) <= 1
            assert abs(height - scene.height) <= 1


def test_a_path_does_not_drift():
    scene = Scene("s", "t", "d", 100, 100)
    scene.line("axis", *((i * 0.333, 5.0) for i in range(301)))
    d = scene.svg().split('d="M')[1].split('"')[0]
    total = sum(float(step.split(",")[0]) for step in d.replace("M", "").split("l"))
    assert total == pytest.approx(300 * 0.333, abs=0.06)
