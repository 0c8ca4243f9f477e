"""Reports of tiers: KV events of known blocks, and sizes."""

from __future__ import annotations

import threading

import pytest

from hardpoint.builtin_plugins.kv_connectors.events import TierEvents
from hardpoint.builtin_plugins.kv_connectors.staging import HEADER_BYTES, Buffer, write_header
from hardpoint.builtin_plugins.kv_connectors.tiers import CircuitBreaker, Tier
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.plugins import BlockRemoved, BlockStored, KVStoreContext


class RecordedTiers:
    """The events that were published."""

    def __init__(self, most_blocks=100):
        self._published = []
        self.events = TierEvents(self._published.append, 16, most_blocks=most_blocks)

    def know(self, names):
        for name in names:
            self.events.know(name.encode() * 2, name.encode())

    def stored(self, tier, names):
        for name in names:
            self.events.stored(tier, name.encode() * 2)

    def removed(self, tier, names):
        self.events.removed(tier, [name.encode() * 2 for name in names])

    def published(self):
        self.events.flush()
        published, self._published[:] = list(self._published), []
        return published


def stored(tier, names):
    return BlockStored([name.encode() for name in names], None, [], 16, medium=tier)


def removed(tier, names):
    return BlockRemoved([name.encode() for name in names], medium=tier)


def test_what_is_stored_and_dropped_is_published_once_and_in_order():
    recorded = RecordedTiers()
    recorded.know("abc")
    recorded.stored("memory", "ab")
    recorded.stored("disk", "a")
    recorded.stored("memory", "ab")  # again
    recorded.removed("memory", "ac")
    recorded.stored("memory", "ca")
    assert recorded.published() == [
        stored("memory", "ab"),
        stored("disk", "a"),
        removed("memory", "a"),
        stored("memory", "ca"),
    ]
    assert recorded.published() == []


def test_unknown_keys_are_left_out():
    recorded = RecordedTiers()
    recorded.know("a")
    recorded.stored("disk", "xa")
    recorded.removed("disk", "y")
    assert recorded.published() == [stored("disk", "a")]


def test_a_block_that_is_forgotten_is_removed_everywhere_and_can_come_again():
    recorded = RecordedTiers(most_blocks=2)
    recorded.know("ab")
    recorded.stored("memory", "ab")
    recorded.stored("disk", "a")
    recorded.know("a")  # is used again, so b is the oldest
    recorded.know("c")
    assert recorded.published() == [
        stored("memory", "ab"),
        stored("disk", "a"),
        removed("memory", "b"),
    ]
    recorded.removed("memory", "b")
    recorded.know("b")
    recorded.stored("memory", "b")
    assert recorded.published() == [
        *[removed("memory", "a"), removed("disk", "a")],
        stored("memory", "b"),
    ]


@pytest.mark.parametrize("most_blocks", [8, 1000])
def test_threads_do_not_disturb_each_other(most_blocks):
    recorded = RecordedTiers(most_blocks)
    names = [chr(0x4E00 + number) for number in range(200)]

    def work(part):
        for name in names[part::4]:
            recorded.know(name)
            recorded.stored("disk", name)
            if ord(name) % 3 == 0:
                recorded.removed("disk", name)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = set()
    for event in recorded.published():
        hashes = set(event.block_hashes)
        assert len(hashes) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not stored & hashes
            stored |= hashes
        else:
            assert hashes <= stored
            stored -= hashes
    assert len(stored) <= most_blocks
    if most_blocks == 1000:
        assert stored == {name.encode() for name in names if ord(name) % 3}


# The size that a store reports


class Sized(MemoryStore):
    """Reports sizes set by a test."""

    answer = None

    @property
    def used_bytes(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "shown", "message"),
    [
        (700, 700, None),
        (None, None, None),
        (-1, None, "used_bytes() gave -1, expected bytes >= 0 or None"),
        ("much", None, "used_bytes() gave 'much', expected bytes >= 0 or None"),
        (OSError("gone"), None, "used_bytes() failed: OSError: gone"),
    ],
)
def test_a_store_may_report_its_size_and_a_wrong_one_is_a_fault_alone(answer, shown, message):
    buffer = Buffer((8,), pin_memory=False)
    write_header(buffer.views, bytes(32), 1)
    sizes = (HEADER_BYTES, 8)
    store = Sized(KVStoreContext(name="m", sizes=sizes, identity="", options=Sized.Options()))
    store.answer, faults = answer, []
    tier = Tier(store, CircuitBreaker(9, 1.0), 5.0, lambda *fault: faults.append(fault))
    assert tier.keep(bytes(32), buffer.views)
    totals = tier.totals()
    assert (totals.stored_blocks, totals.used_bytes) == (1, shown)
    assert faults == ([("m", f"KV store 'm': {message}")] if message else [])
    assert totals.failures == len(faults)
    store.close()
