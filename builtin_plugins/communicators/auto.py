"""The choice of `parallel.communicator` by default: the fastest that runs."""

from __future__ import annotations

from hardpoint.builtin_plugins.auto import Auto
from hardpoint.plugins import Wrapper
from hardpoint.plugins.parallel import Communicator, CommunicatorContext

from .meeting import RankMissingError


class AutoCommunicator(Auto, Wrapper[Communicator], Communicator):
    """Shared memory between the CPU ranks of one host, else torch.distributed."""

    contract = 1
    devices = ("cpu", "cuda")
    final_errors = (RankMissingError,)

    class Options(Wrapper.Options):
        """The communicators to try.

        Attributes:
            wraps: is used if it runs between the ranks of the group.
            fallback: is used if that does not.
        """

        wraps: str = "shared_memory"
        fallback: str = "torch"

    context: CommunicatorContext
