"""A stand-in for a device with a stream of work, as a CUDA stream, on the host's processor."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class DeviceStream:
    """Runs work in the order of its launches; each piece takes a stated time of the device.

    No thread computes: a piece runs on the host when its event is found complete. So work reads
    its inputs late, and a buffer that the host writes again too early gives wrong results.

    Attributes:
        idle_at: time of the clock at which all work launched so far is done.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start with an idle device.

        Args:
            clock: returns seconds.
            sleep: waits so many seconds by that clock.
        """
        self._clock, self._sleep = clock, sleep
        self._queue: deque[Callable[[], Any]] = deque()
        self._num_launched = self._num_run = 0
        self.idle_at = clock()
        self._error: Exception | None = None

    def launch(self, work: Callable[[], Any], seconds: float = 0.0) -> None:
        """Append work, which takes so many seconds of the device; returns at once.

        Raises:
            ValueError: the time is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds: expected at least 0, got {seconds}")
        self.idle_at = max(self.idle_at, self._clock()) + seconds
        self._queue.append(work)
        self._num_launched += 1

    def record_event(self) -> DeviceEvent:
        """Return an event that is complete when all work launched so far is done."""
        return DeviceEvent(self, self.idle_at, self._num_launched)

    def copy_to_host(self, source: torch.Tensor, seconds: float = 0.0) -> DeviceCopy:
        """Copy a tensor when the work launched so far is done; returns at once."""
        target = torch.empty_like(source)
        self.launch(functools.partial(_copy, source, target), seconds)
        return DeviceCopy(target, self.record_event())

    def synchronize(self) -> None:
        """Wait for all work launched so far.

        Raises:
            Exception: the first error of any work; each later wait raises it again.
        """
        self.record_event().synchronize()

    def wait_until(self, moment: float) -> None:
        """Wait until a time of the clock."""
        while (left := moment - self._clock()) > 0:
            self._sleep(left)

    def has_come(self, moment: float) -> bool:
        """Return whether a time of the clock has come."""
        return self._clock() >= moment

    def run_first(self, count: int) -> None:
        """Run the first pieces of work since the start that have not run.

        Raises:
            Exception: as `synchronize`.
        """
        while self._error is None and self._num_run < count:
            self._num_run += 1
            try:
                self._queue.popleft()()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    # As the engine's step: its tensors can be written in inference mode only.
    if torch.is_inference_mode_enabled():
        target.copy_(source)
        return
    with torch.inference_mode():
        target.copy_(source)


class DeviceEvent:
    """A point in the work of a stream.

    Attributes:
        is_observed: whether the host has waited for the event, or found it complete.
    """

    def __init__(self, stream: DeviceStream, moment: float, num_launched: int) -> None:
        """Create it; see `DeviceStream.record_event`.

        Args:
            moment: time of the stream's clock at which the event is complete.
            num_launched: number of pieces of work before it.
        """
        self._stream, self._moment, self._num_launched = stream, moment, num_launched
        self.is_observed = False

    def query(self) -> bool:
        """Return whether the event is complete, without waiting."""
        if self._stream.has_come(self._moment):
            self.synchronize()
        return self.is_observed

    def synchronize(self) -> None:
        """Wait for the event."""
        self._stream.wait_until(self._moment)
        self._stream.run_first(self._num_launched)
        self.is_observed = True


class DeviceCopy:
    """A tensor on the host that a device writes.

    Attributes:
        event: is complete when the copy is.
    """

    def __init__(self, tensor: torch.Tensor, event: DeviceEvent) -> None:
        """Create it; see `DeviceStream.copy_to_host`."""
        self._tensor, self.event = tensor, event

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            RuntimeError: the host has not observed the event, however much time has passed.
        """
        if not self.event.is_observed:
            raise RuntimeError(
                "copy to the host: expected event.synchronize(), or event.query() that returned "
                "True, before read()"
            )
        return self._tensor
