"""Operations whose results reach the host late, for any model."""

from __future__ import annotations

from hardpoint.kernels import cpu
from hardpoint.testing.timing.stream_ops import StreamOps


def default_ops() -> str:
    """Return the operations that "auto" selects on a CPU."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError:
        return "torch"
    return "native_cpu"


class LateOps(StreamOps):
    """Launches the time of a step before each copy: only the scripted model does so itself."""

    contract = 1
    opened: list[LateOps] = []

    class Options(StreamOps.Options):
        wraps: str = default_ops()
        step_seconds: float = 0.001

    def __init__(self, context):
        super().__init__(context)
        self.opened.append(self)

    def copy_to_host(self, tensors):
        self.launch_forward()
        return super().copy_to_host(tensors)
