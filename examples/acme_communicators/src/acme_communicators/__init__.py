"""A communicator for Hardpoint that counts the traffic of another one between the ranks."""

import logging
from collections import Counter

import torch

from hardpoint.plugins import Communicator, CommunicatorContext, Wrapper

__all__ = ["Traffic"]


class Traffic(Wrapper[Communicator], Communicator):
    """Delegates to another communicator, and logs its calls and bytes when the rank closes.

    All that it does not override is the wrapped communicator's.
    """

    contract = 1
    devices = ("cpu", "cuda")

    class Options(Wrapper.Options):
        """Options: `wraps`, the communicator that does the work."""

        wraps: str = "torch"

    def __init__(self, context: CommunicatorContext) -> None:
        """Meet the other ranks, through the wrapped communicator."""
        super().__init__(context)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks."""
        self._count("all_reduce", x)
        return self.wrapped.all_reduce(x)

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send x to a rank."""
        self._count("send", x)
        self.wrapped.send(x, destination)

    def close(self) -> None:
        """Log the counts, and leave the group."""
        for name, calls in sorted(self.calls.items()):
            logging.getLogger("hardpoint").info(
                "rank %d of %s: %d calls of %s, %d bytes",
                self.rank,
                self.context.group,
                calls,
                name,
                self.bytes[name],
            )
        super().close()

    def _count(self, name: str, x: torch.Tensor) -> None:
        self.calls[name] += 1
        self.bytes[name] += x.numel() * x.element_size()
