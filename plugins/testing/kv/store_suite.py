"""The conformance suite for KV stores; the built-in ones pass it too."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import ConfigError, KVStore, KVStoreContext
from hardpoint.plugins.component import Component
from hardpoint.testing.component_suite import GeneralComponentSuite, class_under_test
from hardpoint.testing.general.suite import InUse
from hardpoint.testing.pace import cost_of, own_seconds
from hardpoint.testing.reporting.calls import releasing_all
from hardpoint.testing.suite import Rule, Violation, checks

from .storage import temporary_folder
from .store_blocks import make_keys, unusual_keys
from .store_place import Place, store_and_load, switching_often
from .store_session import (
    BORROWED,
    CONTENT,
    KEPT,
    LOOKUP,
    StoreSession,
)

LIMIT = Rule(
    "limit: a store with a size keeps no more than that, and goes on to work",
    "count the kept blocks with their overhead, and drop old blocks before a new one is written",
)
SHARED = Rule(
    "shared: stores of one place serve each other's blocks once they are drained",
    "keep the index next to the blocks, and look there for blocks of other stores",
)
DURABLE = Rule(
    "durable: drained blocks are present after close and in the next process",
    "let drain wait for everything that store has accepted, with its index",
)
REPLACED = Rule(
    "replaced: a block that is stored takes the place of the old one under its key",
    "overwrite the present block, which may be damaged, unless it has the same bytes",
)
DRAIN = Rule(
    "drain: it returns, at any time and more than once",
    "wait only for earlier stores",
)
CLOSE = Rule(
    "close: it releases threads, connections and files",
    "end in close all threads and files of the constructor and of calls",
)
SPEED = Rule(
    "speed: lookup reads no blocks, and costs no more than its budget",
    "look up an index, many keys at once; or set budget_us_per_key",
)

_KEYS = 12  # the default place has room for their blocks, of all sizes, several times
_ABSENT = 4  # of these, under which nothing is stored
_LIMIT = 8
_LATE_SECONDS = 0.05
_LOOKED_UP = 256
_THREADS = 4


@dataclass(frozen=True)
class StoreCall:
    """A step of a history: a method of the store, or `reopen`.

    Attributes:
        method: its name.
        keys: numbers of the keys.
        version: version of the stored block.
    """

    method: str
    keys: tuple[int, ...] = ()
    version: int = 0

    def __repr__(self) -> str:
        parts = [str(key) for key in self.keys]
        if self.method == "store":
            parts.append(f"version={self.version}")
        return f"{self.method}({', '.join(parts)})"


_STORED_KEY = st.integers(0, _KEYS - _ABSENT - 1)
_ANY_KEY = st.integers(0, _KEYS - 1)
_CALLS: st.SearchStrategy[StoreCall] = st.one_of(
    st.builds(StoreCall, st.just("store"), st.tuples(_STORED_KEY), st.integers(0, 2)),
    st.builds(StoreCall, st.just("load"), st.tuples(_ANY_KEY)),
    st.builds(StoreCall, st.just("lookup"), st.lists(_ANY_KEY, max_size=6).map(tuple)),
    st.sampled_from([StoreCall("drain"), StoreCall("reopen")]),
)


class KVStoreSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `store`, and `options` or `place_options`.

    With these options a store has room for 64 blocks of 16 KiB.

    Attributes:
        store: the class under test.
        shared: whether stores of one place, in several ranks or engines, serve each other's
            blocks.
        durable: whether blocks are there when a place is opened again.
        sizes: sizes of the parts of a buffer; several models.
        timeout_seconds: time limit in the context; every call has to return by then.
        budget_us_per_key: time limit of a lookup of 256 keys, per key; None does not measure.
    """

    kind = "kv_stores"
    num_uses = 200
    max_bytes_per_use = 256
    options_from = "the suite's `options`, or the result of place_options,"
    store: ClassVar[type[KVStore]]
    shared: ClassVar[bool] = False
    durable: ClassVar[bool] = False
    sizes: ClassVar[Sequence[Sequence[int]]] = (
        (128, 512, 512),
        (128, 4096, 4096, 4096),
        (128, 1, 1000, 7),
    )
    timeout_seconds: ClassVar[float] = 10.0
    budget_us_per_key: ClassVar[float | None] = 100.0

    def place_options(self, folder: Path) -> Mapping[str, Any]:  # noqa: ARG002
        """Return options, besides `options`, that give a store a place of its own.

        A file store returns `{"path": str(folder)}`, one on a server a prefix with `folder.name`.

        Args:
            folder: private, empty, and deleted after the stores of the place are closed.
        """
        return {}

    def limit_options(self, block_bytes: int, count: int) -> Mapping[str, Any] | None:
        """Return options, besides the others, of a store that keeps so many blocks at most.

        By default this is `size_bytes`, if there is such an option. None leaves the rule out.
        """
        if "size_bytes" not in self._component().Options.__struct_fields__:
            return None
        return {"size_bytes": max(block_bytes * count, 1)}

    def _component(self) -> type[Component]:
        return class_under_test(self, "store", KVStore)

    def _check_construction(self) -> None:
        for sizes in self.sizes:
            with self._place(sizes):
                pass

    def test_content(self) -> None:
        """In any history of calls, `load` returns `True` only with a whole block that was stored
        under this key. It does so for a kept block. `lookup` agrees with `load`, for each key
        up to the first missing one. Nothing raises; no fault is reported.
        """

        def check(sizes: Sequence[int], calls: Sequence[StoreCall]) -> None:
            with self._place(sizes) as place:
                place.run(lambda: self._play(place, calls))

        self._search(
            CONTENT.text,
            100,
            check,
            sizes=st.sampled_from([tuple(sizes) for sizes in self.sizes]),
            calls=st.lists(_CALLS, min_size=1, max_size=30),
        )

    @checks(CONTENT)
    def test_keys(self) -> None:
        """Keys are any 32 bytes, and all of them count: some are not text, and some differ in their
        last bytes, or by case, only.
        """
        keys = unusual_keys()
        with self._place(self.sizes[0], keys) as place:
            session = place.session

            def use() -> None:
                for first in (0, 1):  # of those that are alike
                    for index in range(first, len(keys), 2):
                        session.store(index)
                    for index in range(len(keys)):
                        session.check_lookup([index])

            place.run(use)

    def test_kept(self) -> None:
        """Blocks are kept at all, and all that `store` reported as kept."""
        self._run_checks(KEPT.text, *self._per_size(self._check_kept))

    def test_replaced(self) -> None:
        """A block that is stored replaces the old one under its key, also after a new start."""
        self._run_checks(REPLACED.text, *self._per_size(self._check_replaced))

    def test_lookup(self) -> None:
        """Lookup takes any number of keys, none, the same twice, and answers for each."""
        self._run_checks(LOOKUP.text, *self._per_size(self._check_lookup))

    def test_buffers(self) -> None:
        """A buffer belongs to the store only until the call returns or its future is done: the
        store copies blocks, and writes nothing later or outside of the buffer.
        """
        self._run_checks(BORROWED.text, *self._per_size(self._check_buffers))

    def test_threads(self) -> None:
        """Concurrent calls end, and each load finds one whole block stored under the key."""

        def check(sizes: Sequence[int], seed: int) -> None:
            with self._place(sizes) as place, switching_often():
                self._check_threads(place, seed)

        self._search(
            CONTENT.text,
            10,
            check,
            sizes=st.sampled_from([tuple(sizes) for sizes in self.sizes]),
            seed=st.integers(0, 2**16),
        )

    @checks(CONTENT)
    def test_ranks(self) -> None:
        """Stores of two ranks with the same options, and buffers of other sizes, work at the same
        time. A block of another size is a miss.
        """
        with self._place(self.sizes[0]) as place:
            with place.other(self.sizes[1], make_keys(_KEYS), rank=1) as other:

                def use(session: StoreSession) -> None:
                    for index in range(_KEYS):
                        session.store(index)
                        session.check_lookup([index])
                    for index in range(_KEYS):
                        session.check_kept(index, " after another rank stored blocks, too")

                place.run(lambda: use(place.session), lambda: use(other.session))
                for index in range(_KEYS):  # one of them may have ended before the other began
                    place.session.check_kept(index, " after another rank stored blocks, too")
                    other.session.check_kept(index, " after another rank stored blocks, too")
            place.session.drain()
            self._check_other_size(place)
            for index in range(_KEYS):
                place.session.check_kept(index, " after a store for other sizes was there")

    def test_limit(self) -> None:
        """A full store keeps the blocks that it reports as kept, drops others, and stays below its
        limit; one without room for a single block refuses it, or is refused by a `ConfigError`.
        """
        if self.limit_options(1, 1) is None:
            pytest.skip("limit_options returns None: the store has no limit")
        self._run_checks(LIMIT.text, self._check_limit, self._check_no_room)

    def test_shared(self) -> None:
        """With `shared`: after `drain`, another engine's and another rank's store find a block."""
        if not self.shared:
            pytest.skip("shared is False")
        self._run_checks(SHARED.text, self._check_shared)

    def test_durable(self) -> None:
        """With `durable`: blocks are there after `drain`, `close` and a new start."""
        if not self.durable:
            pytest.skip("durable is False")
        self._run_checks(DURABLE.text, *self._per_size(self._check_durable))

    def test_drain(self) -> None:
        """Drain returns, with nothing to wait for too, and while others call the store."""
        self._run_checks(DRAIN.text, *self._per_size(self._check_drain))

    @checks(CLOSE)
    def test_close(self) -> None:
        """After `close` there are no more threads and open files than before."""

        def use() -> None:
            with self._place(self.sizes[0]) as place:
                session = place.session
                programs = [functools.partial(session.store, number) for number in range(3)]
                place.run(*programs, lambda: [session.load(index) for index in range(3)])
            with self._place(self.sizes[0]):
                pass  # closed at once

        use()  # what stays after the first use may stay
        try:
            with releasing_all():
                use()
        except Violation as violation:
            raise CLOSE.violation(violation.observed) from None

    @contextmanager
    def _in_use(self) -> Iterator[InUse]:
        sizes = self.sizes[-1]
        with self._place_folder() as folder:
            store = self._open(self._place_options(folder), sizes, 0, lambda _: None)
            yield InUse(store, store_and_load(store, sizes, self.timeout_seconds))

    def test_speed(self) -> None:
        """`lookup` keeps its budget."""
        if self.budget_us_per_key is None:
            pytest.skip("budget_us_per_key is None")
        self._run_checks(SPEED.text, self._check_speed)

    def _open(
        self,
        place: Mapping[str, Any],
        sizes: Sequence[int],
        rank: int,
        report_fault: Callable[[str], None],
        engine_id: str = "suite",
    ) -> KVStore:
        store: KVStore = self._build(
            KVStoreContext,
            options=self._checked_options(place),
            sizes=tuple(sizes),
            identity=f"{rank:02x}" * 32,
            rank=rank,
            world_size=2,
            engine_id=engine_id,
            timeout_seconds=self.timeout_seconds,
            report_fault=report_fault,
        )
        return store

    def _checked_options(self, more: Mapping[str, Any] | None = None) -> Any:
        if more is not None:
            return super()._checked_options(more)
        with self._place_folder() as folder:
            return super()._checked_options(self._place_options(folder))

    def _place_options(self, folder: Path) -> Mapping[str, Any]:
        options = self.place_options(folder)
        if not isinstance(options, Mapping):
            raise Violation("place_options returned no mapping", "return a dict of options")
        return options

    @contextmanager
    def _place_folder(self) -> Iterator[Path]:
        with temporary_folder("hardpoint-suite-") as folder:
            place = folder / f"place{folder.name[-8:]}"
            place.mkdir(mode=0o700)
            yield place

    def _per_size(self, check: Callable[[Place], None]) -> Iterator[Callable[[], None]]:
        def in_place(sizes: Sequence[int]) -> None:
            with self._place(sizes) as place:
                place.run(lambda: check(place))

        return (functools.partial(in_place, sizes) for sizes in self.sizes)

    @contextmanager
    def _place(
        self, sizes: Sequence[int], keys: Sequence[bytes] = (), **options: Any
    ) -> Iterator[Place]:
        with self._place_folder() as folder:
            all_options = {**self._place_options(folder), **options}
            open_store = functools.partial(self._open, all_options)
            seconds = self.timeout_seconds
            place = Place(open_store, sizes, keys or make_keys(_KEYS), 0, seconds)
            try:
                place.open()
                yield place
            except BaseException:
                with suppress(Exception):
                    place.close()
                raise
            place.close()

    def _play(self, place: Place, calls: Sequence[StoreCall]) -> None:
        for call in calls:
            session = place.session
            if call.method == "store":
                if session.store(call.keys[0], call.version):
                    session.check_kept(call.keys[0], " right after it")
            elif call.method == "load":
                session.check_kept(call.keys[0])
            elif call.method == "lookup":
                session.check_lookup(call.keys)
            elif call.method == "drain":
                session.drain()
            else:
                place.reopen(durable=self.durable)
        place.session.check_lookup(range(_KEYS))
        for index in range(_KEYS):
            place.session.check_kept(index)

    def _check_kept(self, place: Place) -> None:
        session = place.session
        is_kept = [session.store(index, version) for version in range(2) for index in range(_KEYS)]
        if not any(is_kept):
            raise KEPT.violation(
                f"store returned False for each of {_KEYS} blocks, twice, in a new place",
                "give it options with room for 64 blocks of 16 KiB; keep blocks",
            )
        for index in range(_KEYS):
            session.check_kept(index, " after all were stored")

    def _check_replaced(self, place: Place) -> None:
        present = range(_KEYS - _ABSENT)
        for version in (0, 1, 2, 0):
            replaced = [index for index in present if place.session.store(index, version)]
            for index in replaced:
                self._check_newest(place, index, version)
        place.reopen(durable=self.durable)
        for index in replaced:
            self._check_newest(place, index, version)

    def _check_newest(self, place: Place, index: int, version: int) -> None:
        newest = place.session.version_of(index)
        if newest not in (None, version):
            raise REPLACED.violation(
                f"store reported version {version} of the block of key {index} as kept, and load "
                f"gave version {newest}, which was stored before"
            )

    def _check_lookup(self, place: Place) -> None:
        session = place.session
        for indexes in ([], [0], list(range(_KEYS))):
            session.check_lookup(indexes)  # nothing is there
        for index in range(_KEYS - _ABSENT):
            session.store(index)
        present, absent = list(range(_KEYS - _ABSENT)), list(range(_KEYS - _ABSENT, _KEYS))
        for indexes in ([], present, absent, present + absent, [0, 0, 1, 0], [0, absent[0], 1]):
            session.check_lookup(indexes)
        session.lookup(present * 100)

    def _check_buffers(self, place: Place) -> None:
        session = place.session
        for version in range(2):
            for index in range(_KEYS - _ABSENT):
                session.store(index, version)
            for index in range(_KEYS):
                session.check_kept(index)
        time.sleep(_LATE_SECONDS)
        for index in range(_KEYS):
            session.check_kept(index, f" {_LATE_SECONDS:g} s later")
        session.check_late_writes()

    def _check_threads(self, place: Place, seed: int) -> None:
        """Let threads use few keys, each with a version of its own."""
        session = place.session

        def use(number: int) -> None:
            choose = random.Random(seed + number)
            for _ in range(40):
                method = choose.choice(("store", "load", "load", "lookup"))
                index = choose.randrange(_KEYS - _ABSENT)
                if method == "store":
                    session.store(index, number)
                elif method == "load":
                    session.load(index)
                else:
                    session.lookup([index, 0, 1])

        programs = [functools.partial(use, number) for number in range(_THREADS)]
        place.run(*programs)
        place.run(lambda: session.check_lookup(range(_KEYS)))
        place.run(lambda: [session.check_kept(i, " after threads") for i in range(_KEYS)])

    def _check_other_size(self, place: Place) -> None:
        """Load blocks with buffers of another size: a file may be truncated, or a key wrong."""
        with place.other(self.sizes[1], place.blocks.keys, rank=1) as other:
            for index in range(_KEYS):
                try:
                    is_there = other.session.load(index)
                except Violation as violation:
                    is_there = violation.rule == CONTENT.text
                    if not is_there:
                        raise
                if is_there:
                    raise CONTENT.violation("a block was loaded into a buffer of another size")

    def _check_limit(self) -> None:
        sizes = self.sizes[1]
        limits = self.limit_options(sum(sizes), _LIMIT) or {}
        count = 6 * _LIMIT
        with self._place(sizes, make_keys(count), **limits) as place:
            session = place.session

            def use() -> None:
                for index in [*range(count), *range(0, count, 3)]:
                    if session.store(index):
                        place.blocks.forget()
                        session.check_lookup([index])
                        if not session.load(index):
                            raise KEPT.violation(
                                f"store reported the block of key {index} as kept, and load "
                                f"does not find it right after, in a store that is full"
                            )
                    session.load(index // 2)
                present = sum(session.load(index) for index in range(count))
                if not 0 < present <= _LIMIT:
                    raise LIMIT.violation(
                        f"of {count} blocks {present} are there, and there is room for {_LIMIT}"
                    )

            place.run(use)

    def _check_no_room(self) -> None:
        limits = self.limit_options(sum(self.sizes[1]), 0) or {}
        try:
            with self._place(self.sizes[1], **limits) as place:
                if place.session.store(0) and place.session.load(0):
                    raise LIMIT.violation("a block was kept where there is room for none")
        except ConfigError:
            pass  # its message has more details

    def _check_shared(self) -> None:
        for rank in (0, 1):  # another engine's, and another rank's
            with (
                self._place(self.sizes[0]) as place,
                place.other(self.sizes[0], place.blocks.keys, rank=rank) as other,
            ):
                sessions = (place.session, other.session)
                place.run(functools.partial(self._exchange, *sessions))

    def _exchange(self, first: StoreSession, two: StoreSession) -> None:
        for index in range(_KEYS):
            giver, taker = (first, two) if index % 2 else (two, first)
            is_kept = giver.store(index)
            giver.drain()
            reported = taker.lookup([index])
            if is_kept and not (reported[0] and taker.load(index)):
                raise SHARED.violation(
                    f"one store keeps key {index} and was drained; for the other one, lookup "
                    f"returned {reported} and load did not find it"
                )

    def _check_durable(self, place: Place) -> None:
        for index in range(_KEYS - _ABSENT):
            place.session.store(index)
        place.reopen(durable=True)
        for index in range(_KEYS):
            place.session.check_kept(index, " after drain, close and a new start")
        place.session.check_lookup(range(_KEYS))

    def _check_drain(self, place: Place) -> None:
        session = place.session
        session.drain()
        for index in range(4):
            session.store(index)
        session.drain()
        session.drain()

        def use() -> None:
            for index in range(_KEYS):
                session.store(index)

        place.run(use, session.drain, session.drain)

    def _check_speed(self) -> None:
        budget = self.budget_us_per_key or 0.0
        with self._place(self.sizes[1], make_keys(_LOOKED_UP)) as place:
            for index in range(0, 64):
                place.session.store(index)
            indexes = [index % 64 for index in range(_LOOKED_UP)]

            def measure() -> float:
                began = own_seconds()
                place.session.lookup(indexes)
                return own_seconds() - began

            cost = cost_of(measure, budget * _LOOKED_UP / 1e6, rounds=8) * 1e6 / _LOOKED_UP
        if cost > budget:
            raise SPEED.violation(
                f"in a lookup of {_LOOKED_UP} keys one cost {cost:.0f} microseconds, the budget is "
                f"{budget:.0f}"
            )
