"""Operations whose results reach the host late, for any model."""

from __future__ import annotations

import time

from hardpoint.kernels import cpu
from hardpoint.testing.timing.device_stream import DeviceStream
from hardpoint.testing.timing.stream_ops import StreamOps


def default_ops() -> str:
    """Return the operations that "auto" selects on a CPU."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError:
        return "torch"
    return "native_cpu"


class KnownOps(StreamOps):
    """A step of the device ends when the next one is launched, or after `step_seconds`."""

    contract = 1
    opened: list[KnownOps] = []

    class Options(StreamOps.Options):
        step_seconds: float = 0.2

    def __init__(self, context):
        super().__init__(context)
        self._skipped = 0.0
        self.stream = DeviceStream(self._clock)
        self.opened.append(self)

    def _clock(self):
        return time.perf_counter() + self._skipped

    def launch_forward(self):
        self._skipped += max(self.stream.idle_at - self._clock(), 0.0)
        super().launch_forward()


class LateOps(KnownOps):
    """Launches the time of a step where the embeddings of its tokens are looked up.

    The scripted model alone does so itself.
    """

    contract = 1

    class Options(KnownOps.Options):
        wraps: str = default_ops()
        step_seconds: float = 0.01

    def gather_rows(self, table, ids):
        self.launch_forward()
        return super().gather_rows(table, ids)
