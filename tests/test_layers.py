"""Modules depend on one another in one direction, from top to bottom of this list."""

import ast
from pathlib import Path

import curvlens

ROOT = Path(curvlens.__file__).parent
# a room may use those above it
ORDER = [
    "progress",
    "kernels",
    "blocks",
    "operator",
    "structured",
    "losses",
    "batches",
    "nets",
    "digits",
    "grammar",
    "families",
    "guards",
    "landscape",
    "engine",
    "curvature",
    "interop",
    "estimate",
    "exact",
    "scaling",
    "studies",
    "sources",
    "report",
    "training",
    "cli",
]


def room(module):
    return module.split(".")[1] if "." in module else ""


def imports(path):
    """Rooms of the package that a file imports at any place, except for type checking alone."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (room(alias.name) for alias in node.names if alias.name.startswith("curvlens."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "curvlens":
            if node.module == "curvlens":
                yield from (alias.name for alias in node.names)
            else:
                yield room(node.module)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"


def test_every_room_has_its_place():
    rooms = {
        p.stem if p.suffix == ".py" else p.name
        for p in ROOT.iterdir()
        if p.name not in ("__init__.py", "py.typed")
    }
    assert rooms - {"__pycache__"} == set(ORDER)


def test_modules_depend_in_one_direction():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for used in imports(path):
            assert used in ORDER, f"{path.relative_to(ROOT)} imports curvlens.{used}"
            message = f"{path.relative_to(ROOT)} imports {used}, which stands below it"
            assert ORDER.index(used) <= ORDER.index(parts[0]), message
