"""Components of one device or dtype, and ones that wrap whatever the backend is."""

from __future__ import annotations

from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.plugins import AttentionBackend, Ops, Wrapper


class CudaOps(TorchOps):
    contract = 1
    devices = ("cuda",)


class LoggedOps(Wrapper[Ops], Ops):
    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        wraps: str = "auto"


class AutoOnly(TorchAttention):
    """Stores keys and values as they are."""

    contract = 1
    cache_dtypes = ("auto",)


class LoggedAttention(Wrapper[AttentionBackend], AttentionBackend):
    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        wraps: str = "auto"
