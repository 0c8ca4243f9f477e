"""Detect reads of device values by the host, on a machine without a device.

Meta tensors have shape and type but no values. Code that never needs a value on the host runs on
them as on any device; other code fails at the operation that needs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

_READING_OPERATIONS = {
    "aten._local_scalar_dense": ".item(), float(), int(), bool() or `if`",
    "aten._to_copy": '.cpu(), .to("cpu") or .tolist()',
    "aten.copy_": "copy_ to the host",
    "aten.nonzero": "nonzero() or where() with one argument",
    "aten.index": "indexing by a mask of booleans",
    "aten.masked_select": "masked_select() or indexing by a mask of booleans",
    "aten._unique2": "unique()",
    "aten.unique_dim": "unique()",
    "aten.unique_consecutive": "unique_consecutive()",
    "aten.equal": "torch.equal()",
    "aten.repeat_interleave": "repeat_interleave() with a tensor of counts",
    "aten.bincount": "bincount()",
}
_NEEDS_VALUES = ("meta tensor", "Meta tensor", "can't convert meta", "raises unimplemented")
_MIXES_DEVICES = "expected device meta"


class HostSyncError(Exception):
    """The host read a device value; the message names the operation."""


class UndecidableError(Exception):
    """Code failed for another reason: an operation does not run on meta tensors."""


class no_values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - like a function
    """Context in which meta tensors stand for a device's, and reading their values raises.

    Raises:
        HostSyncError: code read values, or mixed devices.
        UndecidableError: any other error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._last = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._last = func.overloadpacket._qualified_op_name.replace("::", ".")
        return func(*args, **(kwargs or {}))

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
        if exc is None:
            return
        message = str(exc).partition("\n")[0]
        if any(part in str(exc) for part in _NEEDS_VALUES):
            operation = _READING_OPERATIONS.get(self._last, f"{self._last or 'numpy()'}: {message}")
            raise HostSyncError(f"it reads values by {operation}") from exc
        if _MIXES_DEVICES in str(exc):
            raise HostSyncError(
                f"{self._last} mixes a tensor on the host with the device's"
            ) from exc
        raise UndecidableError(f"{self._last}: {type(exc).__name__}: {message}") from exc
