"""Collectives between CPUs on gloo's messages from rank to rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from hardpoint.plugins.parallel import CommunicatorContext

from .rendezvous import Rendezvous, dist

_COLLECTIVE, _MESSAGE, _ABORT = range(3)  # tags: messages with different tags never match
_NO_LIMIT = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_MAX_PENDING = 4
_LARGE_BYTES = 1 << 18  # from where two small exchanges are faster than a large one


class GlooGroup:
    """The connections of a rank to the others of its group.

    Messages are used instead of gloo's collectives, which run in a thread of a pool that nothing
    can stop. They are also faster, and the order of sums is ours.
    """

    def __init__(self, context: CommunicatorContext, rendezvous: Rendezvous) -> None:
        """Connect to the other ranks.

        Raises:
            ModelError: a rank cannot, or did not come.
        """
        self._rank, self._size = context.rank, context.size
        self._others = [(self._rank + i) % self._size for i in range(1, self._size)]
        self._pending: dict[int, deque[tuple[Any, torch.Tensor]]] = {
            rank: deque() for rank in self._others
        }
        options = dist.ProcessGroupGloo._Options()
        options._devices = [
            rendezvous.agree(
                lambda: dist.ProcessGroupGloo.create_device(hostname=rendezvous.address), "device"
            )
        ]
        options._timeout = rendezvous.remaining()
        options._threads = 1
        self._group: Any = rendezvous.agree(
            lambda: dist.ProcessGroupGloo(rendezvous.store, self._rank, self._size, options),
            "connected",
        )
        self.description = f"gloo over {rendezvous.address}"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum in rank order, the same bits for each way of sharing the work."""
        if x.nbytes <= _LARGE_BYTES:
            return _sum_in_order(self._gather(x))
        flat = x.view(-1)
        chunks = list(flat.tensor_split(self._size))
        total = torch.empty_like(flat)
        own_chunk = chunks[self._rank]
        parts = [
            own_chunk if rank == self._rank else torch.empty_like(own_chunk)
            for rank in range(self._size)
        ]
        self._exchange(chunks, parts)
        results = list(total.tensor_split(self._size))
        results[self._rank].copy_(_sum_in_order(parts))
        self._exchange([results[self._rank]] * self._size, results)
        return total.view_as(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks."""
        result = x.new_empty((self._size, *x.shape))
        result[self._rank].copy_(x)
        self._exchange([x] * self._size, list(result))
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange rows."""
        result = torch.empty_like(x)
        result[self._rank].copy_(x[self._rank])
        self._exchange(list(x), list(result))
        return result

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Send x to all others, or receive it."""
        if self._rank != source:
            _wait([self._group.recv([x], source, _COLLECTIVE)])
        else:
            _wait([self._group.send([x], other, _COLLECTIVE) for other in self._others])
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send a copy of x, which stays here until it has been received."""
        pending = self._pending[destination]
        if len(pending) == _MAX_PENDING:
            _wait([pending.popleft()[0]])
        copy = x.clone()
        pending.append((self._group.send([copy], destination, _MESSAGE), copy))

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into x."""
        _wait([self._group.recv([x], source, _MESSAGE)])
        return x

    def abort(self) -> None:
        """Close all connections, so that every call here and in the other ranks fails."""
        # Nothing that torch offers ends a call that waits. A wait that runs out of time does: gloo
        # closes the connection then, and with it fails all that waits for it, at both ends.
        for other in self._others:
            with suppress(RuntimeError):
                self._group.recv([torch.empty(1)], other, _ABORT).wait(_AT_ONCE)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [x if rank == self._rank else torch.empty_like(x) for rank in range(self._size)]
        self._exchange([x] * self._size, parts)
        return parts

    def _exchange(self, to: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        works = []
        for other in self._others:
            works.append(self._group.recv([into[other]], other, _COLLECTIVE))
        for other in self._others:
            works.append(self._group.send([to[other]], other, _COLLECTIVE))
        _wait(works)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait(_NO_LIMIT)


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
