"""Encoding and decoding of messages: msgpack, with large tensors as frames of their own.

Nothing is ever pickled. Types that neither msgpack nor the extensions support are rejected by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import MsgspecError, msgpack

from hardpoint.typed import prepared

from .errors import MALFORMED, WireError, explain, field_path, short, type_name
from .tensors import (
    ARRAY,
    SLICE,
    TENSOR,
    Buffer,
    array_bytes,
    array_from,
    read_header,
    read_slice,
    slice_payload,
    tensor_bytes,
    tensor_dtype,
    tensor_from,
)

T = TypeVar("T")

INLINE_BELOW = 256
"""Bytes; a smaller tensor travels inside the main frame."""

MOST_BYTES = 4 << 30
"""The largest frame that is sent or received: room for the embeddings of a million tokens of 2,048
numbers of two bytes, while a mistaken or hostile message cannot take all memory."""

_ARRAYS = (np.ndarray, np.memmap)
_NUMBERS = (np.bool_, np.integer, np.float16, np.float32, np.float64)
_UNSENDABLE = (MsgspecError, TypeError, ValueError, ArithmeticError, RecursionError)
_payload = msgpack.Encoder().encode


class Encoder:
    """Encodes messages as frames. One thread at a time.

    Large tensors and arrays are not copied: their frames are views of their memory, which must
    not change until the message is sent. Gradients do not travel.

    Args:
        inline_below: tensors and arrays of fewer bytes are part of the main frame.
        most_bytes: a message with a larger frame is rejected.
    """

    def __init__(
        self,
        *,
        inline_below: int = INLINE_BELOW,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._inline_below = inline_below
        self._most_bytes = most_bytes
        self._encoder = msgpack.Encoder(enc_hook=self._extension)
        self._frames: list[Buffer] = []

    def encode(self, message: Any) -> list[Buffer]:
        """Return the frames of a message, the main one first.

        Raises:
            WireError: something in it cannot travel.
        """
        frames: list[Buffer] = [b""]
        self._frames = frames
        try:
            frames[0] = self._encoder.encode(message)
            self._check_size(frames)
        except _UNSENDABLE as cause:
            raise _unsendable(cause, message) from None
        finally:
            self._frames = []
        return frames

    def encode_into(self, message: Any, buffer: bytearray) -> list[Buffer]:
        """Return the frames of a message; the main one is `buffer`, overwritten and resized.

        Raises:
            WireError: something in it cannot travel.
        """
        frames: list[Buffer] = [buffer]
        self._frames = frames
        try:
            self._encoder.encode_into(message, buffer)
            self._check_size(frames)
        except _UNSENDABLE as cause:
            raise _unsendable(cause, message) from None
        finally:
            self._frames = []
        return frames

    def _extension(self, value: Any) -> Any:
        if _is_tensor(value):
            dtype = tensor_dtype(value)
            return msgpack.Ext(
                TENSOR, _payload((dtype, value.shape, self._placed(tensor_bytes(value))))
            )
        if type(value) in _ARRAYS:
            dtype, data = array_bytes(value)
            return msgpack.Ext(ARRAY, _payload((dtype, value.shape, self._placed(data))))
        if type(value) is slice:
            return msgpack.Ext(SLICE, slice_payload(value))
        if isinstance(value, _NUMBERS):
            return value.item()
        kind = type(value)
        raise WireError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between processes")

    def _check_size(self, frames: Sequence[Buffer]) -> None:
        for frame in frames:
            if len(frame) > self._most_bytes:
                raise ValueError(
                    f"expected frames of at most {self._most_bytes} bytes, got one of {len(frame)}"
                )

    def _placed(self, data: Buffer) -> Buffer | int:
        if len(data) < self._inline_below:
            return data
        self._frames.append(data)
        return len(self._frames) - 1


class Decoder(Generic[T]):
    """Decodes frames into messages of one type. One thread at a time.

    Any input results in a message or a WireError. Small tensors are copies. Large ones
    share the memory of their frame and keep it alive; treat them as read-only and clone them
    before writing (arrays enforce it, torch cannot).

    Args:
        type_: type of the messages; by default any plain data.
        share_frames: False copies large tensors too.
    """

    def __init__(
        self,
        type_: type[T] | Any = Any,
        *,
        share_frames: bool = True,
    ) -> None:
        self._type = type_
        self._copy = not share_frames
        self._decoder = msgpack.Decoder(
            prepared(type_), ext_hook=self._extension, dec_hook=self.convert
        )
        self._frames: Sequence[Buffer] = ()
        self._extensions = 0  # of this message, so far

    def decode(self, frames: Buffer | Sequence[Buffer]) -> T:
        """Return the message of a frame or of a list of frames, the main one first.

        Raises:
            WireError: it is malformed or not of the type.
        """
        main: Any = frames
        if isinstance(frames, (list, tuple)):  # a union would be made by each call
            if not frames:
                raise WireError(f"{type_name(self._type)}: expected at least one frame, got none")
            self._frames = frames
            main = frames[0]
        self._extensions = 0
        try:
            message: T = self._decoder.decode(main)
        except WireError as cause:
            path = self._extension_path(main)
            raise WireError(short(f"{path}: {cause}")) from cause.__cause__
        except MALFORMED as cause:
            raise WireError(explain(cause, self._type)) from None
        finally:
            self._frames = ()
        return message

    def convert(self, _type: Any, value: Any) -> Any:
        """Convert a value to a type that msgspec does not have."""
        return value

    def _extension(self, code: int, payload: memoryview) -> Any:
        self._extensions += 1
        if code == SLICE:
            return read_slice(payload)
        if code not in (TENSOR, ARRAY):
            raise WireError(f"expected extension {TENSOR}, {ARRAY} or {SLICE}, got {code}")
        header = read_header(payload)
        data = header.data
        make = tensor_from if code == TENSOR else array_from
        if isinstance(data, bytearray):
            return make(header, data, copy=True)
        if not 0 < data < len(self._frames):
            extra = max(len(self._frames) - 1, 0)
            raise WireError(
                f"data: expected the number of one of the {extra} extra frames, got {data}"
            )
        return make(header, self._frames[data], copy=self._copy)

    def _extension_path(self, main: Buffer) -> str:
        rejected, seen = object(), 0

        def mark(_code: int, _payload: memoryview) -> Any:
            nonlocal seen
            seen += 1
            return rejected if seen == self._extensions else seen

        try:
            plain = msgpack.Decoder(ext_hook=mark).decode(main)
            steps = _steps_to(plain, rejected) or []
        except MALFORMED:  # a later part is malformed as well, or nested too deeply
            steps = []
        return field_path(self._type, steps)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a parameter, no other subclass; imports nothing."""
    kind = type(value)
    if kind.__name__ not in ("Tensor", "Parameter"):
        return False
    torch = sys.modules.get("torch")
    return torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter)


def _steps_to(value: Any, wanted: object) -> list[str] | None:
    """Return the steps to an object in plain data, None if it is not part of it."""
    if value is wanted:
        return []
    items: Any = ()
    if isinstance(value, dict):
        items = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"[{place}]", item) for place, item in enumerate(value))
    for step, item in items:
        if (steps := _steps_to(item, wanted)) is not None:
            return [step, *steps]
    return None


def _unsendable(cause: Exception, message: Any) -> WireError:
    why = "nested too deeply" if isinstance(cause, RecursionError) else str(cause)
    return WireError(f"{type(message).__name__}: {why}")
