"""Stores in the order in which they are asked, with time limits, checks and statistics."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from hardpoint.errors import reason_of, shown
from hardpoint.plugins import KVStore, KVTierStats
from hardpoint.plugins.kv_store import BlockBuffer, PeerKVStore

from .events import TierEvents
from .staging import BadBlockError, check_block, copy_buffer, write_header

_log = logging.getLogger("hardpoint")

_KEY_BYTES = 32
_MOST_LATE = 16  # futures; each keeps a buffer
_T = TypeVar("_T")


class CircuitBreaker:
    """Leaves out a store that keeps failing, for a while.

    Failures are counted by method, because a store with working look-ups may fail at every load.
    """

    def __init__(self, failures: int, seconds: float) -> None:
        """Open after `failures` of a method in a row, for `seconds`; then one call tries again."""
        self._limit, self._seconds = failures, seconds
        self._counts: Counter[str] = Counter()
        self._closed_at = 0.0  # when calls may try
        self._trying: set[str] = set()
        self._lock = threading.Lock()

    @property
    def _is_open(self) -> bool:
        return any(count >= self._limit for count in self._counts.values())

    def allows(self, method: str) -> bool:
        """Return whether the store may be called."""
        if not self._counts:
            return True
        with self._lock:
            if not self._is_open:
                return True
            if method in self._trying or time.monotonic() < self._closed_at:
                return False
            self._trying.add(method)
            return True

    def succeeded(self, method: str) -> None:
        """Record a call that worked."""
        if self._counts:
            with self._lock:
                self._counts.pop(method, None)
                self._trying.discard(method)

    def failed(self, method: str) -> bool:
        """Record a failure; return whether the store is left out from now on."""
        with self._lock:
            was_open = self._is_open
            self._counts[method] += 1
            self._trying.clear()
            self._closed_at = time.monotonic() + self._seconds
            return self._is_open and not was_open


class _BadAnswerError(Exception):
    """A store has returned an invalid result; the message describes it."""


@dataclass(eq=False, slots=True)
class _TierCall:
    """A call that has not returned, or has a pending future.

    Attributes:
        began: when, on the monotonic clock.
        views: views of the buffer that the store uses.
        future: the future that did not end in time.
    """

    began: float
    views: BlockBuffer | None
    future: Future[Any] | None = None


class Tier:
    """One store; its methods are called by several threads and never raise.

    Attributes:
        store: the store that it calls.
        stats: totals since the start.
    """

    def __init__(
        self,
        store: KVStore,
        breaker: CircuitBreaker,
        timeout: float,
        report_fault: Callable[[str, str], None],
        events: TierEvents | None = None,
        secret: bytes = b"",
    ) -> None:
        """Call a store.

        Args:
            store: borrowed.
            timeout: seconds after which a call has failed.
            report_fault: counts a fault: name, message.
            events: reports the contents of the store; None if no events are published.
            secret: for authentication codes, from `read_mac_key`.
        """
        self._secret = secret
        self.store = store
        self.stats = KVTierStats()
        self._breaker = breaker
        self._timeout = timeout
        self._report_fault = report_fault
        self._events = events
        self._reports_size = type(store).used_bytes is not KVStore.used_bytes
        self._lock = threading.Lock()
        self._calls: dict[_TierCall, None] = {}
        self._local = threading.local()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the store reports that it has it."""

        def answers(result: Any) -> list[bool]:
            if not isinstance(result, Sequence) or isinstance(result, str | bytes):
                raise _BadAnswerError(f"{shown(result)} for {len(keys)} keys")
            answered = [bool(is_stored) for is_stored in itertools.islice(result, len(keys) + 1)]
            if len(answered) != len(keys):
                raise _BadAnswerError(f"{shown(result)} for {len(keys)} keys")
            return answered

        answer = self._call("lookup", lambda: self.store.lookup(keys), answers)
        if answer is None:
            return [False] * len(keys)
        hits = sum(answer)
        self._count(hits=hits, misses=len(keys) - hits)
        return answer

    def failure(self) -> str | None:
        """Ask the store for a block that is not there; return why that failed."""
        failures: list[str] = []
        probe = Tier(
            self.store,
            CircuitBreaker(1, self._timeout),
            self._timeout,
            lambda _name, message: failures.append(message),
        )
        probe.lookup([bytes(_KEY_BYTES)])
        return failures[0] if failures else None

    def load(self, key: bytes, views: BlockBuffer) -> bool:
        """Load a block and check it; return whether it is there, and is the right one."""
        is_there = self._load("load", lambda room: self.store.load(key, room), key, views)
        if self._events is not None:
            if is_there:
                self._events.stored(self.store.name, key)
            else:
                self._events.removed(self.store.name, (key,))
        return is_there

    def fetch(self, peer: str, key: bytes, views: BlockBuffer, seconds: float) -> bool:
        """Load a block that another engine offers, and check it."""
        store = self.store
        assert isinstance(store, PeerKVStore)
        return self._load("fetch", lambda room: store.fetch(peer, key, room, seconds), key, views)

    def _load(
        self, method: str, load: Callable[[BlockBuffer], Any], key: bytes, views: BlockBuffer
    ) -> bool:
        """Let the store write into memory of its own, which it may still write to afterwards."""
        room: BlockBuffer | None = getattr(self._local, "room", None)
        if room is None:
            room = BlockBuffer(memoryview(bytearray(len(views.whole))), [len(v) for v in views])
        self._local.room = None

        def check(is_there: Any) -> bool:
            if is_there:
                copy_buffer(room, views)
                try:
                    check_block(views, key, self._secret)
                except BadBlockError as error:
                    raise _BadAnswerError(f"a block that cannot be used: {error}") from None
            return bool(is_there)

        began = time.perf_counter()
        room.whole[:8] = bytes(8)  # detects a store that reports a load and has not loaded
        is_there = self._call(method, lambda: load(room), check, room)
        if is_there is not None:  # after a failure, it may still be in use
            self._local.room = room
        if not is_there:
            return False
        size, seconds = len(views.whole), time.perf_counter() - began
        self._count(loaded_blocks=1, loaded_bytes=size, load_seconds=seconds)
        return True

    def keep(self, key: bytes, views: BlockBuffer) -> bool:
        """Store a block; return whether it is kept."""
        is_kept = self._keep("store", lambda parts: self.store.store(key, parts), views)
        if is_kept:
            if self._events is not None:
                self._events.stored(self.store.name, key)
            if self._reports_size:
                self._read_size()
        return is_kept

    def _read_size(self) -> None:
        used_bytes = self._call("used_bytes", lambda: self.store.used_bytes, _checked_size)
        with self._lock:
            self.stats.used_bytes = used_bytes

    def offer(self, key: bytes, views: BlockBuffer, seconds: float) -> bool:
        """Offer a block to another engine."""
        store = self.store
        assert isinstance(store, PeerKVStore)
        return self._keep("offer", lambda parts: store.offer(key, parts, seconds), views)

    def _keep(self, method: str, keep: Callable[[BlockBuffer], Any], views: BlockBuffer) -> bool:
        began = time.perf_counter()
        read_only = views.read_only()
        if not self._call(method, lambda: keep(read_only), bool, views):
            self._count(dropped_blocks=1)
            return False
        size, seconds = len(views.whole), time.perf_counter() - began
        self._count(stored_blocks=1, stored_bytes=size, store_seconds=seconds)
        return True

    def drop(self) -> None:
        """Count a block that was not stored, for lack of room or time."""
        self._count(dropped_blocks=1)

    def run(self, method: str, *args: Any) -> None:
        """Call another method of the store."""
        self._call(method, lambda: getattr(self.store, method)(*args), lambda _: True)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """Notify the store that blocks are of use, in the order of a request."""
        self._call("lookup", lambda: self.store.lookup(keys), lambda _: True)

    def end(self, method: str) -> None:
        """Call `drain` or `close` despite earlier failures; no step reports a failure of it."""
        try:
            getattr(self.store, method)()
        except BaseException as cause:
            name = self.store.name
            _log.warning("KV store %r: %s() failed: %s", name, method, reason_of(cause))

    def late_use(self, views: BlockBuffer) -> Future[Any] | None:
        """Return the future of a call that was given up, and that may still use a buffer."""
        late = [call.future for call in self._calls.copy() if call.views is views]
        return next(filter(None, late), None)

    def _call(
        self,
        method: str,
        call: Callable[[], Any],
        check: Callable[[Any], _T],
        views: BlockBuffer | None = None,
    ) -> _T | None:
        if not self._breaker.allows(method) or self._is_stuck(method):
            return None
        running = _TierCall(time.monotonic(), views)
        self._calls[running] = None
        try:
            result = check(self._result(call(), running))
        except _BadAnswerError as error:
            self._fail(method, f"{method}() gave {error}")
            return None
        except BaseException as cause:  # the thread is the connector's own
            self._fail(method, f"{method}() failed: {reason_of(cause)}")
            return None
        finally:
            if running.future is None:
                del self._calls[running]
        if (seconds := time.monotonic() - running.began) > self._timeout:
            limit = f"{self._timeout:g} s"
            self._fail(method, f"{method}() took {seconds:.3g} s, more than {limit}")
            return None
        self._breaker.succeeded(method)
        return result

    def _result(self, result: Any, call: _TierCall) -> Any:
        """Return the result of a future; a future that takes too long keeps its call."""
        if not isinstance(result, Future):
            return result
        try:
            return result.result(self._timeout)
        except TimeoutError:
            if result.done():
                raise
        call.future = result
        result.add_done_callback(lambda _: self._calls.pop(call))
        raise TimeoutError(f"its future is not done after {self._timeout:g} s")

    def _is_stuck(self, method: str) -> bool:
        """Return whether a call has not returned for too long: others would not, either."""
        calls = self._calls.copy()
        running = (call.began for call in calls if call.future is None)
        if time.monotonic() - min(running, default=math.inf) > self._timeout:
            self._fail(method, f"a call has not returned for {self._timeout:g} s")
            return True
        if sum(call.future is not None for call in calls) >= _MOST_LATE:
            self._fail(method, f"{_MOST_LATE} futures that took too long are not done")
            return True
        return False

    def _fail(self, method: str, message: str) -> None:
        name = self.store.name
        self._count(failures=1)
        self._report_fault(name, f"KV store {name!r}: {message}")
        if self._breaker.failed(method):  # under a name of its own, since one message is kept
            message = f"KV store {name!r} is left out for a while: {message}"
            self._report_fault(f"{name} (left out)", message)

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.stats, name, getattr(self.stats, name) + value)

    def totals(self) -> KVTierStats:
        """Return a copy of the totals."""
        with self._lock:
            return msgspec.structs.replace(self.stats)


