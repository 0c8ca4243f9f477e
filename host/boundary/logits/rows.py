"""The rows of a step as a logits processor receives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins import LogitsRequest
from hardpoint.plugins.text.arguments import argument_column

from .device_state import DeviceState


class ProcessorRows:
    """The rows of the requests that use one processor; valid until these rows change."""

    def __init__(
        self,
        name: str,
        requests: Sequence[LogitsRequest],
        version: int,
        device: torch.device,
        device_state: DeviceState,
    ) -> None:
        """`name` is the processor's; `version` is new for every change of the rows."""
        self._requests = tuple(requests)
        self._version = version
        self._name = name
        self._device = device
        self._device_state = device_state
        self._arguments = tuple(request.arguments[name] for request in requests)
        self._states = [request.state for request in requests]
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def requests(self) -> Sequence[LogitsRequest]:
        """One per row."""
        return self._requests

    @property
    def version(self) -> int:
        """Changes with the rows or their order."""
        return self._version

    def __len__(self) -> int:
        return len(self._requests)

    def arguments(self) -> Sequence[Any]:
        """Return each row's arguments for this processor."""
        return self._arguments

    def states(self) -> Sequence[Any]:
        """Return each row's state for this processor."""
        name = self._name
        return [state.get(name) for state in self._states]

    def tensor(self, name: str) -> torch.Tensor:
        """Return the argument `name` of every row as [rows, 1] on the device."""
        if name not in self._tensors:
            self._tensors[name] = argument_column(self._arguments, name, self._device)
        return self._tensors[name]

    def state_tensor(self, name: str) -> torch.Tensor:
        """Return the device state `name` of every row as [rows, *shape]."""
        return self._device_state.gather(name, self._requests)
