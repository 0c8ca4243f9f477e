"""Telling whether code asks the device for values, on a machine that need not have one.

Meta tensors know shape and type and have no values. Code that never needs a value on the host
runs on them as on any device; code that does fails at that very operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

_ASKING = {
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
    """A value of the device was asked for; the message names the operation."""


class Unknown(Exception):  # noqa: N818 - it is an answer
    """It cannot be told: an operation does not run on tensors without values."""


class no_values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - like a function
    """Inside, meta tensors stand for a device's; asking for their values raises.

    Raises:
        HostSyncError: code asked for values, or mixed devices.
        Unknown: something else failed.
    """

    def __init__(self) -> None:
        """Start with no operation seen."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._last = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Remember the operation, and run it."""
        self._last = func.overloadpacket._qualified_op_name.replace("::", ".")
        return func(*args, **(kwargs or {}))

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        """Say what an error means."""
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
        if exc is None:
            return
        message = str(exc).partition("\n")[0]
        if any(words in str(exc) for words in _NEEDS_VALUES):
            how = _ASKING.get(self._last, f"{self._last or 'numpy()'}: {message}")
            raise HostSyncError(f"it asked for values by {how}") from exc
        if _MIXES_DEVICES in str(exc):
            raise HostSyncError(
                f"{self._last} mixes a tensor on the host with the device's"
            ) from exc
        raise Unknown(f"{self._last}: {type(exc).__name__}: {message}") from exc
