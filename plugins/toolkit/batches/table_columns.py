"""Columns of block tables that leave them when blocks are released."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["remove_columns"]


def remove_columns(
    tables: np.ndarray[Any, np.dtype[np.int32]], length: int, columns: Iterable[tuple[int, int]]
) -> int:
    """Remove ranges of columns, one after the other, and fill the end with zeros.

    Args:
        tables: block tables of a request, [groups, columns]; changed in place.
        length: columns in use.
        columns: first and last + 1 column of each range, once earlier ones are removed.

    Returns:
        The number of columns that were removed.
    """
    held = length
    for first, end in columns:
        rest = held - (end - first)
        tables[:, first:rest] = tables[:, end:held].copy()
        tables[:, rest:held] = 0
        held = rest
    return length - held
