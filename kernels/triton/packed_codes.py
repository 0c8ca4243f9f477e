"""How matrices of few bits lie in the memory of a GPU: one tensor of bytes, with a header.

A matrix has parts, its rows one part after the other, each with codes, scales and offsets of a form
of its own. Scales and offsets are stored as they are. A row of codes is made of lines of 16 words
of 16 bits. Word j of a line has, from the lowest bits on, the lower four bits of the codes of
columns j, j + 16, j + 32 and j + 48 of 64; codes of 8 bits are whole, those of columns j and j + 16
of 32. The upper bits of codes of 5 and 6 bits are in a plane of their own. Of 6 bits, it has 8
words for a line: the lower byte of word j belongs to word j of the line, the upper one to word
j + 8. Of 5 bits, it has 8 words for two lines, the lower bytes for the first one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.kernels.cpu import Codes

__all__ = ["Form", "Part", "header_of", "pack", "read", "size_of"]

_MAGIC = int.from_bytes(b"gpucode1", "little")
_FIXED = 6  # words: magic, bytes, rows, columns, parts, checksum of the header
_PER_PART = 6  # words: rows, bits, group, scales, offsets, whether there are values
_MOST_PARTS = 1 << 10
_MOST = 2**31 - 1  # rows, and columns of a group: kernels have numbers of 32 bits
_ALIGNED = 128  # bytes: a line of a GPU's cache
_LINE = 16  # words
_OUTER = 256  # columns that share an outer scale
_AT_ONCE = 1 << 24  # codes that are packed at a time, each of which takes several bytes meanwhile

_DTYPES = {1: torch.float16, 2: torch.float32, 3: torch.int8, 4: torch.uint8}
_STORED = {dtype: number for number, dtype in _DTYPES.items()}  # 0: there are none
_NESTED = (3, 4)  # those with outer ones


@dataclass(frozen=True)
class Form:
    """How a part is stored.

    Attributes:
        rows, bits, group: as in `Codes`.
        scales, offsets: their dtype, 1 float16, 2 float32, 3 int8, 4 uint8; offsets 0: none.
        has_values: whether codes stand for numbers of a table.
    """

    rows: int
    bits: int
    group: int
    scales: int
    offsets: int
    has_values: bool

    @property
    def is_valid(self) -> bool:
        """Whether there are such matrices."""
        return (
            0 < self.rows <= _MOST
            and self.bits in (4, 5, 6, 8)
            and (self.group == 16 or (32 <= self.group <= _MOST and self.group % 32 == 0))
            and self.scales in _DTYPES
            and (self.offsets == 0 or self.offsets in _DTYPES)
            and not (self.has_values and self.bits == 8)
        )


@dataclass(frozen=True)
class Part:
    """The tensors of a part, which are views of a packed matrix.

    Attributes:
        form: how they are stored.
        codes: int16 [rows, words].
        highs: int16 [rows, words], the fifth and sixth bits.
        scales, offsets, outer_scales, outer_offsets, values: as in `Codes`.
    """

    form: Form
    codes: torch.Tensor
    scales: torch.Tensor
    highs: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None
    outer_offsets: torch.Tensor | None = None
    values: torch.Tensor | None = None


def pack(parts: Sequence[Codes], device: torch.device) -> torch.Tensor:
    """Return a matrix of parts, which have the same number of columns, as `read` takes it.

    Neighbours of the same form become one part.

    Raises:
        ValueError: there are no columns.
    """
    columns = parts[0].codes.shape[1]
    if not columns:
        raise ValueError(f"expected codes of at least 1 column, got {list(parts[0].codes.shape)}")
    runs = _runs([part for part in parts if len(part.codes)])
    forms = [_form_of(run) for run in runs]
    size = size_of(forms, columns)
    packed = torch.zeros(size, dtype=torch.uint8, device=device)
    header = header_of(forms, columns, size)
    packed[: header.nbytes] = torch.from_numpy(header.view(np.uint8)).to(device)
    for run, part in zip(runs, _views(packed, forms, columns), strict=True):
        first = 0
        for piece in run:
            _write(piece, part, slice(first, first + len(piece.codes)))
            first += len(piece.codes)
    return packed


def read(packed: torch.Tensor, shape: tuple[int, int]) -> list[Part]:
    """Return the parts of a packed matrix, after its header was checked.

    Reading the header makes the host wait for the device.

    Raises:
        ValueError: it is that of another shape, or contradicts itself or the size.
    """
    forms = _forms(packed, shape)
    if forms is None:
        raise ValueError(
            f"expected packed codes of a matrix {list(shape)}, got {packed.dtype} "
            f"{list(packed.shape)} with the header of something else"
        )
    if packed.data_ptr() % _ALIGNED:
        packed = packed.clone()
    return _views(packed, forms, shape[1])


def _forms(packed: torch.Tensor, shape: tuple[int, int]) -> list[Form] | None:
    """Return the forms of the header; None if it is wrong."""
    if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
        return None
    fixed = _words(packed, _FIXED)
    if len(fixed) < _FIXED or fixed[0] != _MAGIC or not 0 <= fixed[4] <= _MOST_PARTS:
        return None
    words = _words(packed, _FIXED + _PER_PART * fixed[4])
    forms = [
        _form(words[at : at + _PER_PART])
        for at in range(_FIXED, len(words) + 1 - _PER_PART, _PER_PART)
    ]
    rows, columns = shape
    is_right = (
        len(forms) == fixed[4]
        and all(form.is_valid for form in forms)
        and columns > 0
        and sum(form.rows for form in forms) == rows
        and size_of(forms, columns) == len(packed)
        and words == header_of(forms, columns, len(packed)).tolist()
    )
    return forms if is_right else None


def _words(packed: torch.Tensor, count: int) -> list[int]:
    """Return the first words, or as many as there are."""
    # Of a copy: memory that numpy has seen can no longer be moved by its storage.
    content = packed[: count * 8].clone().cpu().numpy().tobytes()
    words: list[int] = np.frombuffer(content[: len(content) // 8 * 8], "<i8").tolist()
    return words


def _form(words: Sequence[int]) -> Form:
    rows, bits, group, scales, offsets, has_values = words
    return Form(rows, bits, group, scales, offsets, has_values=bool(has_values))


def header_of(
    forms: Sequence[Form], columns: int, size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the words with which a packed matrix of so many bytes begins."""
    rows = sum(form.rows for form in forms)
    words = [_MAGIC, size, rows, columns, len(forms), 0]
    for form in forms:
        words += [form.rows, form.bits, form.group, form.scales, form.offsets, form.has_values]
    header = np.array(words, "<i8")
    header[_FIXED - 1] = zlib.crc32(header.tobytes())
    return header


