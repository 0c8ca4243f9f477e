"""Images of prompts, decoded."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["Image"]


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A decoded image.

    Attributes:
        width: pixels of a row, 1 or more.
        height: rows, 1 or more.
        pixels: RGB of 8 bits each, row by row: 3 * width * height bytes.
    """

    width: int
    height: int
    pixels: bytes

    @property
    def content_hash(self) -> str:
        """SHA-256 of size and pixels, in hexadecimal."""
        digest = hashlib.sha256(f"RGB {self.width} {self.height}\n".encode())
        digest.update(self.pixels)
        return digest.hexdigest()
