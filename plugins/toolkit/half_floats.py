"""Arrays of float16, and of bfloat16, which numpy has no dtype for: uint16 with its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FLOATS", "float32_of"]

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))
"""Dtypes of arrays that have floats; uint16 has the bits of bfloat16."""


def float32_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return an array of one of `FLOATS` as float32, which holds all of its values."""
    if array.dtype == np.uint16:  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)
