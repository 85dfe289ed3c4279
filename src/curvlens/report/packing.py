"""A report as a page holds it: lean JSON, long lists of numbers packed, so that a page stays small.

    {"f4": base64, "shape": [n, m]}      values as little-endian float32, seven digits
    {"f3": base64, "shape": [n, m]}      values that have errors: float32 without its lowest byte, four digits
    {"b2": base64, "shape": [n, m]}      errors as bfloat16, the upper half of a float32: two digits, rounded up
    {"symmetric": true, …}               the upper triangle alone, row by row
    {"same": "spectra/curves/0/…"}       the packed list at another place

NaN is NaN there, and fields that have their usual value are left out. `Report.to_json` writes plain lists with all
digits; a page is drawn from the numbers that it keeps.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from typing import Any

from curvlens.report.data import SCHEMA, Report

KINDS = {"f4": 4, "f3": 3, "b2": 2}  # bytes of a number
LEAST = 24  # numbers that are packed
LONG = 100  # characters of a packed list that is not written twice
ERRORS = ("stderr",)
ESTIMATED = "estimated value"


def packed(value: Any) -> Any:
    """Data classes, dictionaries and lists as lean JSON; single numbers keep seven digits."""
    result = _packed(value, "", "", {})
    return {"schema": SCHEMA, **result} if isinstance(value, Report) else result


def _packed(value: Any, key: str, path: str, seen: dict[str, str]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = {
            f.name: getattr(value, f.name) for f in fields(value) if not _usual(f, getattr(value, f.name))
        }
    if isinstance(value, Mapping):
        inherited = key if key in ERRORS else ""
        kinds = {"value": ESTIMATED} if value.get("exact") is False else {}
        return {
            name: _packed(v, inherited or kinds.get(name) or name, f"{path}/{name}", seen)
            for name, v in value.items()
        }
    if isinstance(value, (list, tuple)):
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
        value = _at(root, value["same"])
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
