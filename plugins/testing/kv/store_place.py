"""The place in which a KV store under test keeps its blocks, and the threads that call it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from hardpoint.plugins import KVStore

from .store_blocks import StoredBlocks, WatchedBuffer, make_keys
from .store_session import CALLS, StoreSession

OpenStore = Callable[[Sequence[int], int, Callable[[str], None]], KVStore]
"""Opens a store: sizes, rank, and the callback that reports a fault."""

_SWITCH_SECONDS = 1e-5
_SLACK_SECONDS = 5.0


class Place:
    """An open store and the contents of its place.

    Attributes:
        session: session of the store.
        blocks: blocks that it was given.
    """

    session: StoreSession

    def __init__(
        self,
        open_store: OpenStore,
        sizes: Sequence[int],
        keys: Sequence[bytes],
        rank: int,
        seconds: float,
    ) -> None:
        """Open nothing yet.

        Args:
            sizes: sizes of the parts of its buffers.
            keys: keys of the blocks.
            rank: rank of the store.
        """
        self.blocks = StoredBlocks(keys)
        self._open_store, self._sizes, self._rank = open_store, sizes, rank
        self._seconds = seconds
        self._faults: list[str] = []

    def open(self) -> None:
        """Open the store."""
        store = self._open_store(self._sizes, self._rank, self._faults.append)
        self.session = self._session(store)

    def _session(self, store: KVStore) -> StoreSession:
        return StoreSession(store, self._sizes, self.blocks, self._seconds)

    def run(self, *programs: Callable[[], object]) -> None:
        """Run programs at once."""
        run_at_once(programs, self._seconds + _SLACK_SECONDS, lambda: self.session.calls)

    def reopen(self, *, durable: bool) -> None:
        """Drain and close the store, and open the place again."""
        self.session.drain()
        self.close()
        if not durable:
            self.blocks.forget()
        self.open()

    def drop_reports(self) -> None:
        """Forget the faults that the store has reported."""
        self._faults.clear()

    def close(self) -> None:
        """Close the store, which must not have reported a fault."""
        self.run(self.session.close)
        if self._faults:
            raise CALLS.violation(f"it reported a fault, and there was none: {self._faults[0]}")

    @contextmanager
    def other(self, sizes: Sequence[int], keys: Sequence[bytes], rank: int) -> Iterator[Place]:
        """Open another store in the same place."""
        other = Place(self._open_store, sizes, keys, rank, self._seconds)
        if keys is self.blocks.keys:
            other.blocks = self.blocks
        other.open()
        try:
            yield other
        except BaseException:
            with suppress(Exception):
                other.close()
            raise
        other.close()


def store_and_load(store: KVStore, sizes: Sequence[int], seconds: float) -> Callable[[int], None]:
    """Return a function that stores, looks up and loads a block under one of a few keys.

    Args:
        store: under test.
        sizes: sizes of the parts of its buffers.
        seconds: time limit of a call.
    """
    keys, buffer = make_keys(8), WatchedBuffer(sizes).block

    def use(number: int) -> None:
        key = keys[number % len(keys)]
        for result in (store.store(key, buffer), store.load(key, buffer)):
            if isinstance(result, Future):
                result.result(seconds)
        store.lookup([key])

    return use


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_at_once(
    programs: Sequence[Callable[[], object]], seconds: float, calls: Callable[[], Sequence[str]]
) -> None:
    """Run programs in a thread each, which begin together; raise the first exception.

    Args:
        programs: at least one.
        seconds: in which all have to end.
        calls: returns the calls that have not returned.

    Raises:
        Violation: a program did not end.
    """
    raised: list[BaseException] = []
    begin = threading.Barrier(len(programs))

    def run(program: Callable[[], object]) -> None:
        try:
            begin.wait(seconds)
            program()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in threads):
        waiting = ", ".join(calls()) or "a call"
        raise CALLS.violation(f"not returned after {seconds:g} s: {waiting}", "end every wait")
