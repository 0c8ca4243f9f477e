"""Ranks as threads: the workers of a sharded model, in one process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeVar

import torch

from hardpoint.errors import CommunicationAbortedError
from hardpoint.plugins.parallel import Communicator, CommunicatorContext, Placement

T = TypeVar("T")


def run_ranks(size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Call `function(communicator)` in a thread per rank; return the results in rank order.

    The communicators are exact and in memory. Ranks that wait for one another, or for one that has
    returned, get an error that names the ranks that wait. `torch.inference_mode` is per thread: a
    function enters it by itself.

    Args:
        size: number of ranks.
        function: is called once per rank.

    Raises:
        BaseException: the first one that a rank raised by itself; the others have ended then.
    """
    exchange = ThreadExchange(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(_context(rank, size), exchange))
        except BaseException as error:
            errors.append(error)
            exchange.abort(f"rank {rank} failed: {error}")
        finally:
            exchange.end(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"Rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CommunicationAbortedError))
    return [results[rank] for rank in range(size)]


def _context(rank: int, size: int) -> CommunicatorContext:
    return CommunicatorContext(
        name="rank_threads",
        options=None,
        group="threads",
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        placement=Placement(hosts=("",) * size),
        timeout_seconds=0.0,
    )


class ThreadExchange:
    """The tensors that ranks exchange, and the ranks that wait for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._round: dict[int, tuple[str, torch.Tensor]] = {}
        self.sent: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._ended: set[int] = set()
        self.failure: str | None = None

    def collect(self, rank: int, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the x of all ranks, copied, once each has made the same call.

        Raises:
            ValueError: they made different calls.
        """
        with self._changed:
            self._check()
            entries = self._round  # a dict per round: a fast rank may begin the next
            entries[rank] = (call, x.clone())
            if len(entries) == self.size:
                self._round = {}
                self._changed.notify_all()
            self._wait(rank, call, lambda: len(entries) == self.size)
        calls = [entries[other][0] for other in range(self.size)]
        if len(set(calls)) > 1:
            different = ", ".join(
                f"rank {other}: {call_made}" for other, call_made in enumerate(calls)
            )
            raise ValueError(f"the ranks make different calls ({different})")
        return [entries[other][1] for other in range(self.size)]

    def put(self, source: int, destination: int, x: torch.Tensor) -> None:
        """Store x for a rank."""
        with self._changed:
            self._check()
            self.sent[source, destination].append(x.clone())
            self._changed.notify_all()

    def pop(self, source: int, destination: int) -> torch.Tensor:
        """Return the first stored value."""
        with self._changed:
            self._check()
            sent = self.sent[source, destination]
            self._wait(destination, f"recv from rank {source}", lambda: bool(sent))
            return sent.popleft()

    def abort(self, reason: str) -> None:
        """Let all calls fail."""
        with self._changed:
            self.failure = self.failure or reason
            self._changed.notify_all()

    def end(self, rank: int) -> None:
        """Expect no further call of a rank."""
        with self._changed:
            self._ended.add(rank)
            self._find_deadlock()

    def _check(self) -> None:
        if self.failure is not None:
            raise CommunicationAbortedError(f"the communication has ended: {self.failure}")

    def _wait(self, rank: int, call: str, is_done: Callable[[], bool]) -> None:
        self._waiting[rank] = (call, is_done)
        self._find_deadlock()
        try:
            self._changed.wait_for(lambda: is_done() or self.failure is not None)
        finally:
            del self._waiting[rank]
        if not is_done():
            self._check()

    def _find_deadlock(self) -> None:
        waiting = self._waiting
        if len(waiting) + len(self._ended) < self.size:
            return
        if not waiting or any(is_done() for _, is_done in waiting.values()):
            return
        where = [f"rank {rank} waits in {call}" for rank, (call, _) in sorted(waiting.items())]
        where += [f"rank {rank} has returned" for rank in sorted(self._ended)]
        self.abort(", ".join(where))


class ThreadCommunicator(Communicator):
    """A rank of `run_ranks`."""

    contract = 1
    devices = ("cpu", "cuda")

    def __init__(self, context: CommunicatorContext, exchange: ThreadExchange) -> None:
        """Join the exchange, which all ranks share."""
        super().__init__(context)
        self._exchange = exchange

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in the order of the ranks."""
        return rank_order_sum(self._collect("all_reduce", x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack the x of all ranks."""
        return torch.stack(self._collect("all_gather", x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Stack the row of each rank that is for this one."""
        if len(x) != self.size:
            raise ValueError(f"x: expected {self.size} rows, one per rank, got {len(x)}")
        return torch.stack([row[self.rank] for row in self._collect("all_to_all", x)])

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the x of one rank."""
        self._check_rank("source", source)
        return x.copy_(self._collect(f"broadcast from rank {source}", x)[source])

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Store x."""
        self._check_rank("destination", destination, is_other=True)
        self._exchange.put(self.rank, destination, x)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Wait for a stored tensor."""
        self._check_rank("source", source, is_other=True)
        sent = self._exchange.pop(source, self.rank)
        if (sent.shape, sent.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"x: rank {source} has sent {list(sent.shape)} of {sent.dtype}, rank {self.rank} "
                f"expects {list(x.shape)} of {x.dtype}"
            )
        return x.copy_(sent)

    def abort(self, reason: str) -> None:
        """Let all calls fail."""
        self._exchange.abort(reason)

    def _collect(self, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange.collect(self.rank, f"{call} of {list(x.shape)} {x.dtype}", x)

    def _check_rank(self, operation: str, rank: int, *, is_other: bool = False) -> None:
        if not 0 <= rank < self.size or (is_other and rank == self.rank):
            others = ", another one" if is_other else ""
            raise ValueError(
                f"{operation}: expected a rank from 0 to {self.size - 1}{others}, got {rank}"
            )


def rank_order_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors in their order: in float32 at least, and rounded once."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
