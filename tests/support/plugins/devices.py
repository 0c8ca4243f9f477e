"""Operations that run on one device, and ones that wrap whatever the backend is."""

from __future__ import annotations

from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.plugins import Ops, Wrapper


class CudaOps(TorchOps):
    contract = 1
    devices = ("cuda",)


class LoggedOps(Wrapper[Ops], Ops):
    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        wraps: str = "auto"
