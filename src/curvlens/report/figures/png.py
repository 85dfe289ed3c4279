"""Pictures as PNG (ISO 15948), by zlib alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from curvlens.report.figures.colour import bytes_of


def gray_png(pixels: Sequence[Sequence[int]]) -> bytes:
    """Rows of bytes, 0 black to 255 white."""
    return _png(len(pixels[0]), pixels, 0, b"")


def indexed_png(pixels: Sequence[Sequence[int]], colours: Sequence[str]) -> bytes:
    """Rows of indices into at most 256 colours `#rrggbb`."""
    if not 1 <= len(colours) <= 256:
        raise ValueError(f"expected 1 to 256 colours, got {len(colours)}")
    palette = bytes(part for colour in colours for part in bytes_of(colour))
    return _png(len(pixels[0]), pixels, 3, palette)


def _png(width: int, pixels: Sequence[Sequence[int]], kind: int, palette: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, len(pixels), 8, kind, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(row) for row in pixels)  # filter 0: the values themselves
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
        if body or name == b"IEND"
    )
