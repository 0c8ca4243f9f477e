"""A cache for a value that a processor computes from its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hardpoint.plugins import Rows

T = TypeVar("T")


class RowCache(Generic[T]):
    """Caches one value until `rows.version` or an extra key changes."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: T

    def get(self, rows: Rows, build: Callable[[], T], extra: object = None) -> T:
        """Return the value for these rows, calling `build` only if they or `extra` changed."""
        key = (rows.version, extra)
        if key != self._key:
            self._value = build()
            self._key = key
        return self._value
