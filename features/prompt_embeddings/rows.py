"""The rows that a caller gives, as float32 of its own, and which positions of a prompt have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hardpoint.errors import RequestError, shown
from hardpoint.plugins import EngineCoreRequest

Rows = np.ndarray[Any, np.dtype[np.float32]]
Positions = np.ndarray[Any, np.dtype[np.int64]]

_DTYPES = ("float32", "float16", "bfloat16")
_EXPECTED = f"a tensor or array [positions, hidden] of {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"


def rows_of(value: Any, path: str, width: int | None, max_bytes: int) -> Rows:
    """Return rows as a float32 array of its own, which cannot be written to.

    Args:
        value: a tensor or array; one that this function has returned is returned as it is.
        path: names it in messages.
        width: hidden size of the model; None if it is not known here.
        max_bytes: bytes of the rows as float32, at most.

    Raises:
        RequestError: it is something else, too large, or has numbers that are not finite.
    """
    if _is_own(value):
        check_shape(value, path, width, max_bytes)
        return value  # type: ignore[no-any-return]
    is_tensor = type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "layout")
    if not is_tensor and not isinstance(value, np.ndarray):
        raise RequestError(f"{path}: expected {_EXPECTED}, got {shown(value)}")
    dtype = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype.name
    if dtype not in _DTYPES:
        raise RequestError(f"{path}: expected {_EXPECTED}, got dtype {dtype}")
    check_shape(value, path, width, max_bytes)
    if is_tensor:
        value = _as_array(value, path)
    rows = np.array(value, dtype=np.float32, order="C", subok=False)
    is_finite = np.isfinite(rows).all(axis=1)
    if not is_finite.all():
        row = int(is_finite.argmin())
        bad = rows[row][~np.isfinite(rows[row])][0]
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


def _is_own(value: Any) -> bool:
    return (
        type(value) is np.ndarray
        and value.dtype == np.float32
        and value.base is None
        and not value.flags.writeable
        and value.flags.c_contiguous
    )


def _as_array(tensor: Any, path: str) -> Any:
    """Return a tensor as a float32 array, which may share its memory."""
    import torch  # noqa: PLC0415 - most programs give no tensors

    if tensor.layout is not torch.strided or tensor.is_meta:
        form = f"{tensor.layout} on {tensor.device}"
        raise RequestError(f"{path}: expected {_EXPECTED}, got {form}")
    return tensor.detach().to("cpu", torch.float32).resolve_neg().numpy()


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
            found = shown(mask)
            raise RequestError(f"prompt_is_token_ids: expected a list of booleans, got {found}")
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
