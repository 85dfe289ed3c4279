"""A report written and read again, and what is not a report."""

import json
import math

import pytest

from curvlens.report.data import NUMBERS, SEVERITIES, Number, Report, shown, with_error
from curvlens.report.files import read, write
from curvlens.report.schema import SchemaError, decode_report, encode, json_schema


@pytest.mark.parametrize("kind", ["exact_report", "estimated_report"])
def test_json_and_back(kind, request, tmp_path):
    report = request.getfixturevalue(kind)
    path = tmp_path / "deep" / "report.json"
    text = report.to_json(path)
    assert path.read_text() == text
    again = Report.from_json(path)
    assert encode(again) == encode(report)  # NaN is not equal to itself
    assert again.meta == report.meta
    assert set(report.numbers) <= set(NUMBERS)
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_page_is_read_too(exact_report):
    page = f'<!doctype html><script type="application/json" id="data">{exact_report.to_json()}</script>'
    assert encode(Report.from_json(page)) == encode(exact_report)
    with pytest.raises(ValueError, match="page that holds a report"):
        read("<!doctype html><p>nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("schema"), "without 'schema'"),
        (lambda r: r.update(schema="curvlens-report/99"), "expected a report of the schema .* got .*99"),
        (lambda r: r["meta"].pop("model"), r"report\.meta: expected the field 'model', got none"),
        (lambda r: r["meta"].update(seed="x"), r"report\.meta\.seed: expected a whole number, got 'x'"),
        (lambda r: r["stages"][1].update(status="fine"), r"report\.stages\[1\]\.status: expected one of"),
        (lambda r: r.update(more=1), "got 'more' too"),
        (
            lambda r: r["numbers"]["loss"].update(value="1"),
            r"numbers\.loss\.value: expected a number or null",
        ),
        (lambda r: r.update(stages={}), r"report\.stages: expected a list"),
    ],
)
def test_what_is_no_report(change, message, exact_report):
    content = json.loads(exact_report.to_json())
    change(content)
    with pytest.raises(SchemaError, match=message):
        decode_report(json.dumps(content))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="got no file"):
        Report.from_json(tmp_path / "none.json")
    (tmp_path / "empty.json").write_text("no json")
    with pytest.raises(SchemaError, match="text that is none"):
        Report.from_json(tmp_path / "empty.json")


def test_the_schema_describes_what_is_written(exact_report):
    """By a reader of JSON Schema of our own: types, required and further fields."""
    schema = json_schema()

    def check(rule, value, path):
        if "$ref" in rule:
            rule = schema["$defs"][rule["$ref"].rsplit("/", 1)[1]]
        if "anyOf" in rule:
            rule = next(r for r in rule["anyOf"] if (r.get("type") == "null") == (value is None))
            return check(rule, value, path)
        if "const" in rule:
            assert value == rule["const"]
        elif "enum" in rule:
            assert value in rule["enum"], path
        elif rule["type"] == "object" and "properties" in rule:
            assert set(rule["required"]) <= set(value) <= set(rule["properties"]), path
            for key, part in value.items():
                check(rule["properties"][key], part, f"{path}.{key}")
        elif rule["type"] == "object":
            for key, part in value.items():
                check(rule["additionalProperties"], part, f"{path}.{key}")
        elif rule["type"] == "array":
            for i, part in enumerate(value):
                check(rule["items"], part, f"{path}[{i}]")
        else:
            kinds = {
                "integer": int,
                "string": str,
                "boolean": bool,
                "null": type(None),
                "number": (int, float),
            }
            types = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
            assert any(isinstance(value, kinds[kind]) for kind in types), path
        return None

    check(schema, json.loads(exact_report.to_json()), "report")
    assert schema["properties"]["schema"] == {"const": "curvlens-report/1"}
    assert list(SEVERITIES) == schema["$defs"]["Finding"]["properties"]["severity"]["enum"]


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_how_numbers_are_shown():
    assert shown(0.0) == "0"
    assert shown(math.nan) == "–"
    assert shown(1234567.0) == "1.23e+06"
    assert with_error(1.23456, 0.0567) == "1.235 ± 0.057"
    assert with_error(2.0, math.nan) == "2 ± ?"
    assert str(Number("x", 3.0)) == "3"
    assert str(Number("x", 3.0, 0.5, exact=False)) == "3 ± 0.5"
