"""Reading the header of GGUF files: nothing is read or allocated that the file has no bytes for."""

from __future__ import annotations

import errno
import math
import mmap
import struct
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from hardpoint.plugins import ModelError
from hardpoint.toolkit.hf_config import short

from .files import fingerprint, refusing_damage, regular_file

FieldParts = tuple[int, list[Any], list[int], list[Any]]
"""Size in bytes, raw parts, indices of the data parts, types: GGUFReader's form of a field."""

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_VERSION = struct.Struct("<4xI")
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 4  # as in ggml
_OPEN: weakref.WeakValueDictionary[Path, GGUFFile] = weakref.WeakValueDictionary()


class GGUFFile(gguf.GGUFReader):  # type: ignore[misc]
    """GGUFReader that reads arrays quickly and never past the end of the file."""

    # The library makes a numpy object of every element of an array, which takes seconds for a
    # vocabulary; here an array is one part, and its strings are decoded when they are asked for.
    #
    # `fingerprint` belongs to the file before it was opened.

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ValueError, KeyError: it is damaged.
        """
        self._name = path.name
        self.fingerprint = fingerprint([path])
        with path.open("rb") as file:
            start = file.read(_VERSION.size)
        if len(start) == _VERSION.size and not _VERSION.unpack(start)[0] & 0xFFFF:
            raise ValueError(
                "it is big-endian; expected a little-endian file (gguf-convert-endian makes one)"
            )
        super().__init__(path)

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._mapping = mapped.base
        self._data = np.asarray(mapped)  # slices of the memory map itself are slow and large

    def give_back(self, part: np.ndarray[Any, Any]) -> None:
        """Give the system the memory of a part; it is read again on the next use.

        A part of another file is left alone.
        """
        start = part.ctypes.data - self._data.ctypes.data
        is_inside = 0 <= start <= self._data.nbytes - part.nbytes
        if is_inside and isinstance(self._mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_DONTNEED, page, start + part.nbytes - page)

    def value(self, key: str) -> Any:
        """Return a metadata field as plain Python data; None if it is missing.

        Raises:
            ModelError: a string in it is not UTF-8.
        """
        field = self.get_field(key)
        if field is None:
            return None
        with refusing_damage(f"{self._name}: {key}"):
            if field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
                return _strings(field.parts[-1].tobytes())
            return field.contents()

    def scalar(self, key: str, kind: type[T]) -> T | None:
        """Return a metadata field that is one value, a str, int or bool; None if it is missing.

        Raises:
            ModelError: it is something else.
        """
        field, array = self.get_field(key), gguf.GGUFValueType.ARRAY
        if field is not None and field.types[0] == array:
            raise self._wrong(key, kind.__name__, f"an array of {int(field.parts[-2][0])}")
        value = self.value(key)
        if value is None or type(value) is kind:
            return value
        raise self._wrong(key, kind.__name__, short(value))

    def strings(self, key: str) -> list[str]:
        """Return a metadata field that is an array of strings; an empty list if it is missing.

        Raises:
            ModelError: it is something else.
        """
        field, string = self.get_field(key), gguf.GGUFValueType.STRING
        if field is None:
            return []
        if field.types != [gguf.GGUFValueType.ARRAY, string]:
            raise self._wrong(key, "an array of strings", f"type {field.types[-1].name}")
        strings: list[str] = self.value(key)
        return strings

    def numbers(self, key: str) -> list[float]:
        """Return a metadata field that is an array of numbers; an empty list if it is missing.

        Raises:
            ModelError: it is something else.
        """
        field = self.get_field(key)
        if field is None:
            return []
        if len(field.types) < 2 or field.types[1] == gguf.GGUFValueType.STRING:
            raise self._wrong(key, "an array of numbers", f"type {field.types[-1].name}")
        numbers: list[float] = self.value(key)
        return numbers

    def _wrong(self, key: str, expected: str, actual: str) -> ModelError:
        return ModelError(f"{self._name}: {key}: expected {expected}, got {actual}")

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray[Any, Any]:
        self._check_end(int(offset) + np.dtype(dtype).itemsize * int(count))
        array: np.ndarray[Any, Any] = super()._get(int(offset), dtype, int(count), override_order)
        return array

    def _check_end(self, end: int) -> None:
        if end > self.data.size:
            raise ValueError(
                f"truncated: the header refers to byte {end}, the file has {self.data.size}"
            )

    def _build_fields(self, offs: int, count: int) -> int:
        _check_count("metadata fields", int(count), _MAX_FIELDS)
        end: int = super()._build_fields(offs, count)
        return end

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> FieldParts:
        array = gguf.GGUFValueType.ARRAY
        if raw_type != array:
            parts: FieldParts = super()._get_field_parts(orig_offs, raw_type)
            return parts
        item_type = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + 12
        kind = gguf.GGUFValueType(int(item_type[0]))
        if kind == gguf.GGUFValueType.STRING:
            values = self._get(start, np.uint8, self._end_of_strings(start, int(count[0])) - start)
        elif kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))
        else:
            raise ValueError("expected arrays of numbers or strings, got an array of arrays")
        size = start + int(values.nbytes) - orig_offs
        return size, [item_type, count, values], [2], [array, kind]

    def _end_of_strings(self, offset: int, count: int) -> int:
        self._check_end(offset + _LENGTH.size * count)
        # A vocabulary has 100,000 and more: a call per string would take a tenth of a second.
        data, size, read = self.data.data, _LENGTH.size, _LENGTH.unpack_from
        last = self.data.size - size
        for _ in range(count):
            if offset > last:
                break
            offset += size + read(data, offset)[0]
        else:
            size = 0
        self._check_end(offset + size)
        return offset

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
        _check_count("tensors", int(count), _MAX_TENSORS)
        result: tuple[int, list[Any]] = super()._build_tensor_info(offs, count)
        return result

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        total = 0
        for field in fields:
            dims, raw_type, offset = field.parts[3:6]
            size = _tensor_bytes(field.name, dims.tolist(), int(raw_type[0]))
            self._check_end(int(start_offs) + int(offset[0]) + size)
            total += size
        if total > self.data.size:
            raise ValueError(
                f"its tensors have {total} bytes and overlap: the file has {self.data.size}"
            )
        super()._build_tensors(int(start_offs), fields)


class _UnknownTypeError(ValueError):
    """A tensor has a type that the library does not know, in a file that may be sound."""

    def __init__(self, tensor: str, kind: int) -> None:
        super().__init__(
            f"{tensor}: gguf-py {version('gguf')} does not know the type {kind} of ggml, in which "
            f"the tensor is stored; expected a type that it knows, or a newer version of it"
        )


def _check_count(noun: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"expected at most {limit} {noun}, got {count}")


def _tensor_bytes(name: str, dims: list[int], raw_type: int) -> int:
    if not 1 <= len(dims) <= _MAX_DIMENSIONS or not all(dims):
        raise ValueError(
            f"tensor {name}: expected 1 to {_MAX_DIMENSIONS} dimensions of at least 1, "
            f"got {short(dims)}"
        )
    if raw_type not in {kind.value for kind in gguf.GGML_QUANT_SIZES}:
        raise _UnknownTypeError(name, raw_type)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw_type)]
    if dims[0] % block:
        raise ValueError(f"tensor {name}: expected rows of a multiple of {block}, got {dims[0]}")
    return math.prod(dims) // int(block) * int(size)


def _strings(data: bytes) -> list[str]:
    strings, offset = [], 0
    while offset < len(data):
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(data, offset)[0]
        strings.append(data[start:offset].decode())
    return strings


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header; tensor data is read from disk on use.

    A file that is open, by the model's loader for example, is not read again unless it changed.

    Raises:
        ModelError: the file cannot be read, is no GGUF file or is truncated.
    """
    regular_file(path, path.name)
    try:
        opened = _OPEN.get(path)
        if opened is None or opened.fingerprint != fingerprint([path]):
            opened = _OPEN[path] = GGUFFile(path)
        return opened
    except OSError as cause:
        if cause.errno == errno.ENOMEM:  # the file is mapped
            raise MemoryError(f"{path.name}: {cause.strerror}") from cause
        raise ModelError(f"{path.name} cannot be read: {cause.strerror}") from cause
    except _UnknownTypeError as cause:
        raise ModelError(f"{path.name}: {cause}") from None
    except (ValueError, KeyError, IndexError, OverflowError) as cause:
        raise ModelError(f"{path.name} is not a readable GGUF file: {str(cause)[:400]}") from cause
