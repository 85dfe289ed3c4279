"""Data classes to JSON and back, checked: what came that was not expected is named by its path.

NaN and infinity, which JSON does not have, are written as null and read as NaN.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from curvlens.report.data import SCHEMA, Report
from curvlens.report.packing import unpacked


class SchemaError(ValueError):
    """A file that is no report, or one of another version."""


def encode(value: Any) -> Any:
    """Plain lists, dictionaries, strings and finite numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def text(content: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)


def decode_report(source: str, kind: type[Report] = Report) -> Report:
    """A report from JSON text, validated."""
    try:
        content = json.loads(source)
    except json.JSONDecodeError as error:
        raise SchemaError(f"expected the JSON of a report, got text that is none: {error}") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise SchemaError("expected a report as `curvlens analyze` writes it, got JSON without 'schema'")
    if content["schema"] != SCHEMA:
        raise SchemaError(
            f"expected a report of the schema {SCHEMA!r}, got {content['schema']!r}; "
            "write it anew with this version of curvlens"
        )
    return decode(kind, unpacked({key: part for key, part in content.items() if key != "schema"}))


def decode(kind: Any, value: Any, path: str = "report") -> Any:
    """A value as the type says; SchemaError with the path where it is not."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_fields(kind, value, path)
    if origin is list:
        _expect(isinstance(value, list), "a list", value, path)
        return [decode(parts[0], part, f"{path}[{i}]") for i, part in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, path)
        return {key: decode(parts[1], part, f"{path}.{key}") for key, part in value.items()}
    if origin is Literal:
        _expect(value in parts, f"one of {', '.join(map(repr, parts))}", value, path)
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        return decode(next(part for part in parts if part is not type(None)), value, path)
    return _decode_scalar(kind, value, path)


def _decode_fields(kind: Any, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), f"an object ({kind.__name__})", value, path)
    hints = _hints(kind)
    unknown = sorted(value.keys() - hints.keys())
    if unknown:
        raise SchemaError(f"{path}: expected the fields {', '.join(hints)}, got {unknown[0]!r} too")
    found = {}
    for f in fields(kind):
        if f.name in value:
            found[f.name] = decode(hints[f.name], value[f.name], f"{path}.{f.name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            raise SchemaError(f"{path}: expected the field {f.name!r}, got none")
    return kind(**found)


def _decode_scalar(kind: Any, value: Any, path: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        _expect(number or value is None, "a number or null", value, path)
        return math.nan if value is None else float(value)
    fits = number and isinstance(value, int) if kind is int else isinstance(value, kind)
    _expect(fits, {int: "a whole number", str: "text", bool: "true or false"}[kind], value, path)
    return value


def _expect(holds: bool, what: str, value: Any, path: str) -> None:
    if not holds:
        raise SchemaError(f"{path}: expected {what}, got {str(value)[:60]!r}")


@lru_cache(None)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


# -- the schema itself, for other readers


def json_schema(kind: Any = Report) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a report."""
    definitions: dict[str, Any] = {}
    body = _describe(kind, definitions)
    root = definitions.pop(kind.__name__)
    root["properties"] = {"schema": {"const": SCHEMA}, **root["properties"]}
    root["required"] = ["schema", *root["required"]]
    del body
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        **root,
        "$defs": definitions,
    }


def _describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, parts = get_origin(kind), get_args(kind)
    describe: Callable[[Any], dict[str, Any]] = lambda part: _describe(part, definitions)  # noqa: E731
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}
            hints = _hints(kind)
            definitions[kind.__name__] = {
                "type": "object",
                "description": (kind.__doc__ or "").strip().splitlines()[0],
                "properties": {f.name: describe(hints[f.name]) for f in fields(kind)},
                "required": [
                    f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
                ],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is list:
        return {"type": "array", "items": describe(parts[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": describe(parts[1])}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [describe(p) if p is not type(None) else {"type": "null"} for p in parts]}
    return {"type": {int: "integer", str: "string", bool: "boolean", float: ["number", "null"]}[kind]}
