"""The choice of `parallel.communicator` by default: the fastest that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import ModelError, Wrapper
from hardpoint.plugins.parallel import Communicator, CommunicatorContext

from .meeting import RankMissingError


class AutoCommunicator(Wrapper[Communicator], Communicator):
    """Shared memory between the CPU ranks of one host, else torch.distributed."""

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """The communicators to try.

        Attributes:
            wraps: communicator to try first.
            fallback: communicator to use if that one cannot connect the ranks of the group.
        """

        wraps: str = "shared_memory"
        fallback: str = "torch"

    context: CommunicatorContext

    def __init__(self, context: CommunicatorContext) -> None:
        """Build the communicator that is chosen.

        Raises:
            RankMissingError: the ranks do not meet; no other communicator is tried then.
            ModelError: the fallback does not run either.
        """
        super(Wrapper, self).__init__(context)  # which builds no other
        self.wrapped, self._description = _first_that_runs(context)

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return the names that may be chosen."""
        return (options.wraps, options.fallback)

    def describe(self) -> str:
        """Return the choice and its reason."""
        return self._description


def _first_that_runs(context: CommunicatorContext) -> tuple[Communicator, str]:
    device, first = context.device.type, context.options.wraps
    try:
        communicator = context.create(first)
        if device in communicator.devices:
            return communicator, communicator.describe()
        communicator.close()
        reason = f"{first!r} does not run on {device}"
    except RankMissingError:
        raise
    except ModelError as cause:
        reason = str(cause)
    communicator = context.create(context.options.fallback)
    return communicator, f"{communicator.describe()} ({reason})"
