"""Reading the header of GGUF files, with bounds checks."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hardpoint.plugins import ModelError

FieldParts = tuple[int, list[Any], list[int], list[Any]]
"""Size in bytes, raw parts, indices of the data parts, types: GGUFReader's form of a field."""

_LENGTH = struct.Struct("<Q")


class GGUFFile(gguf.GGUFReader):  # type: ignore[misc]
    """GGUFReader that reads arrays quickly and never past the end of the file."""

    # The library makes a numpy object of every element of an array, which takes seconds for a
    # vocabulary; here an array of numbers is one part, and strings are slices of the file.

    def value(self, key: str) -> Any:
        """Return a metadata field as plain Python data; None if it is missing."""
        field = self.get_field(key)
        return None if field is None else field.contents()

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray[Any, Any]:
        end = offset + np.dtype(dtype).itemsize * int(count)
        self._check_end(end)
        array: np.ndarray[Any, Any] = super()._get(offset, dtype, count, override_order)
        return array

    def _check_end(self, end: int) -> None:
        if end > self.data.size:
            raise ValueError(
                f"truncated: the header refers to byte {end}, the file has {self.data.size}"
            )

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> FieldParts:
        array = gguf.GGUFValueType.ARRAY
        if raw_type != array or self.byte_order != "I":
            return self._library_parts(orig_offs, raw_type)
        item_type = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        kind = gguf.GGUFValueType(int(item_type[0]))
        if kind == gguf.GGUFValueType.STRING:
            strings, end = self._strings(start, int(count[0]))
            indices = list(range(2, 2 + len(strings)))
            return end - orig_offs, [item_type, count, *strings], indices, [array, kind]
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))
            size = start + int(values.nbytes) - orig_offs
            return size, [item_type, count, values], [2], [array, kind]
        return self._library_parts(orig_offs, raw_type)

    def _library_parts(self, offset: int, raw_type: int) -> FieldParts:
        parts: FieldParts = super()._get_field_parts(offset, raw_type)
        return parts

    def _strings(self, offset: int, count: int) -> tuple[list[memoryview], int]:
        data = memoryview(self.data)
        strings = []
        for _ in range(count):
            self._check_end(offset + 8)
            start = offset + 8
            offset = start + _LENGTH.unpack_from(data, offset)[0]
            self._check_end(offset)
            strings.append(data[start:offset])
        return strings, offset


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header; tensor data is read from disk on use.

    Raises:
        ModelError: the file cannot be read, is no GGUF file or is truncated.
    """
    try:
        return GGUFFile(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as cause:
        raise ModelError(f"{path.name} is not a readable GGUF file: {cause}") from cause
