"""Formats and sizes of encoded images, from their first bytes; nothing is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FORMATS", "Header", "read_header"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are decoded; which one an image has, its content decides, never a name or a type."""


@dataclass(frozen=True)
class Header:
    """Format and size of an encoded image.

    Attributes:
        format: one of `FORMATS`.
        width, height: pixels, before an orientation is applied.
    """

    format: str
    width: int
    height: int


def read_header(data: bytes) -> Header | None:
    """Return the header of an encoded image; None if it has none of the formats.

    Raises:
        ValueError: it has one, but no size; the message is the rest of a sentence about it.
    """
    format_name = next((name for name, begins in _BEGINS.items() if begins(data)), None)
    if format_name is None:
        return None
    try:
        width, height = _SIZES[format_name](data)
    except (struct.error, IndexError):
        raise ValueError(f"this {format_name} image ends before its size") from None
    if width < 1 or height < 1:
        raise ValueError(f"this {format_name} image has the size {width} x {height}")
    return Header(format_name, width, height)


_PNG = b"\x89PNG\r\n\x1a\n"

_BEGINS: dict[str, Callable[[bytes], bool]] = {
    "PNG": lambda data: data.startswith(_PNG),
    "JPEG": lambda data: data.startswith(b"\xff\xd8\xff"),
    "WEBP": lambda data: data[:4] == b"RIFF" and data[8:12] == b"WEBP",
    "GIF": lambda data: data.startswith((b"GIF87a", b"GIF89a")),
}


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("this PNG image does not begin with its size")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        fields = data[24:30]
        if len(fields) < 6:
            raise IndexError
        width = int.from_bytes(fields[:3], "little") + 1
        height = int.from_bytes(fields[3:], "little") + 1
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        width, height = width & 0x3FFF, height & 0x3FFF
    else:
        raise ValueError("this WEBP image does not begin with its size")
    return width, height


_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG image that are followed by its size."""

_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""


def _jpeg_size(data: bytes) -> tuple[int, int]:
    place = 2
    while True:
        if data[place] != 0xFF:
            raise ValueError("this JPEG image has no marker where one should be")
        while data[place] == 0xFF:
            place += 1
        marker = data[place]
        place += 1
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
        if marker in (0xD9, 0xDA):
            raise ValueError("this JPEG image does not begin with its size")
        if marker not in _ALONE:
            (length,) = struct.unpack_from(">H", data, place)
            place += max(length, 2)


_SIZES: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "PNG": _png_size,
    "JPEG": _jpeg_size,
    "WEBP": _webp_size,
    "GIF": _gif_size,
}
