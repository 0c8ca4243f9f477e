"""Collectives between GPUs by nccl."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch

from hardpoint.plugins.parallel import CommunicatorContext

from .rendezvous import Rendezvous, dist

_NO_LIMIT = timedelta(days=365)
_MAX_PENDING = 4


class NcclGroup:
    """The groups of nccl of a rank: for collectives, and for messages in either direction.

    Work is ordered on the device: calls return before it is done, and the current stream waits.
    """

    def __init__(self, context: CommunicatorContext, rendezvous: Rendezvous) -> None:
        """Connect to the other ranks.

        Raises:
            ModelError: a rank cannot, or did not come.
        """
        self._rank, self._size, self._device = context.rank, context.size, context.device
        self._rendezvous = rendezvous
        # Messages up and down have groups of their own, since a group's work is done in one order
        # on the device: a message that waits for its receiver must not delay replies.
        self._collectives = self._connect("collectives")
        self._up = self._connect("up")
        self._down = self._connect("down")
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()
        self.description = "nccl"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum into x, in the library's order."""
        self._collectives.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks."""
        result = x.new_empty((self._size, *x.shape))
        self._collectives._allgather_base(result.view(-1), x.view(-1)).wait()
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows."""
        result = torch.empty_like(x)
        self._collectives.alltoall_base(result, x, [], []).wait()
        return result

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Send x to all others, or receive it."""
        self._collectives.broadcast(x, source).wait()
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send a copy of x, for which the current stream does not wait."""
        if len(self._pending) == _MAX_PENDING:
            self._pending.popleft()[0].wait()
        copy = x.clone()
        group = self._up if destination > self._rank else self._down
        self._pending.append((group.send([copy], destination, 0), copy))

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into x."""
        group = self._up if source < self._rank else self._down
        group.recv([x], source, 0).wait()
        return x

    def abort(self) -> None:
        """End the work that is under way, and refuse further work."""
        for group in (self._collectives, self._up, self._down):
            group.abort()

    def _connect(self, name: str) -> Any:
        def make() -> Any:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NO_LIMIT
            store = dist.PrefixStore(name, self._rendezvous.store)
            group: Any = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            group.eager_connect_single_device(self._device)  # the store is there only now
            return group

        return self._rendezvous.agree(make, name)
