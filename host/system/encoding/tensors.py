"""Tensors, arrays and slices as msgpack extensions.

The payload of a tensor or array is itself msgpack: `[dtype, shape, data]`, where data is the bytes,
or the number of the frame that holds them. Frame 0 is the message itself. The payload of a slice is
`[start, stop, step]`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, msgpack

from .errors import MALFORMED, WireError, explain

if TYPE_CHECKING:
    import torch

Buffer = bytes | bytearray | memoryview
"""The bytes of a frame."""

TENSOR, ARRAY, SLICE = 1, 2, 3
"""The msgpack extension codes."""

_MAX_DIMENSIONS = 64
_MAX_BYTES = 2**63 - 1

_TENSOR_DTYPES = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
}
_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.str: dtype
    for code in "?bBhHiIqQefdFD"
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}


class TensorHeader(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False
):
    """The header of a tensor or array, in the main frame.

    Attributes:
        dtype: torch's name without `torch.`, or numpy's `dtype.str`.
        data: the bytes, or the number of their frame.
    """

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=_MAX_DIMENSIONS)]
    data: bytearray | int


_Slice = tuple[int | None, int | None, int | None]
_read_header = msgpack.Decoder(TensorHeader).decode
_read_slice = msgpack.Decoder(_Slice).decode
_write = msgpack.Encoder().encode


def read_header(payload: Buffer) -> TensorHeader:
    """Return the header of a payload.

    Raises:
        WireError: it is malformed.
    """
    try:
        return _read_header(payload)
    except MALFORMED as cause:
        raise WireError(explain(cause, TensorHeader, "tensor")) from None


def read_slice(payload: Buffer) -> slice:
    """Return the slice of a payload.

    Raises:
        WireError: it is malformed.
    """
    try:
        return slice(*_read_slice(payload))
    except MALFORMED as cause:
        raise WireError(explain(cause, _Slice, "slice")) from None


def slice_payload(value: slice) -> bytes:
    """Return the payload of a slice.

    Raises:
        WireError: its members are not integers.
    """
    parts = (value.start, value.stop, value.step)
    if not all(part is None or type(part) is int for part in parts):
        raise WireError(f"a slice travels only with whole numbers, got {value!r}")
    return _write(parts)


@functools.cache
def _torch() -> Any:
    """Return torch, which takes a second to import."""
    import torch  # noqa: PLC0415

    return torch


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: getattr(_torch(), name) for name in _TENSOR_DTYPES}


@functools.cache
def _tensor_names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _dtypes().items()}


def tensor_dtype(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype.

    Raises:
        WireError: its dtype or kind cannot travel.
    """
    name = _tensor_names().get(tensor.dtype)
    if name is None or tensor.layout is not _torch().strided or tensor.is_meta:
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise WireError(f"a tensor of this kind cannot travel: {kind}")
    return name


def tensor_bytes(tensor: torch.Tensor) -> Buffer:
    """Return the bytes of a tensor: its own memory if that is contiguous and on the CPU."""
    byte = _torch().uint8
    try:
        return tensor.view(byte).numpy().ravel().data  # a copy if it is not contiguous
    except (RuntimeError, TypeError):  # asking first costs more than all of this
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A dimension of size 1 may have any stride, with which there is no view of other elements.
    return tensor.as_strided((tensor.numel(),), (1,)).view(byte).numpy().data


def array_bytes(array: np.ndarray[Any, Any]) -> tuple[str, Buffer]:
    """Return the name of an array's dtype and its bytes: its own memory if that is contiguous.

    Raises:
        WireError: its dtype cannot travel.
    """
    if array.dtype.str not in _ARRAY_DTYPES:
        raise WireError(f"an array of this dtype cannot travel: {array.dtype}")
    if not array.size:
        return array.dtype.str, b""
    flat = np.ascontiguousarray(array).reshape(-1)
    return array.dtype.str, flat.view(np.uint8).data


def tensor_from(header: TensorHeader, data: Buffer, *, copy: bool) -> torch.Tensor:
    """Return a tensor made of the bytes of a frame.

    Args:
        copy: the tensor gets memory of its own; else it shares that of `data`, which is then
            not to be written. Misaligned data is copied in any case.

    Raises:
        WireError: the header does not fit the bytes.
    """
    library, dtype = _torch(), _dtypes().get(header.dtype)
    if dtype is None:
        raise WireError(f"dtype: expected the name of a torch dtype, got {header.dtype[:40]!r}")
    view = memoryview(data)
    _check_size(header, dtype.itemsize, view.nbytes)
    tensor: torch.Tensor
    if not view.nbytes:
        tensor = library.empty(header.shape, dtype=dtype)
        return tensor
    memory = bytearray(data) if copy else _writable(view)
    tensor = library.frombuffer(memory, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = library.frombuffer(bytearray(data), dtype=dtype)
    if dtype is library.bool:
        _check_bools(int(tensor.view(library.uint8).max()))
    return tensor.view(*header.shape) if header.shape else tensor.view([])


def array_from(header: TensorHeader, data: Buffer, *, copy: bool) -> np.ndarray[Any, Any]:
    """Return an array made of the bytes of a frame.

    Args:
        copy: the array gets memory of its own; else it shares the memory of `data`, read-only.

    Raises:
        WireError: the header does not fit the bytes.
    """
    dtype = _ARRAY_DTYPES.get(header.dtype)
    if dtype is None:
        raise WireError(f"dtype: expected the name of a numpy dtype, got {header.dtype[:40]!r}")
    _check_size(header, dtype.itemsize, memoryview(data).nbytes)
    if 0 in header.shape:
        return np.empty(header.shape, dtype=dtype)
    flat = np.frombuffer(bytearray(data) if copy else data, dtype=dtype)
    if dtype.kind == "b":
        _check_bools(int(flat.view(np.uint8).max()))
    flat.flags.writeable = copy
    return flat.reshape(header.shape)


def _check_size(header: TensorHeader, itemsize: int, got: int) -> None:
    """Reject a shape that does not fit the bytes, or is larger than any memory."""
    expected = math.prod(header.shape) * itemsize
    if got == expected and got:  # so many bytes are in memory
        return
    if math.prod(filter(None, header.shape)) * itemsize > _MAX_BYTES:
        raise WireError(f"shape: expected a shape that memory can hold, got {header.shape}")
    if got != expected:
        raise WireError(
            f"data: expected {expected} bytes for shape {header.shape} of {header.dtype}, got {got}"
        )


def _check_bools(largest: int) -> None:
    if largest > 1:
        raise WireError(f"data: expected bytes 0 and 1 for bool, got {largest}")


class _Memory:
    """Presents read-only memory as writable to numpy."""

    # torch has no read-only tensors, and warns once per process when it gets such memory.

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self._owner = memory  # keeps the frame alive as long as the array
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": memory.shape,
            "data": (address, False),
        }


def _writable(data: memoryview) -> Any:
    """Return a frame's memory so that torch accepts it without a warning."""
    if not data.readonly:
        return data
    return np.asarray(_Memory(np.frombuffer(data, dtype=np.uint8)))
