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

_FIELD = "prompt_embeds"

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


def decoded(content: str | RawTensor, path: str) -> Any:
    """Return embeddings as an array, or of bfloat16 as a tensor.

    Args:
        path: names them in messages.

    Raises:
        RequestError: they are a pickle, which is never read, or something else.
    """
    data = _bytes(content if isinstance(content, str) else content.data, path)
    if isinstance(content, RawTensor):
        return _array(data, content.dtype, content.shape, path)
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        problem = f"{len(data)} bytes: {error}"
        if data.startswith(_PICKLES):
            problem = "what torch.save or pickle writes, which is never read"
        raise RequestError(
            f"{path}: expected base64 of safetensors, or an object of data, dtype and shape, got "
            f"{problem}"
        ) from None
    if list(tensors) != [_FIELD]:
        names = ", ".join(sorted(tensors)) or "none"
        raise RequestError(f'{path}: expected one tensor, "{_FIELD}", got {names}')
    tensor = tensors[_FIELD]
    if (dtype := _DTYPES.get(tensor["dtype"])) is None:
        expected = ", ".join(_DTYPES)
        raise RequestError(f"{path}: expected a dtype of {expected}, got {tensor['dtype']}")
    return _array(tensor["data"], dtype, tensor["shape"], path)


def _bytes(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"{path}: expected base64, got {len(text)} characters: {error}"
        ) from None


def _array(data: bytes, dtype: str, shape: list[int], path: str) -> Any:
    if len(data) != (size := _SIZES[dtype] * math.prod(shape)):
        raise RequestError(
            f"{path}: expected {size} bytes, {dtype} of shape {list(shape)}, got {len(data)}"
        )
    if dtype == "bfloat16":  # which numpy has not
        import torch  # noqa: PLC0415 - most requests give none

        bits = np.frombuffer(data, "<i2").astype(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16).reshape(shape)
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2").reshape(shape)