def _runs(parts: Sequence[Codes]) -> list[list[Codes]]:
    """Return neighbours that can be one part together."""
    runs: list[list[Codes]] = []
    for part in parts:
        if runs and _are_alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _are_alike(first: Codes, other: Codes) -> bool:
    if first.values is None or other.values is None:
        same_values = first.values is other.values
    else:
        same_values = torch.equal(first.values, other.values)
    return same_values and _stored(first) == _stored(other)


def _stored(part: Codes) -> tuple[int, int, int, int]:
    offsets = 0 if part.offsets is None else _STORED[part.offsets.dtype]
    return part.bits, part.group, _STORED[part.scales.dtype], offsets


def _form_of(run: Sequence[Codes]) -> Form:
    rows = sum(len(part.codes) for part in run)
    return Form(rows, *_stored(run[0]), has_values=run[0].values is not None)


_Plane = tuple[str, torch.dtype, tuple[int, ...]]


def _planes(form: Form, columns: int) -> list[_Plane]:
    """Return names, dtypes and shapes of the tensors of a part."""
    rows, bits = form.rows, form.bits
    lines = -(-columns // _columns_of_line(bits))
    groups, outers = -(-columns // form.group), -(-columns // _OUTER)
    planes: list[_Plane] = [("codes", torch.int16, (rows, lines * _LINE))]
    if bits in (5, 6):
        halves = lines if bits == 6 else -(-lines // 2)
        planes.append(("highs", torch.int16, (rows, halves * _LINE // 2)))
    for name, stored in (("scales", form.scales), ("offsets", form.offsets)):
        if stored:
            planes.append((name, _DTYPES[stored], (rows, groups)))
        if stored in _NESTED:
            planes.append((f"outer_{name}", torch.float16, (rows, outers)))
    if form.has_values:
        planes.append(("values", torch.float32, (1 << bits,)))
    return planes


def _columns_of_line(bits: int) -> int:
    return 32 if bits == 8 else 64


def _after(start: int, plane: _Plane) -> int:
    """Return where the next plane starts."""
    _, dtype, shape = plane
    return _aligned(start + math.prod(shape) * dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def size_of(forms: Sequence[Form], columns: int) -> int:
    """Return the bytes of a packed matrix."""
    at = _aligned((_FIXED + _PER_PART * len(forms)) * 8)
    for form in forms:
        for plane in _planes(form, columns):
            at = _after(at, plane)
    return at


def _views(packed: torch.Tensor, forms: Sequence[Form], columns: int) -> list[Part]:
    at = _aligned((_FIXED + _PER_PART * len(forms)) * 8)
    parts = []
    for form in forms:
        tensors = {}
        for plane in _planes(form, columns):
            name, dtype, shape = plane
            content = packed[at : at + math.prod(shape) * dtype.itemsize]
            tensors[name] = content.view(dtype).view(shape)
            at = _after(at, plane)
        parts.append(Part(form, **tensors))
    return parts


def _write(piece: Codes, part: Part, rows: slice) -> None:
    """Write some rows of a part, a few at a time."""
    for name in ("scales", "offsets", "outer_scales", "outer_offsets"):
        target: torch.Tensor | None = getattr(part, name)
        if target is not None:
            target[rows].copy_(getattr(piece, name))
    if part.values is not None:
        assert piece.values is not None
        part.values.copy_(piece.values)
    count, columns = piece.codes.shape
    step = max(_AT_ONCE // columns, 1)
    for start in range(0, count, step):
        codes = piece.codes[start : start + step].to(part.codes.device)
        first = rows.start + start
        _write_codes(codes, part, slice(first, first + len(codes)))


def _write_codes(codes: torch.Tensor, part: Part, rows: slice) -> None:
    bits, (count, columns) = part.form.bits, codes.shape
    per_line = _columns_of_line(bits)
    lines = -(-columns // per_line)
    padded = codes.new_zeros(count, lines * per_line)
    padded[:, :columns] = codes
    pieces = padded.view(count, lines, -1, _LINE).unbind(2)
    if bits == 8:
        part.codes[rows] = _words_of(*pieces)
        return
    low = [piece & 15 for piece in pieces]
    part.codes[rows] = _words_of(low[0] | (low[1] << 4), low[2] | (low[3] << 4))
    if part.highs is None:
        return
    more = bits - 4
    mask = (1 << more) - 1
    high = (pieces[0] >> 4) & mask
    for index in range(1, 4):
        high |= ((pieces[index] >> 4) & mask) << (more * index)
    first, second = high[..., :8], high[..., 8:]
    if bits == 5:
        both = first | (second << 4)
        if lines % 2:
            both = torch.cat([both, torch.zeros_like(both[:, :1])], 1)
        first, second = both[:, ::2], both[:, 1::2]
    part.highs[rows] = _words_of(first, second)


def _words_of(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return words of lower and upper bytes, [rows, words]."""
    return torch.stack([low, high], -1).flatten(1).view(torch.int16)
