"""Operations on a stand-in for an asynchronous device, for tests of overlapped steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.plugins import Ops, Wrapper
from hardpoint.plugins.process.device import HostCopy

from .device_stream import DeviceStream


class StreamOps(Wrapper[Ops], Ops):
    """Operations with results that are readable on the host after a stream has finished its work.

    The scripted model calls `launch_forward` in each step; another model has to do the same.

    Attributes:
        stream: the device.
        step_seconds: time of a step on the device.
        num_overlaps: forward passes that were launched before the tokens before them were read.
    """

    contract = 1
    devices = ("cpu",)

    class Options(Wrapper.Options):
        """Options of the stand-in.

        Attributes:
            step_seconds: time of a step on the device.
        """

        wraps: str = "torch"
        step_seconds: float = 0.002

    def __init__(self, context: Any) -> None:
        """Start with an idle device."""
        super().__init__(context)
        self.stream = DeviceStream()
        self.step_seconds: float = context.options.step_seconds
        self._unread: set[StreamCopy] = set()
        self.num_overlaps = 0

    def launch_forward(self) -> None:
        """Occupy the device for the time of a step."""
        self.num_overlaps += bool(self._unread)
        self.stream.launch(_nothing, self.step_seconds)

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Begin a copy, which is complete when the work launched so far is done."""
        copy = StreamCopy(tensors, self.stream, self._unread)
        self._unread.add(copy)
        return copy


class StreamCopy(HostCopy):
    """A copy of tensors of a stand-in: unreadable before its event."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], stream: DeviceStream, unread: set[StreamCopy]
    ) -> None:
        """Begin the copy.

        Args:
            unread: copies before their `read`, which removes them.
        """
        self._copies = [stream.copy_to_host(tensor) for tensor in tensors]
        self._unread = unread

    def is_complete(self) -> bool:
        """Return whether `read` would not wait."""
        return self._copies[-1].event.query()

    def read(self) -> list[Any]:
        """Wait for the event; return the tensors as lists of numbers."""
        self._unread.discard(self)
        for copy in self._copies:
            copy.event.synchronize()
        return [copy.read().tolist() for copy in self._copies]


def _nothing() -> None:
    pass
