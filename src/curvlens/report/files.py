"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

DATA = re.compile(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', re.S)


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file by replacing it at once: a full disk or Ctrl-C leaves the old one, or none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def writable(folder: Path) -> None:
    """Make the folder, and raise an OSError that says so where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f".{os.getpid()}.curvlens", b"\n" * 4096)
    except FileExistsError as error:
        raise NotADirectoryError(f"expected a folder to write to, got a file {str(folder)!r}") from error
    except OSError as error:
        raise OSError(
            f"expected a folder to write to, got {str(folder)!r}: {error.strerror or error}"
        ) from error
    (folder / f".{os.getpid()}.curvlens").unlink(missing_ok=True)


def fallback() -> Path:
    """A new folder where there may be room when elsewhere there is none."""
    return Path(tempfile.mkdtemp(prefix="curvlens-"))


def read(source: str | Path) -> str:
    """The JSON of a report: from the path of its file or of its page, or from their text."""
    text = source if isinstance(source, str) and source.lstrip()[:1] in ("{", "<") else _contents(source)
    if text.lstrip().startswith("<"):
        found = DATA.search(text)
        if found is None:
            raise ValueError(
                f"expected a page that holds a report, got one without its data: {str(source)[:80]}"
            )
        return found[1]
    return text


def _contents(source: str | Path) -> str:
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"expected the JSON or the page of a report, got no file {str(path)!r}")
    return path.read_text(encoding="utf-8")
