"""The conformance suite for KV event publishers; the built-in ones pass it too."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from hardpoint.plugins import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    PublisherContext,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.kv_cache import KVEvent
from hardpoint.testing.component_suite import GeneralComponentSuite
from hardpoint.testing.suite import Rule, checks, short_repr
from hardpoint.typed import read_only

from .calls import (
    CLOSE,
    MEMORY,
    READS_ONLY,
    call,
    check_growth,
    longest_call,
    releasing_all,
    too_slow,
)

EVENTS = Rule(
    "events: publish takes every type of event",
    "handle blocks without parent, with an adapter, of any group, of a tier, removed ones, and a "
    "cleared cache, alone and together",
)
DELIVERY = Rule(
    "delivery: a subscriber that keeps up gets every batch, unchanged, once and in order",
    "send batches from one queue, one after the other; a publisher drops only batches that a slow "
    "subscriber leaves in a full queue",
)

_HASHES = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=3)
_GROUPS = st.integers(0, 2)
_TIERS = st.sampled_from([None, "disk", "é"])
_STORED = st.builds(
    lambda hashes, parent, size, lora, group, tier: BlockStored(
        hashes, parent, [] if tier else list(range(size * len(hashes))), size, lora, group, tier
    ),
    _HASHES,
    st.none() | st.binary(min_size=32, max_size=32),
    st.integers(1, 16),
    st.none() | st.sampled_from(["poet", "é"]),
    _GROUPS,
    _TIERS,
)
_EVENTS: st.SearchStrategy[KVEvent] = (
    _STORED | st.builds(BlockRemoved, _HASHES, _GROUPS, _TIERS) | st.just(AllBlocksCleared())
)

_BATCHES = 200
_CALLS = 1000
_FIRST_SECONDS = 5.0  # until a new subscriber gets its first batch
_QUIET_SECONDS = 1.0  # without a batch, after which no more are expected


class _TrackedBatch(KVEventBatch, weakref=True, frozen=True):
    """A batch with a weak reference that detects retention."""


class KVEventPublisherSuite(GeneralComponentSuite):
    """Base class of a test class, which sets `publisher`, and overrides `subscribe`.

    The options have to allow several publishers, one after the other; a replay buffer should hold
    less than 1000 batches.

    Attributes:
        publisher: the class under test.
        budget_us_per_call: maximum microseconds that `publish` takes, waiting included; None
            does not measure.
    """

    kind = "kv_event_publishers"
    publisher: ClassVar[type[KVEventPublisher]]
    budget_us_per_call: ClassVar[float | None] = 5000.0

    def subscribe(
        self,
        publisher: KVEventPublisher,  # noqa: ARG002
    ) -> Callable[[], Iterable[KVEventBatch]] | None:
        """Subscribe; return a function that returns the batches that came since its last call.

        It must not wait. None, the default, leaves out the rule of delivery.
        """
        return None

    def _component(self) -> type[Component]:
        return self.publisher

    def test_events(self) -> None:
        """Events of every type can be published."""
        publisher = self._make()

        def check(events: list[KVEvent]) -> None:
            call(EVENTS, publisher.publish, read_only(KVEventBatch(0.5, events)))

        try:
            self._search(EVENTS.text, 100, check, events=st.lists(_EVENTS, min_size=1, max_size=4))
        finally:
            publisher.close()

    def test_delivery(self) -> None:
        """A subscriber that keeps up gets every batch, unchanged, once and in order. Skipped if
        `subscribe` is not overridden.
        """
        if type(self).subscribe is KVEventPublisherSuite.subscribe:
            pytest.skip("subscribe is not overridden: the received batches are not known")
        self._run_checks(DELIVERY.text, self._check_delivery)

    def test_reads_only(self) -> None:
        """The publisher changes nothing that it is given."""
        self._run_checks(READS_ONLY.text, lambda: self._use(self._make()))

    @checks(MEMORY)
    def test_memory(self) -> None:
        """Nothing grows with the number of batches."""
        known = set(threading.enumerate())
        publisher = self._make()

        def use(number: int) -> list[weakref.ref[Any]]:
            batch = read_only(_batch(number))
            publisher.publish(batch)
            return [weakref.ref(batch)]

        try:
            check_growth(publisher, use, _CALLS, known)
        finally:
            publisher.close()

    def test_close(self) -> None:
        """`close` releases threads and sockets; a second one does no harm."""
        self._run_checks(CLOSE.text, lambda: self._use(self._make()), self._check_close)

    def test_speed(self) -> None:
        """`publish` stays within the budget, without a subscriber and with a subscriber that does
        not read.
        """
        if self.budget_us_per_call is None:
            pytest.skip("budget_us_per_call is None")
        self._run_checks("speed: publish takes no longer than its budget", self._check_speed)

    def _make(self) -> KVEventPublisher:
        publisher: KVEventPublisher = self._build(PublisherContext)
        return publisher

    def _use_once(self, component: Any, number: int) -> object:
        return component.publish(read_only(_batch(number)))

    def _use(self, publisher: KVEventPublisher) -> None:
        call(EVENTS, publisher.publish, read_only(_batch(0)))
        call(CLOSE, publisher.close)

    def _check_delivery(self) -> None:
        publisher = self._make()
        try:
            received = self.subscribe(publisher)
            assert received is not None
            self._check_order(publisher, received)
        finally:
            publisher.close()

    def _check_order(
        self, publisher: KVEventPublisher, received: Callable[[], Iterable[KVEventBatch]]
    ) -> None:
        end = time.monotonic() + _FIRST_SECONDS
        while not list(received()):  # a new subscriber may miss the first ones
            if time.monotonic() > end:
                raise DELIVERY.violation(
                    f"nothing came within {_FIRST_SECONDS:g} s of batches",
                    "connect in subscribe() to where this very publisher sends, and read without "
                    "waiting",
                )
            publisher.publish(read_only(_batch(-1)))
            time.sleep(0.01)
        sent = [_batch(number) for number in range(_BATCHES)]
        for batch in sent:
            publisher.publish(read_only(batch))
        batches: list[KVEventBatch] = []
        end = time.monotonic() + _QUIET_SECONDS
        while len(batches) < len(sent) and time.monotonic() < end:
            if new := [batch for batch in received() if batch.timestamp >= 0]:
                batches += new
                end = time.monotonic() + _QUIET_SECONDS
            else:
                time.sleep(0.005)
        self._compare(sent, batches)

    def _compare(self, sent: Sequence[KVEventBatch], received: Sequence[KVEventBatch]) -> None:
        numbers = [int(batch.timestamp) for batch in received]
        count = Counter(numbers)
        if twice := [number for number, times in count.items() if times > 1]:
            raise DELIVERY.violation(f"batch number {twice[0]} came {count[twice[0]]} times")
        if lost := [number for number in range(len(sent)) if number not in count]:
            raise DELIVERY.violation(
                f"of {len(sent)} batches {len(lost)} did not come, the first is number {lost[0]}"
            )
        for place, (number, batch) in enumerate(zip(numbers, received, strict=True)):
            if number != place:
                raise DELIVERY.violation(f"batch number {number} came in place {place}")
            plain = KVEventBatch(batch.timestamp, batch.events, batch.data_parallel_rank)
            expected = sent[place]
            if plain != KVEventBatch(expected.timestamp, expected.events):
                raise DELIVERY.violation(
                    f"the batch {short_repr(expected)} came as {short_repr(batch)}"
                )

    def _check_close(self) -> None:
        with releasing_all():
            publisher = self._make()
            publisher.publish(read_only(_batch(0)))
            publisher.close()
        call(CLOSE, publisher.close)
        call(CLOSE, self._make().close)  # the options are free again; it got nothing

    def _check_speed(self) -> None:
        publisher, budget = self._make(), self.budget_us_per_call or 0.0
        batch = read_only(_batch(0))
        try:
            for subscribed in (False, True):
                # The subscriber never reads.
                keep = self.subscribe(publisher) if subscribed else None
                seconds = longest_call(lambda: publisher.publish(batch), budget / 1e6)
                del keep
                if seconds > budget / 1e6:
                    raise too_slow("publish", seconds, budget)
        finally:
            publisher.close()


def _batch(number: int) -> KVEventBatch:
    block_hash = abs(number).to_bytes(32, "big")
    stored = BlockStored([block_hash], None, [number % 7, 1, 2, 3], 4)
    return _TrackedBatch(float(number), [stored, BlockRemoved([block_hash])])
