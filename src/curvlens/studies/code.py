"""A hash of all of the package's code that a module can reach: what a cached result belongs to."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import curvlens

ROOT = Path(curvlens.__file__).parent
APART = ("curvlens.studies.run", "curvlens.studies.plot", "curvlens.progress")  # change no number


@lru_cache(None)
def code_hash(module: str) -> str:
    """Twelve hexadecimal digits; other ones after any change of the module or of what it imports."""
    found = hashlib.sha256()
    for name in sorted(reached(module)):
        found.update(name.encode() + b"\0" + _file(name).read_bytes())  # type: ignore[union-attr]
    return found.hexdigest()[:12]


def reached(module: str) -> set[str]:
    """The module and every module of the package that it imports, at any place and through others."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if path is None or name in found or name in APART:
            continue
        found.add(name)
        waiting += _imports(path)
    return found


@lru_cache(None)
def _imports(path: Path) -> list[str]:
    return list(_named(ast.parse(path.read_text())))


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    """The file of a module of the package, except for the package itself, which holds no code but names."""
    first, _, rest = module.partition(".")
    if first != "curvlens" or not rest:
        return None
    path = ROOT.joinpath(*rest.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None
