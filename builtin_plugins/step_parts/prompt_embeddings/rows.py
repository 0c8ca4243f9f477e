"""The rows that a caller gives, as an array of their own, and which positions have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import EngineCoreRequest
from hardpoint.toolkit.half_floats import FLOATS, float32_of

Rows = np.ndarray[Any, Any]
"""Of one of the dtypes of `FLOATS`."""

Positions = np.ndarray[Any, np.dtype[np.int64]]

_DTYPES = ("float32", "float16", "bfloat16")
_EXPECTED = f"a tensor or array [positions, hidden] of {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"


def rows_of(value: Any, path: str, width: int | None, max_bytes: int) -> Rows:
    """Return rows as an array of its own in their dtype, which cannot be written to.

    Args:
        value: a tensor or array.
        path: names it in messages.
        width: hidden size of the model; None if it is not known here.
        max_bytes: bytes of the rows as float32, at most.

    Raises:
        RequestError: it is something else, too large, or has numbers that are not finite.
    """
    is_tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "layout")
    if not is_tensor and not isinstance(value, np.ndarray):
        raise RequestError(f"{path}: expected {_EXPECTED}, got {shown(value)}")
    dtype = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype.name
    if dtype not in _DTYPES:
        raise RequestError(f"{path}: expected {_EXPECTED}, got dtype {dtype}")
    check_shape(value, path, width, max_bytes)
    if is_tensor:
        value = _as_array(value, path)
    elif dtype == "bfloat16":  # of a package that adds it to numpy
        value = np.ascontiguousarray(value).view(np.uint16)
    numpy_dtype = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    return _checked(np.array(value, dtype=numpy_dtype, order="C", subok=False), path)


def rows_of_request(value: Any, path: str, width: int | None, max_bytes: int) -> Rows:
    """Return the rows of a request, which may be an array that `rows_of` has returned.

    Args:
        value: see `EngineCoreRequest.prompt_embeds`, or as for `rows_of`.
        path, width, max_bytes: as for `rows_of`.

    Raises:
        RequestError: as `rows_of`.
    """
    is_array = type(value) is np.ndarray
    if not is_array or value.dtype not in FLOATS:
        return rows_of(value, path, width, max_bytes)
    check_shape(value, path, width, max_bytes)
    is_own = value.base is None and not value.flags.writeable and value.flags.c_contiguous
    rows: Rows = value if is_own else _checked(np.array(value, order="C"), path)
    return rows


def _checked(rows: Rows, path: str) -> Rows:
    """Return rows that can no longer be written to.

    Raises:
        RequestError: one has a number that is not finite.
    """
    if rows.dtype == np.uint16:  # without another array of twice the size
        is_finite = (rows & 0x7F80 != 0x7F80).all(axis=1)
    else:
        is_finite = np.isfinite(rows).all(axis=1)
    if not is_finite.all():
        row = int(is_finite.argmin())
        numbers = float32_of(rows[row])
        bad = numbers[~np.isfinite(numbers)][0]
        raise RequestError(f"{path}[{row}]: expected finite numbers, got {bad}")
    rows.flags.writeable = False
    return rows


def check_shape(value: Any, path: str, width: int | None, max_bytes: int) -> None:
    """Check the shape of rows.

    Raises:
        RequestError: there are none, too many, or they have another width.
    """
    shape = list(value.shape)
    if len(shape) != 2:
        raise RequestError(f"{path}: expected two dimensions, [positions, hidden], got {shape}")
    if width is not None and shape[1] != width:
        raise RequestError(
            f"{path}: expected rows of {width} numbers, the hidden size of the model, got {shape}"
        )
    if not shape[0]:
        raise RequestError(f"{path}: expected at least one row, got {shape}")
    if (size := 4 * shape[0] * shape[1]) > max_bytes:
        raise RequestError(
            f"{path}: expected at most {max_bytes} bytes of float32 "
            f"(plugin.prompt_embeddings.max_bytes), got {shape}, which are {size}"
        )


def _as_array(tensor: Any, path: str) -> Any:
    """Return a tensor as an array of its numbers, or bits, which may share its memory."""
    import torch  # noqa: PLC0415 - most programs give no tensors

    if tensor.layout is not torch.strided or tensor.is_meta:
        form = f"{tensor.layout} on {tensor.device}"
        raise RequestError(f"{path}: expected {_EXPECTED}, got {form}")
    host_tensor = tensor.detach().cpu().resolve_neg()
    if host_tensor.dtype == torch.bfloat16:
        host_tensor = host_tensor.contiguous().view(torch.int16)
        return host_tensor.numpy().view(np.uint16)
    return host_tensor.numpy()


def positions_of(request: EngineCoreRequest) -> Positions:
    """Return the positions of a prompt that have a row, in their order."""
    mask = request.prompt_is_token_ids
    if mask is None:
        return np.arange(len(request.prompt_token_ids))
    return np.flatnonzero(~np.asarray(mask, dtype=np.bool_))


def check_mask(ids: Sequence[Any], mask: Any, num_rows: int) -> None:
    """Check which positions of a prompt have a row.

    Args:
        ids: ids of the prompt, with 0 or None at these positions.
        mask: as `EngineCoreRequest.prompt_is_token_ids`.
        num_rows: number of rows.

    Raises:
        RequestError: they are not as many as there are rows.
    """
    if mask is not None:
        if not isinstance(mask, list) or any(type(item) is not bool for item in mask):
            actual = shown(mask)
            raise RequestError(f"prompt_is_token_ids: expected a list of booleans, got {actual}")
        if len(mask) != len(ids):
            raise RequestError(
                f"prompt_is_token_ids: expected one for each of {len(ids)} prompt_token_ids, got "
                f"{len(mask)}"
            )
    missing = len(ids) if mask is None else mask.count(False)
    if missing != num_rows:
        raise RequestError(
            f"prompt_embeds: expected a row for each of {missing} positions without a token id, "
            f"got {num_rows}"
        )
    for index, token in enumerate(ids):
        if (mask is None or not mask[index]) and (token is not None and token != 0):
            raise RequestError(
                f"prompt_token_ids[{index}]: expected 0 where an embedding stands, got "
                f"{shown(token)}"
            )
