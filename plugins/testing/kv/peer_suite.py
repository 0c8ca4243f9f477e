"""The conformance suite for KV stores that hand blocks to other engines."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hardpoint.plugins import KVStore
from hardpoint.plugins.kv_store import BlockBuffer, PeerKVStore
from hardpoint.testing.suite import Rule, Violation
from hardpoint.testing.threads import until

from .store_blocks import StoredBlocks, make_keys
from .store_place import Place
from .store_session import CALLS, StoreSession
from .store_suite import KVStoreSuite

OFFERS = Rule(
    "offers: an offered block is fetched once, by its key, and found in no other way",
    "keep offers apart from stored blocks, and drop one before it is sent",
)
LEASES = Rule(
    "leases: a block is dropped after its time, and renew begins the time again",
    "note until when each offer is kept, and compare with the clock before it is sent",
)
WAITS = Rule(
    "waits: fetch waits for a block that is not there yet, and ends in time in any case",
    "let the peer answer when the block comes, and limit every wait by the rest of the time",
)

_COUNT = 6
_LONG = 20.0
_SHORT = 0.3
_SLACK_SECONDS = 2.0
_THREADS = 4


class PeerKVStoreSuite(KVStoreSuite):
    """Base class of a test class for a `PeerKVStore`: the rules of stores and of peers.

    It overrides `peer_options`.
    """

    store: ClassVar[type[KVStore]]

    def peer_options(self, folder: Path, engine_id: str, peer: str) -> Mapping[str, Any]:
        """Return options, besides `options`, of one of two engines that reach each other.

        Args:
            folder: private, and shared by the two.
            engine_id: id of this engine.
            peer: id of the other one.
        """
        raise NotImplementedError

    def test_peers(self) -> None:
        """The store reports the peers that it can reach: the engines of the configuration."""
        self._run_checks(OFFERS.text, self._in_pair(self._check_peers))

    def test_offers(self) -> None:
        """One engine fetches an offer of the other once and whole, also when threads compete.
        `lookup` and `load` do not find it.
        """
        self._run_checks(
            OFFERS.text,
            self._in_pair(self._check_offers),
            self._in_pair(self._check_one_of_many),
        )

    def test_leases(self) -> None:
        """An offer that no one renews is gone after its time. Both sides can renew it; renewing
        a missing offer does nothing.
        """
        self._run_checks(
            LEASES.text,
            self._in_pair(self._check_end, may_report=True),
            self._in_pair(self._check_renewal, may_report=True),
        )

    def test_waits(self) -> None:
        """A fetch may come before the offer. In vain, or from an engine that has ended, it returns
        `False` in time, or raises.
        """
        self._run_checks(
            WAITS.text,
            self._in_pair(self._check_early_fetch, may_report=True),
            self._in_pair(self._check_loss, may_report=True),
        )

    def _in_pair(
        self, check: Callable[[_PeerEngine, _PeerEngine], None], *, may_report: bool = False
    ) -> Callable[[], None]:
        """Return a function that checks two engines.

        Args:
            may_report: whether the stores may report that a peer gives no answer.
        """

        def run() -> None:
            with self._place_folder() as folder, self._pair(folder, self.sizes[1]) as engines:
                engines[0].run(functools.partial(check, *engines))
                for engine in engines if may_report else ():
                    engine.drop_reports()

        return run

    @contextmanager
    def _pair(
        self, folder: Path, sizes: Sequence[int]
    ) -> Iterator[tuple[_PeerEngine, _PeerEngine]]:
        if not issubclass(self.store, PeerKVStore):
            raise Violation(f"{self.store.__name__} is no PeerKVStore", "test it by KVStoreSuite")
        keys = make_keys(_COUNT)
        offered = StoredBlocks(keys)
        engines = []
        try:
            for engine_id, peer in (("one", "two"), ("two", "one")):
                options = self.peer_options(folder, engine_id, peer)
                open_store = functools.partial(self._open, options, engine_id=engine_id)
                engine = _PeerEngine(open_store, sizes, keys, 0, self.timeout_seconds)
                engine.id, engine.offered = engine_id, offered
                engine.open()
                engines.append(engine)
            yield engines[0], engines[1]
        finally:
            for engine in engines:
                if engine.is_open:
                    engine.close()

    def _check_peers(self, first: _PeerEngine, two: _PeerEngine) -> None:
        for engine, other in ((first, two), (two, first)):
            if engine.session.peers != frozenset({other.id}):
                raise OFFERS.violation(
                    f"the peers of engine {engine.id!r} are {engine.session.peers!r}, expected "
                    f"frozenset({{{other.id!r}}})",
                    "return the ids that the options name, without the engine's own",
                )

    def _check_offers(self, first: _PeerEngine, two: _PeerEngine) -> None:
        for giver, taker in ((first, two), (two, first)):
            for index in range(_COUNT):
                if not giver.session.offer(index, _LONG):
                    raise OFFERS.violation(f"offer refused block {index + 1} of {_COUNT}")
            for engine in (giver, taker):
                engine.session.lookup(range(_COUNT))  # finds none of them
                for index in range(_COUNT):
                    engine.session.load(index)
            for index in range(_COUNT):
                if not taker.session.fetch(giver.id, index, _LONG):
                    raise OFFERS.violation(f"fetch of key {index} did not find the offered block")
                if taker.session.fetch(giver.id, index, _SHORT / 6):
                    raise OFFERS.violation(f"key {index} could be fetched twice")

    def _check_one_of_many(self, first: _PeerEngine, two: _PeerEngine) -> None:
        """Let threads fetch the same blocks."""
        for index in range(_COUNT):
            first.session.offer(index, _LONG)
            results: list[bool] = []

            def fetch(index: int = index, results: list[bool] = results) -> None:
                results.append(two.session.fetch(first.id, index, _SHORT / 3))

            two.run(*[fetch] * _THREADS)
            if sum(results) != 1:
                raise OFFERS.violation(f"of {_THREADS} threads, {sum(results)} fetched one block")

    def _check_end(self, first: _PeerEngine, two: _PeerEngine) -> None:
        first.session.offer(0, _SHORT)
        first.session.offer(1, _LONG)
        time.sleep(2 * _SHORT)
        if two.session.fetch(first.id, 0, _SHORT):
            raise LEASES.violation(
                f"a block that was offered for {_SHORT} s was there after {2 * _SHORT} s"
            )
        if not two.session.fetch(first.id, 1, _LONG):
            raise LEASES.violation(f"a block that was offered for {_LONG} s was not there")

    def _check_renewal(self, first: _PeerEngine, two: _PeerEngine) -> None:
        for index in (0, 1):
            first.session.offer(index, 2 * _SHORT)
        for _ in range(6):
            time.sleep(_SHORT / 2)
            first.session.renew(0)
            two.session.renew(1, first.id)
            for engine, peer in ((first, None), (two, first.id)):
                engine.session.renew(2, peer)  # was not offered
        for index, side in ((0, "offers"), (1, "fetches")):
            if not two.session.fetch(first.id, index, _LONG):
                raise LEASES.violation(f"a block was gone that the engine that {side} it renewed")
        if two.session.fetch(first.id, 2, _SHORT):
            raise LEASES.violation("renew made a block of a key without an offer")

    def _check_early_fetch(self, first: _PeerEngine, two: _PeerEngine) -> None:
        results: list[bool] = []

        def offer() -> None:
            until(lambda: bool(results or two.session.calls), _LONG)  # fetch was called
            time.sleep(_SHORT)
            first.session.offer(0, _LONG)

        two.run(lambda: results.append(two.session.fetch(first.id, 0, 4 * _SHORT)), offer)
        if results != [True]:
            raise WAITS.violation(
                f"a block that was offered {_SHORT} s after the fetch, which had {4 * _SHORT} s, "
                f"was not found"
            )
        self._fetch_in_vain(two, first, "of a block that was never offered")

    def _check_loss(self, first: _PeerEngine, two: _PeerEngine) -> None:
        first.session.offer(0, _LONG)
        if not two.session.fetch(first.id, 0, _LONG):
            raise OFFERS.violation("fetch did not find the offered block")
        first.close()
        self._fetch_in_vain(two, first, "from an engine that has ended")

    def _fetch_in_vain(self, two: _PeerEngine, first: _PeerEngine, reason: str) -> None:
        began = time.monotonic()
        try:
            is_there = two.session.fetch(first.id, 1, _SHORT)
        except Violation as violation:
            if violation.rule != CALLS.text:  # it may raise what its connection raises
                raise
            is_there = False
        seconds = time.monotonic() - began
        if is_there or seconds > _SHORT + _SLACK_SECONDS:
            raise WAITS.violation(
                f"a fetch {reason}, which had {_SHORT} s, returned {is_there} after {seconds:.1f} s"
            )


class _PeerSession(StoreSession):
    """Calls a store and checks its results; offered blocks are separate from stored blocks."""

    def __init__(
        self,
        store: PeerKVStore,
        sizes: Sequence[int],
        blocks: StoredBlocks,
        offered: StoredBlocks,
        seconds: float,
    ) -> None:
        """Use a store.

        Args:
            store: an open one.
            sizes: sizes of the parts of its buffers.
            offered: offers of the engines, under the same keys.
        """
        super().__init__(store, sizes, blocks, seconds)
        self._peer_store = store
        self._offered = offered

    @property
    def peers(self) -> Any:
        return self._peer_store.peers

    def offer(self, index: int, seconds: float) -> bool:
        def offer(key: bytes, buffer: BlockBuffer) -> Any:
            return self._peer_store.offer(key, buffer, seconds)

        self._offered.begin(index, 0)
        return self._send("offer", offer, index, 0)

    def fetch(self, peer: str, index: int, seconds: float) -> bool:
        def fetch(key: bytes, buffer: BlockBuffer) -> Any:
            return self._peer_store.fetch(peer, key, buffer, seconds)

        return self._receive("fetch", fetch, index, self._offered)

    def renew(self, index: int, peer: str | None = None) -> None:
        with self.calling(f"renew of key {index}"):
            self._peer_store.renew([self._blocks.keys[index]], peer)


class _PeerEngine(Place):
    """The store of one engine."""

    id: str
    offered: StoredBlocks
    session: _PeerSession
    is_open = False

    def open(self) -> None:
        super().open()
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        super().close()

    def _session(self, store: KVStore) -> _PeerSession:
        assert isinstance(store, PeerKVStore)
        return _PeerSession(store, self._sizes, self.blocks, self.offered, self._seconds)
