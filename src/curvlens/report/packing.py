"""A report as a page holds it: lean JSON, long lists of numbers packed, so that a page stays small.

    {"f4": base64, "shape": [n, m]}      values as little-endian float32, seven digits
    {"f3": base64, "shape": [n, m]}      values that have errors: float32 without its lowest byte, four digits
    {"b2": base64, "shape": [n, m]}      errors as bfloat16, the upper half of a float32: two digits, rounded up
    {"symmetric": true, …}               the upper triangle alone, row by row
    {"same": "spectra/curves/0/…"}       the packed list, or the names, at another place
    {"each": {"name": […], …}, "count": n}   n objects, by field; {"all": v} is a field that is v in all of them,
                                         {"some": […], "at": [0, 3, …]} one that only these have

NaN is NaN there, and fields that have their usual value are left out. `Report.to_json` writes plain lists with all
digits; a page is drawn from the numbers that it keeps.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from typing import Any

from curvlens.report.data import SCHEMA, Report

KINDS = {"f4": 4, "f3": 3, "b2": 2}  # bytes of a number
LEAST = 12  # numbers that are packed
ALIKE = 4  # objects that are written by field
LONG = 100  # characters of a packed list that is not written twice
ERRORS = ("stderr",)
ESTIMATED = "estimated value"


def packed(value: Any) -> Any:
    """Data classes, dictionaries and lists as lean JSON; single numbers keep seven digits."""
    result = _by_field(_packed(value, "", "", {}))
    return {"schema": SCHEMA, **result} if isinstance(value, Report) else result


def _packed(value: Any, key: str, path: str, seen: dict[str, str]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = {
            f.name: getattr(value, f.name) for f in fields(value) if not _usual(f, getattr(value, f.name))
        }
    if isinstance(value, Mapping):
        inherited = key if key in ERRORS else ""
        kinds = dict.fromkeys(("value", "density"), ESTIMATED) if value.get("exact") is False else {}
        return {
            name: _packed(v, inherited or kinds.get(name) or name, f"{path}/{name}", seen)
            for name, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        if key == "names" and seen.setdefault(str(value), path) != path:
            return {"same": seen[str(value)].lstrip("/")}
        found = _packed_list(list(value), key)
        if found is None:
            return [_packed(part, key, f"{path}/{i}", seen) for i, part in enumerate(value)]
        code = next(found[kind] for kind in KINDS if kind in found)
        if len(code) > LONG and seen.setdefault(code, path) != path:
            return {"same": seen[code].lstrip("/")}
        return found
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _by_field(value: Any) -> Any:
    """Lists of objects with the same fields as one object of lists: names are written once."""
    if isinstance(value, dict):
        return {key: _by_field(part) for key, part in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= ALIKE and all(isinstance(v, dict) for v in value) and not _refers(value):
        return _objects(value)
    return [_by_field(part) for part in value]


def _objects(values: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for value in values for name in value)
    return {"each": {name: _field(values, name) for name in names}, "count": len(values)}


def _column(values: list[Any]) -> Any:
    """The values of one field."""
    if all(type(v) is type(values[0]) and v == values[0] for v in values):
        return {"all": values[0]}
    if all(isinstance(v, dict) for v in values):
        return _objects(values)
    return _packed_list(values, "") or values


def _field(values: list[dict[str, Any]], name: str) -> Any:
    at = [i for i, value in enumerate(values) if name in value]
    column = _column([values[i][name] for i in at])
    return column if len(at) == len(values) else {"some": column, "at": at}


def _refers(value: Any) -> bool:
    """Whether something in it is packed already: others may refer to its place."""
    if isinstance(value, dict):
        return "shape" in value or "same" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _usual(f: Any, value: Any) -> bool:
    """Whether a field has its default; an empty list or dictionary too."""
    if f.default_factory is not MISSING:
        return bool(value == f.default_factory())
    return (
        f.default is not MISSING
        and (value is f.default or value == f.default)
        and not isinstance(value, float)
    )


def _packed_list(value: list[Any], key: str) -> dict[str, Any] | None:
    """None for a list that stays as it is."""
    shape = _shape(value)
    if shape is None or math.prod(shape) < LEAST:
        return None
    rows = value if len(shape) == 2 else [value]
    result: dict[str, Any] = {"shape": shape}
    if (
        len(shape) == 2
        and shape[0] == shape[1]
        and all(list(c) == r for c, r in zip(zip(*value, strict=True), value, strict=True))
    ):
        rows = [row[i:] for i, row in enumerate(value)]
        result["symmetric"] = True
    flat = array("f", (math.nan if v is None else v for v in chain(*rows)))
    if key in ERRORS:
        return {"b2": base64.b64encode(_cut(flat, 2)).decode(), **result}
    if key == ESTIMATED:
        return {"f3": base64.b64encode(_cut(flat, 3)).decode(), **result}
    return {"f4": base64.b64encode(_little(flat)).decode(), **result}


def _shape(value: list[Any]) -> list[int] | None:
    """Of a list of floats, or of a rectangle of them; None for anything else."""
    if not value:
        return None
    if all(isinstance(row, list) for row in value):
        width = len(value[0])
        if not width or any(len(row) != width or not _floats(row) for row in value):
            return None
        return [len(value), width]
    return [len(value)] if _floats(value) else None


def _floats(row: list[Any]) -> bool:
    known = [v for v in row if v is not None]
    return all(isinstance(v, float) for v in known) and bool(known)


def _little(flat: array[float]) -> bytes:
    if sys.byteorder == "big":
        flat = array("f", flat)
        flat.byteswap()
    return flat.tobytes()


def _cut(flat: array[float], size: int) -> bytes:
    """The upper bytes of float32: to the nearest of three; of two upwards, as an error is better too large."""
    lost = 8 * (4 - size)
    carry = (1 << lost) - 1 if size == 2 else 1 << (lost - 1)
    bits = array("I", flat.tobytes())
    kept = ((b + carry if (b & 0x7FFFFFFF) < 0x7F000000 else b) >> lost for b in bits)
    return b"".join(k.to_bytes(size, "little") for k in kept)


def unpacked(value: Any) -> Any:
    """Plain lists again, with None for NaN."""
    return _unpacked(value, value)


def _unpacked(value: Any, root: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(part, root) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"same"}:
        return _unpacked(_at(root, value["same"]), root)
    if value.keys() == {"each", "count"}:
        return _rows(value, value["count"], root)
    if "shape" not in value or not value.keys() & KINDS.keys():
        return {key: _unpacked(part, root) for key, part in value.items()}
    numbers = iter(_numbers(value))
    shape = value["shape"]
    if len(shape) == 1:
        return list(numbers)
    rows, columns = shape
    if not value.get("symmetric"):
        return [[next(numbers) for _ in range(columns)] for _ in range(rows)]
    matrix: list[list[Any]] = [[None] * rows for _ in range(rows)]
    for i in range(rows):
        for j in range(i, rows):
            matrix[i][j] = matrix[j][i] = next(numbers)
    return matrix


def _rows(column: Any, count: int, root: Any) -> list[Any]:
    """The objects, or values of one field, that `_column` wrote."""
    kind = column.keys() if isinstance(column, dict) else ()
    if kind == {"all"}:
        return [deepcopy(column["all"]) for _ in range(count)]
    if kind != {"each", "count"}:
        return list(_unpacked(column, root))
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, part in column["each"].items():
        some = isinstance(part, dict) and part.keys() == {"some", "at"}
        at = part["at"] if some else range(count)
        for i, value in zip(at, _rows(part["some"] if some else part, len(at), root), strict=True):
            found[i][name] = value
    return found


def _at(root: Any, path: str) -> Any:
    for name in path.split("/"):
        root = root[int(name)] if isinstance(root, list) else root[name]
    return root


def _numbers(value: dict[str, Any]) -> list[float | None]:
    kind = next(kind for kind in KINDS if kind in value)
    packed, size = base64.b64decode(value[kind]), KINDS[kind]
    fill = b"\0" * (4 - size)
    raw = b"".join(fill + packed[i : i + size] for i in range(0, len(packed), size))
    flat = array("f", raw)
    if sys.byteorder == "big":
        flat.byteswap()
    return [None if math.isnan(v) else v for v in flat]