def _checked_size(size: Any) -> int | None:
    if size is not None and (type(size) is not int or size < 0):
        raise _BadAnswerError(f"{shown(size)}, expected bytes >= 0 or None")
    return size


def merge_lookups(
    keys: Sequence[bytes], lookups: Iterable[Callable[[Sequence[bytes]], Sequence[bool]]]
) -> list[bool]:
    """Return for each key whether any store has it; ask each store for the keys still missing."""
    results = [False] * len(keys)
    for lookup in lookups:
        missing = [index for index, has in enumerate(results) if not has]
        if not missing:
            break
        for index, has in zip(missing, lookup([keys[i] for i in missing]), strict=True):
            results[index] = has
    return results


class Tiers:
    """All stores, nearest first."""

    def __init__(self, tiers: Sequence[Tier], secret: bytes = b"") -> None:
        """Require at least one tier; `secret`: secret of the authentication codes."""
        self._secret = secret
        self._tiers = list(tiers)
        self._generations = itertools.count(time.time_ns())
        self.peer_tier = next((t for t in tiers if isinstance(t.store, PeerKVStore)), None)

    def __iter__(self) -> Any:
        return iter(self._tiers)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys some store has."""
        results = merge_lookups(keys, [tier.lookup for tier in self._tiers])
        return results.index(False) if False in results else len(keys)

    def load(self, key: bytes, views: BlockBuffer) -> bool:
        """Load a block from the nearest store that has it, and keep it in all nearer ones."""
        for index, tier in enumerate(self._tiers):
            if tier.load(key, views):
                for nearer in self._tiers[:index]:
                    nearer.keep(key, views)
                return True
        return False

    def drop(self) -> None:
        """Count a block that is not stored, for lack of room or time."""
        self._tiers[0].drop()

    def late_use(self, views: BlockBuffer) -> Future[Any] | None:
        """Return the future of a call that was given up, and that may still use a buffer."""
        return next(filter(None, (tier.late_use(views) for tier in self._tiers)), None)

    def when_free(self, views: BlockBuffer, then: Callable[[], None]) -> None:
        """Call `then` as soon as no store uses a buffer, in any thread."""
        late = self.late_use(views)
        if late is None:
            then()
        else:
            late.add_done_callback(lambda _: self.when_free(views, then))

    def begin(self, key: bytes, views: BlockBuffer) -> None:
        """Write the header of a block that is to be stored."""
        generation = next(self._generations) & ((1 << 64) - 1)
        write_header(views, key, generation, self._secret)
