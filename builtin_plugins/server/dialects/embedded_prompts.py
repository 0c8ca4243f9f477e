"""Embeddings of a prompt in a request's body, as base64 of safetensors or of raw numbers."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from safetensors import SafetensorError, deserialize

from hardpoint.plugins import RequestError
from hardpoint.typed import Strict

FIELD = "prompt_embeds"

_PICKLES = (b"PK\x03\x04", b"\x80")
"""How files of torch.save and other pickles begin."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


class RawTensor(Strict):
    """Numbers of a tensor, row by row.

    Attributes:
        data: base64 of the numbers, little-endian.
        shape: positions and hidden size.
    """

    data: str
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=2, max_length=2)]


def decoded(given: str | RawTensor) -> np.ndarray[Any, Any]:
    """Return embeddings as a float32 or float16 array.

    Raises:
        RequestError: they are a pickle, which is never read, or something else.
    """
    data = _bytes(given if isinstance(given, str) else given.data)
    if isinstance(given, RawTensor):
        return _array(data, given.dtype, given.shape)
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        what = f"{len(data)} bytes: {error}"
        if data.startswith(_PICKLES):
            what = "what torch.save or pickle writes, which is never read"
        raise RequestError(
            f"{FIELD}: expected base64 of safetensors, or an object of data, dtype and shape, got "
            f"{what}"
        ) from None
    if list(tensors) != [FIELD]:
        names = ", ".join(sorted(tensors)) or "none"
        raise RequestError(f'{FIELD}: expected one tensor, "{FIELD}", got {names}')
    tensor = tensors[FIELD]
    if (dtype := _DTYPES.get(tensor["dtype"])) is None:
        expected = ", ".join(_DTYPES)
        raise RequestError(f"{FIELD}: expected a dtype of {expected}, got {tensor['dtype']}")
    return _array(tensor["data"], dtype, tensor["shape"])


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"{FIELD}: expected base64, got {len(text)} characters: {error}"
        ) from None


def _array(data: bytes, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    if len(data) != (size := _SIZES[dtype] * math.prod(shape)):
        raise RequestError(
            f"{FIELD}: expected {size} bytes, {dtype} of shape {list(shape)}, got {len(data)}"
        )
    if dtype == "bfloat16":  # the upper half of a float32
        halves = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(shape)
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").reshape(shape)
