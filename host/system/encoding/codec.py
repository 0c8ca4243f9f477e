"""Encoding and decoding of messages: msgpack, with large tensors as frames of their own.

Nothing is ever pickled. Types that neither msgpack nor the extensions support are rejected by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from msgspec import MsgspecError, msgpack

from hardpoint.typed import prepared

from .errors import MALFORMED, WireError, explain, field_path, short, type_name
from .tensors import (
    ARRAY,
    SLICE,
    TENSOR,
    Buffer,
    TensorConsumer,
    TensorHeader,
    TensorProvider,
    array_bytes,
    array_from,
    read_header,
    read_slice,
    slice_payload,
    tensor_bytes,
    tensor_dtype,
    tensor_from,
)

if TYPE_CHECKING:
    import torch

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
    """

    def __init__(
        self,
        *,
        inline_below: int = INLINE_BELOW,
        most_bytes: int = MOST_BYTES,
        consumer: TensorConsumer | None = None,
    ) -> None:
        """Create an encoder.

        Args:
            inline_below: tensors and arrays of fewer bytes are part of the main frame.
            most_bytes: a message with a larger frame is rejected.
        """
        self._inline_below = inline_below
        self._most_bytes = most_bytes
        self._consumer = consumer
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
            if self._consumer is not None:
                self._begin(self._consumer)
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
            if self._consumer is not None:
                self._begin(self._consumer)
            self._encoder.encode_into(message, buffer)
            self._check_size(frames)
        except _UNSENDABLE as cause:
            raise _unsendable(cause, message) from None
        finally:
            self._frames = []
        return frames

    def _extension(self, value: Any) -> Any:
        if _is_tensor(value):
            return msgpack.Ext(TENSOR, self._tensor(value))
        if type(value) in _ARRAYS:
            dtype, data = array_bytes(value)
            return msgpack.Ext(ARRAY, _payload((dtype, value.shape, self._placed(data))))
        if type(value) is slice:
            return msgpack.Ext(SLICE, slice_payload(value))
        if isinstance(value, _NUMBERS):
            return value.item()
        kind = type(value)
        raise WireError(f"a {kind.__module__}.{kind.__qualname__} cannot travel between processes")

    def _tensor(self, tensor: torch.Tensor) -> bytes:
        dtype, is_cpu = tensor_dtype(tensor), tensor.is_cpu
        data: Any = None
        if self._consumer is not None and not (is_cpu and tensor.nbytes < self._inline_below):
            data = self._offered(self._consumer, tensor)
        if data is None:
            data = self._placed(tensor_bytes(tensor), inline=is_cpu)
        return _payload((dtype, tensor.shape, data))

    def _begin(self, consumer: TensorConsumer) -> None:
        try:
            consumer.new_message()
        except Exception as cause:
            raise _consumer_failed(cause) from cause

    def _offered(self, consumer: TensorConsumer, tensor: torch.Tensor) -> dict[str, Any] | None:
        try:
            return consumer.offer(tensor)
        except Exception as cause:
            raise _consumer_failed(cause) from cause

    def _check_size(self, frames: Sequence[Buffer]) -> None:
        for frame in frames:
            if len(frame) > self._most_bytes:
                raise ValueError(
                    f"expected frames of at most {self._most_bytes} bytes, got one of {len(frame)}"
                )

    def _placed(self, data: Buffer, *, inline: bool = True) -> Buffer | int:
        if inline and len(data) < self._inline_below:
            return data
        self._frames.append(data)
        return len(self._frames) - 1


class Decoder(Generic[T]):
    """Decodes frames into messages of one type. One thread at a time.

    Any input results in a message or a WireError. Small tensors are copies. Large ones
    share the memory of their frame and keep it alive; treat them as read-only and clone them
    before writing (arrays enforce it, torch cannot).
    """

    def __init__(
        self,
        type_: type[T] | Any = Any,
        *,
        provider: TensorProvider | None = None,
        share_frames: bool = True,
    ) -> None:
        """Create a decoder.

        Args:
            type_: type of the messages; by default any plain data.
            share_frames: False copies large tensors too.
        """
        self._type = type_
        self._provider = provider
        self._copy = not share_frames
        self._decoder = msgpack.Decoder(
            prepared(type_), ext_hook=self._extension, dec_hook=_as_declared
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

    def _extension(self, code: int, payload: memoryview) -> Any:
        self._extensions += 1
        if code == SLICE:
            return read_slice(payload)
        if code not in (TENSOR, ARRAY):
            raise WireError(f"expected extension {TENSOR}, {ARRAY} or {SLICE}, got {code}")
        header = read_header(payload)
        data = header.data
        if isinstance(data, dict):
            return self._out_of_band(code, header, data)
        make = tensor_from if code == TENSOR else array_from
        if isinstance(data, bytearray):
            return make(header, data, copy=True)
        if not 0 < data < len(self._frames):
            extra = max(len(self._frames) - 1, 0)
            raise WireError(
                f"data: expected the number of one of the {extra} extra frames, got {data}"
            )
        return make(header, self._frames[data], copy=self._copy)

    def _out_of_band(
        self, code: int, header: TensorHeader, metadata: dict[str, Any]
    ) -> torch.Tensor:
        if code != TENSOR:
            raise WireError("data: expected bytes or the number of a frame, got a table")
        if self._provider is None:
            raise WireError("the tensor travels out of band, but this side has no provider for it")
        import torch  # noqa: PLC0415 - takes a second, and most clients send no tensors

        dtype = getattr(torch, header.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WireError(f"dtype: expected the name of a torch dtype, got {header.dtype[:40]!r}")
        try:
            tensor = self._provider.fetch(dtype, header.shape, metadata)
        except Exception as cause:
            raise WireError(f"the provider of out-of-band tensors failed: {cause}") from cause
        if tensor.dtype != dtype or list(tensor.shape) != header.shape:
            raise WireError(
                f"expected {header.dtype} of shape {header.shape} from the provider of "
                f"out-of-band tensors, got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        return tensor

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


def _as_declared(_type: Any, value: Any) -> Any:
    return value


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


def _consumer_failed(cause: Exception) -> WireError:
    return WireError(f"the consumer of out-of-band tensors failed: {type(cause).__name__}: {cause}")


def _unsendable(cause: Exception, message: Any) -> WireError:
    why = "nested too deeply" if isinstance(cause, RecursionError) else str(cause)
    return WireError(f"{type(message).__name__}: {why}")
