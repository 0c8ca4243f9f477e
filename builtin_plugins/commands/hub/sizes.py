"""Sizes as text."""

from __future__ import annotations

__all__ = ["size_text"]


def size_text(count: int) -> str:
    """Return a number of bytes in KiB, MiB or GiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.{int(unit == 2**30)}f} {name}"
    return f"{count / 2**10:.0f} KiB"
