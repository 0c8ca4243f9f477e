"""Several stores as one."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint import plugins
from hardpoint.builtin_plugins.kv_connectors.tiers import CircuitBreaker, merge_lookups
from hardpoint.plugins import ConfigError, KVStore
from hardpoint.plugins.kv_store import BlockBuffer


class ChainStore(KVStore):
    """Loads a block from the nearest store that has it, and keeps it in all nearer ones.

    The connector "stores" does the same with several `kv_connector.stores`, checks each block, and
    has statistics of each store. Use a chain with other connectors, or to count several stores as
    one. A chain checks nothing: a damaged block of a farther store is copied to the nearer ones,
    until the block is stored again.

    A store that fails or exceeds the connector's time limit of a call is skipped for
    `breaker_seconds`. If a store never returns, the connector skips the whole chain.
    """

    contract = 1

    class Options(plugins.Options):
        """The stores.

        Attributes:
            stores: entry-point names or FQCNs, nearest first; the options of each are in a table of
                its own, `[plugin.<name>]`.
            write: blocks are stored in all stores at once ("through"), or in those after the
                nearest later, from a copy ("behind").
            copy_bytes: bytes of host memory for these copies; when it is full, blocks are stored in
                the nearest alone.
            breaker_failures: failed calls in a row after which a store is skipped.
            breaker_seconds: time that it is skipped.
        """

        stores: Annotated[list[str], Meta(min_length=1)]
        write: Literal["through", "behind"] = "through"
        copy_bytes: Annotated[int, Meta(ge=1)] = 256 << 20
        breaker_failures: Annotated[int, Meta(ge=1, le=1024)] = 5
        breaker_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 10.0

    options: Options

    @classmethod
    def wraps(cls, options: Any) -> Sequence[str]:
        """Return the stores."""
        stores: Sequence[str] = options.stores
        return stores

    def __init__(self, context: plugins.KVStoreContext) -> None:
        """Build the stores.

        Raises:
            ConfigError: one of them cannot be built, or is named twice.
        """
        super().__init__(context)
        options = self.options
        twice = [name for name in options.stores if options.stores.count(name) > 1]
        if twice:
            raise ConfigError(f"plugin.{self.name}.stores: {twice[0]!r} is named twice")
        self._links = [self._link(name) for name in options.stores]
        copies = max(1, options.copy_bytes // context.block_bytes)
        self._later = _Later(functools.partial(self._keep, links=self._links[1:]), copies)

    def _link(self, name: str) -> _Link:
        store = self.context.create(name)
        breaker = CircuitBreaker(self.options.breaker_failures, self.options.breaker_seconds)
        return _Link(store, breaker, self.context)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are in any of the stores."""
        return merge_lookups(keys, [self._later.lookup, *(link.lookup for link in self._links)])

    def store(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Keep a block in all of the stores."""
        if self.options.write == "through" or len(self._links) == 1:
            return self._keep(key, buffer, self._links)
        is_stored = self._links[0].run("store", key, buffer)
        return self._later.submit(key, buffer) or is_stored

    def _keep(self, key: bytes, buffer: BlockBuffer, links: Sequence[_Link]) -> bool:
        results = [link.run("store", key, buffer) for link in links]
        return any(results)

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Read a block from the nearest store that has it."""
        for index, link in enumerate(self._links):
            if link.run("load", key, buffer):
                self._keep(key, buffer.read_only(), self._links[:index])
                return True
            if index == 0 and self._later.load(key, buffer):
                return True
        return False

    @property
    def used_bytes(self) -> int | None:
        """Bytes of the blocks in all stores; None if one does not report it."""
        sizes = [link.used_bytes() for link in self._links]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def drain(self) -> None:
        """Wait for the copies, and for each store."""
        self._later.drain()
        for link in self._links:
            link.run("drain")

    def close(self) -> None:
        """Close the stores; copies that are not stored yet are dropped."""
        self._later.close(self.context.timeout_seconds)
        for link in self._links:
            link.close()


class _Link:
    """One of the stores; its methods never raise."""

    def __init__(
        self, store: KVStore, breaker: CircuitBreaker, context: plugins.KVStoreContext
    ) -> None:
        self._store, self._breaker, self._context = store, breaker, context

    def lookup(self, keys: Sequence[bytes]) -> Sequence[bool]:
        result = self._call("lookup", keys)
        if isinstance(result, Sequence) and len(result) == len(keys):
            return [bool(has) for has in result]
        if result is not None:
            self._fail("lookup", f"lookup() of {len(keys)} keys did not return as many answers")
        return [False] * len(keys)

    def run(self, method: str, *args: Any) -> bool:
        return bool(self._call(method, *args))

    def used_bytes(self) -> int | None:
        """Return the bytes that it keeps, if it reports them."""
        try:
            return self._store.used_bytes
        except Exception as cause:
            self._fail("used_bytes", f"used_bytes failed: {type(cause).__name__}: {cause}")
            return None

    def _call(self, method: str, *args: Any) -> Any:
        if not self._breaker.allows(method):
            return None
        began = time.monotonic()
        try:
            result = getattr(self._store, method)(*args)
            if isinstance(result, Future):
                # However long it takes: until it is done, the store may use the buffer.
                result = result.result()
        except Exception as cause:
            self._fail(method, f"{method}() failed: {type(cause).__name__}: {cause}")
            return None
        limit = self._context.timeout_seconds
        if (seconds := time.monotonic() - began) > limit:
            self._fail(method, f"{method}() took {seconds:.3g} s, more than {limit:g} s")
        else:
            self._breaker.succeeded(method)
        return result

    def close(self) -> None:
        try:
            self._store.close()
        except Exception as cause:
            self._fail("close", f"close() failed: {type(cause).__name__}: {cause}")

    def _fail(self, method: str, message: str) -> None:
        message = f"KV store {self._store.name!r} in {self._context.name!r}: {message}"
        if self._breaker.failed(method):
            message += "; it is left out for a while"
        self._context.report_fault(message)


class _Later:
    """A thread that stores copies of blocks; until then, they are loaded from here."""

    def __init__(self, keep: Callable[[bytes, BlockBuffer], Any], limit: int) -> None:
        """`limit` is the number of copies at most."""
        self._keep, self._limit = keep, limit
        self._copies: dict[bytes, BlockBuffer] = {}  # the first one is being stored
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, key: bytes, buffer: BlockBuffer) -> bool:
        """Store a copy of a block; return False if there is no room, or no thread."""
        if self._is_full(key):
            return False
        whole = memoryview(bytes(buffer.whole))
        copy = BlockBuffer(whole, [len(part) for part in buffer])
        with self._changed:
            if self._is_full(key):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="KVChain", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has none left now
                    return False
                self._thread = thread
            self._copies[key] = copy
            self._changed.notify_all()
        return True

    def _is_full(self, key: bytes) -> bool:
        return self._closed or (len(self._copies) >= self._limit and key not in self._copies)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._copies or self._closed)
                if self._closed:
                    return
                key, copy = next(iter(self._copies.items()))
            self._keep(key, copy)
            with self._changed:
                if self._copies.get(key) is copy:  # another may have come
                    del self._copies[key]
                self._changed.notify_all()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._copies for key in keys]

    def load(self, key: bytes, buffer: BlockBuffer) -> bool:
        copy = self._copies.get(key)
        if copy is None:
            return False
        buffer.whole[:] = copy.whole
        return True

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._copies)

    def close(self, seconds: float) -> None:
        """End the thread, unless it is stuck."""
        with self._changed:
            self._closed = True
            self._copies.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
