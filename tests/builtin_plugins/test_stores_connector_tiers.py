"""Stores behind their guard: whatever they do, callers get an answer in time, and the right one."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from support.builtins.kv_store_fakes import ScriptedStore
from support.kv_stores import scripted_clock
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_connectors.staging import HEADER_BYTES, Buffer, write_header
from hardpoint.builtin_plugins.kv_connectors.tiers import CircuitBreaker, Tier, Tiers
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore

KEY, OTHER = bytes(32), bytes([1]) * 32
LAYERS = (8, 24)
SIZES = (HEADER_BYTES, *LAYERS)


class Guarded:
    """A tier, its store, and the faults that it reported."""

    def __init__(self, name="memory", timeout=60.0, failures=3, seconds=60.0):
        self.store = ScriptedStore(SIZES, name)
        self.faults = []
        breaker = CircuitBreaker(failures, seconds)
        self.tier = Tier(self.store, breaker, timeout, lambda *fault: self.faults.append(fault))

    @property
    def stats(self):
        return self.tier.totals()


def raising(error):
    def run(*_args):
        raise error

    return run


class Unreadable:
    """Neither its truth nor its text can be had."""

    def __bool__(self):
        raise ValueError("neither true nor false")

    def __repr__(self):
        raise RuntimeError


def block(key=KEY, fill=5):
    buffer = Buffer(LAYERS, pin_memory=False)
    for layer in buffer.layers:
        layer[:] = fill
    write_header(buffer.views, key, 1)
    return buffer


def empty():
    buffer = Buffer(LAYERS, pin_memory=False)
    buffer.views.whole[:] = bytes(len(buffer.views.whole))
    return buffer


def contents(buffer):
    return [set(layer.tolist()) for layer in buffer.layers]


@pytest.fixture
def clock(monkeypatch):
    return scripted_clock(monkeypatch, "kv_connectors.tiers")


# One store


def test_round_trip_is_counted():
    guarded = Guarded()
    assert guarded.tier.lookup([KEY]) == [False]
    assert guarded.tier.keep(KEY, block().views)
    assert guarded.tier.lookup([KEY, OTHER]) == [True, False]
    buffer = empty()
    assert guarded.tier.load(KEY, buffer.views)
    assert contents(buffer) == [{5}, {5}]
    assert not guarded.tier.load(OTHER, buffer.views)
    stats = guarded.stats
    assert (stats.hits, stats.misses, stats.failures, stats.dropped_blocks) == (1, 2, 0, 0)
    assert (stats.loaded_blocks, stats.stored_blocks) == (1, 1)
    assert stats.loaded_bytes == stats.stored_bytes == sum(SIZES)
    assert stats.load_seconds > 0
    assert stats.store_seconds > 0
    assert not guarded.faults


ERRORS = [OSError("no disk"), SystemExit(3), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("method", ["lookup", "store", "load"])
def test_a_method_that_raises_is_a_miss(method, error):
    guarded = Guarded()
    guarded.tier.keep(KEY, block().views)
    guarded.store.instead[method] = raising(error)
    assert guarded.tier.lookup([KEY]) == [method != "lookup"]
    assert guarded.tier.keep(OTHER, block(OTHER).views) == (method != "store")
    assert guarded.tier.load(KEY, empty().views) == (method != "load")
    assert guarded.stats.failures == 1
    ((name, message),) = guarded.faults
    assert name == "memory"
    assert message.startswith(f"KV store 'memory': {method}() failed: {type(error).__name__}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "None for 2 keys"),
        ([True], "[True] for 2 keys"),
        ([True] * 3, "[True, True, True] for 2 keys"),
        (iter([True, True]), "iterator"),
        (Unreadable(), "a Unreadable for 2 keys"),
        ([Unreadable(), True], "neither true nor false"),
    ],
)
def test_answers_of_lookup_that_make_no_sense(answer, expected):
    guarded = Guarded()
    guarded.store.instead["lookup"] = lambda _keys: answer
    assert guarded.tier.lookup([KEY, OTHER]) == [False, False]
    assert guarded.stats.failures == 1
    assert expected in guarded.faults[0][1]


@pytest.mark.parametrize("method", ["store", "load"])
def test_answers_that_are_neither_true_nor_false(method):
    guarded = Guarded()
    guarded.store.instead[method] = lambda *_: Unreadable()
    assert guarded.tier.keep(KEY, block().views) == (method != "store")
    assert not guarded.tier.load(KEY, empty().views)
    assert "neither true nor false" in guarded.faults[0][1]


def test_a_store_that_reports_a_load_and_has_not_loaded():
    """Even though its buffer holds the very block, from before."""
    guarded = Guarded()
    guarded.tier.keep(KEY, block().views)
    assert guarded.tier.load(KEY, empty().views)
    guarded.store.instead["load"] = lambda *_: True
    assert not guarded.tier.load(KEY, block().views)
    assert "load() gave a block that cannot be used: its checksum is wrong" in guarded.faults[0][1]


def test_damaged_and_foreign_blocks_are_misses():
    guarded = Guarded()
    guarded.tier.keep(KEY, block().views)

    def foreign(_key, buffer):
        return MemoryStore.load(guarded.store, KEY, buffer)

    def damaged(key, buffer):
        is_loaded = MemoryStore.load(guarded.store, key, buffer)
        buffer[2][23] ^= 128
        return is_loaded

    guarded.store.instead["load"] = foreign
    assert not guarded.tier.load(OTHER, empty().views)
    assert "the block of another key" in guarded.faults[-1][1]
    guarded.store.instead["load"] = damaged
    assert not guarded.tier.load(KEY, empty().views)
    assert "its checksum is wrong" in guarded.faults[-1][1]
    assert (guarded.stats.failures, guarded.stats.loaded_blocks) == (2, 0)


def test_a_store_cannot_write_to_what_it_stores():
    guarded, buffer = Guarded(), block()

    def store(_key, parts):
        parts[1][0] = 9
        return True

    guarded.store.instead["store"] = store
    assert not guarded.tier.keep(KEY, buffer.views)
    assert "cannot modify read-only memory" in guarded.faults[0][1]
    assert contents(buffer) == [{5}, {5}]


def test_blocks_without_room_are_counted():
    guarded = Guarded()
    guarded.store.instead["store"] = lambda *_: False
    assert not guarded.tier.keep(KEY, block().views)
    assert guarded.stats.dropped_blocks == 1
    assert not guarded.faults


# Time


def test_a_call_that_takes_too_long_has_failed(clock):
    guarded = Guarded(timeout=10.0)

    def load(key, buffer):
        clock.advance(10.1)
        return MemoryStore.load(guarded.store, key, buffer)

    guarded.tier.keep(KEY, block().views)
    guarded.store.instead["load"] = load
    assert not guarded.tier.load(KEY, empty().views)
    assert "load() took 10.1 s, more than 10 s" in guarded.faults[0][1]


def test_while_a_call_does_not_return_no_other_is_made(clock):
    guarded, hold = Guarded(timeout=10.0, failures=100), threading.Event()
    guarded.store.instead["load"] = lambda *_: hold.wait(60.0)
    thread = threading.Thread(target=guarded.tier.load, args=(KEY, empty().views))
    thread.start()
    wait_until(lambda: guarded.store.calls)
    clock.advance(10.1)
    guarded.store.calls.clear()
    assert guarded.tier.lookup([KEY]) == [False]
    assert not guarded.tier.keep(KEY, block().views)
    assert guarded.store.calls == []
    assert "a call has not returned for 10 s" in guarded.faults[0][1]
    hold.set()
    thread.join()
    assert guarded.tier.keep(KEY, block().views)
    assert guarded.tier.lookup([KEY]) == [True]


def test_futures():
    guarded, future = Guarded(), Future()
    guarded.store.instead["store"] = lambda *_: future
    threading.Timer(0.01, future.set_result, [True]).start()
    assert guarded.tier.keep(KEY, block().views)
    failed = Future()
    failed.set_exception(OSError("later"))
    guarded.store.instead["load"] = lambda *_: failed
    assert not guarded.tier.load(KEY, empty().views)
    assert "load() failed: OSError: later" in guarded.faults[0][1]
    cancelled = Future()
    cancelled.cancel()
    guarded.store.instead["load"] = lambda *_: cancelled
    assert not guarded.tier.load(KEY, empty().views)
    assert "load() failed: concurrent.futures._base.CancelledError" in guarded.faults[1][1]


def test_a_buffer_is_in_use_until_its_late_future_is_done():
    guarded, future, buffer, freed = Guarded(timeout=0.01), Future(), empty(), []
    guarded.store.instead["store"] = lambda *_: future
    tiers = Tiers([guarded.tier])
    assert not guarded.tier.keep(KEY, buffer.views)
    assert "its future is not done after 0.01 s" in guarded.faults[0][1]
    assert tiers.late_use(buffer.views) is future
    assert tiers.late_use(empty().views) is None
    tiers.when_free(buffer.views, lambda: freed.append(1))
    assert not freed
    future.set_result(True)
    assert freed == [1]
    assert tiers.late_use(buffer.views) is None
    tiers.when_free(buffer.views, lambda: freed.append(2))
    assert freed == [1, 2]


def test_a_store_gets_only_so_many_buffers_that_it_does_not_give_back():
    guarded, futures = Guarded(timeout=0.001, failures=1000), []

    def load(*_):
        futures.append(Future())
        return futures[-1]

    guarded.store.instead["load"] = load
    for _ in range(40):
        assert not guarded.tier.load(KEY, empty().views)
    assert len(futures) == 16
    assert "16 futures that took too long are not done" in guarded.faults[-1][1]
    futures[3].set_result(False)
    assert not guarded.tier.load(KEY, empty().views)
    assert len(futures) == 17


# The circuit breaker


def test_breaker(clock):
    breaker = CircuitBreaker(2, 10.0)
    assert breaker.allows("load")
    assert not breaker.failed("load")
    breaker.succeeded("load")
    assert not breaker.failed("load")
    assert breaker.allows("load")
    assert breaker.failed("load")
    assert not breaker.allows("load")
    assert not breaker.failed("load")  # it was reported already
    clock.advance(10.1)
    assert breaker.allows("load")
    assert not breaker.allows("load")  # one call tries
    breaker.succeeded("load")
    assert breaker.allows("load")
    assert breaker.allows("load")


def fails_in(guarded, method):
    """Call a method with an invalid result."""
    if method == "damage":
        guarded.store.instead["load"] = lambda *_: True
        return guarded.tier.load(KEY, empty().views)
    guarded.store.instead[method] = raising(OSError("no disk"))
    calls = {
        "lookup": lambda: any(guarded.tier.lookup([KEY])),
        "load": lambda: guarded.tier.load(KEY, empty().views),
        "store": lambda: guarded.tier.keep(KEY, block().views),
    }
    return calls[method]()


@pytest.mark.parametrize("method", ["lookup", "load", "store", "damage"])
def test_a_store_that_keeps_failing_is_left_out_for_a_while(method, clock):
    guarded = Guarded(failures=3, seconds=10.0)
    for _ in range(3):
        assert not fails_in(guarded, method)
    assert "left out for a while" in guarded.faults[-1][1]
    count = len(guarded.store.calls)
    guarded.store.instead.clear()
    assert not guarded.tier.keep(KEY, block().views)
    assert guarded.tier.lookup([KEY]) == [False]
    assert len(guarded.store.calls) == count == 3
    clock.advance(10.1)
    assert guarded.tier.keep(KEY, block().views)
    assert guarded.tier.load(KEY, empty().views)


def test_a_store_whose_loads_fail_is_left_out_though_its_lookups_work(clock):
    breaker = CircuitBreaker(2, 10.0)
    for _ in range(2):
        assert breaker.allows("lookup")
        breaker.succeeded("lookup")
        assert breaker.allows("load")
        breaker.failed("load")
    assert not breaker.allows("lookup")
    clock.advance(10.1)
    assert breaker.allows("lookup")
    breaker.succeeded("lookup")
    assert breaker.allows("lookup")  # what it finds has to be loaded for the store to come back
    assert breaker.allows("load")
    assert not breaker.allows("load")  # one call tries
    breaker.succeeded("load")
    assert breaker.allows("load")


def test_failures_that_are_not_in_a_row():
    guarded = Guarded(failures=3)
    guarded.tier.keep(KEY, block().views)
    for _ in range(10):
        fails_in(guarded, "load")
        guarded.store.instead.clear()
        assert guarded.tier.load(KEY, empty().views)
    assert guarded.stats.failures == 10


def test_a_store_that_is_left_out_is_closed_all_the_same(caplog):
    guarded = Guarded(failures=1)
    fails_in(guarded, "lookup")
    assert not guarded.tier.keep(KEY, block().views)
    guarded.store.instead["drain"] = raising(OSError("gone"))
    guarded.tier.end("drain")
    guarded.tier.end("close")
    assert guarded.store.calls == ["lookup", "drain", "close"]
    assert "KV store 'memory': drain() failed: OSError: gone" in caplog.text


# Several stores


@pytest.fixture
def two():
    near, far = Guarded("near"), Guarded("far")
    return near, far, Tiers([near.tier, far.tier])


def test_lookup_joins_what_stores_have(two):
    near, far, tiers = two
    keys = [bytes([index]) * 32 for index in range(5)]
    for index, guarded in ((0, far), (1, near), (2, far), (4, near)):
        guarded.tier.keep(keys[index], block(keys[index]).views)
    assert tiers.lookup(keys) == 3
    assert tiers.lookup(keys[3:]) == 0
    assert tiers.lookup(keys[1:3]) == 2
    assert tiers.lookup([]) == 0


def test_a_later_store_is_asked_only_for_what_is_missing(two):
    near, far, tiers = two
    near.tier.keep(KEY, block().views)
    assert tiers.lookup([KEY]) == 1
    assert far.store.calls == []
    assert tiers.lookup([KEY, OTHER]) == 1
    assert (far.stats.hits, far.stats.misses) == (0, 1)


def test_blocks_move_to_the_nearest_store(two):
    near, far, tiers = two
    far.tier.keep(KEY, block().views)
    buffer = empty()
    assert tiers.load(KEY, buffer.views)
    assert contents(buffer) == [{5}, {5}]
    assert near.tier.lookup([KEY]) == [True]
    far.store.calls.clear()
    assert tiers.load(KEY, empty().views)
    assert far.store.calls == []


def test_a_damaged_block_is_loaded_from_the_next_store_and_repaired(two):
    near, far, tiers = two
    broken = block()
    broken.layers[1][3] = 6
    near.tier.keep(KEY, broken.views)
    far.tier.keep(KEY, block().views)
    buffer = empty()
    assert tiers.load(KEY, buffer.views)
    assert contents(buffer) == [{5}, {5}]
    assert (near.stats.failures, near.stats.loaded_blocks) == (1, 0)
    assert near.tier.load(KEY, empty().views)


@pytest.mark.usefixtures("clock")  # only the future is late
@pytest.mark.parametrize("answer", ["late", "raises", "false", "true"])
def test_what_a_store_writes_late_is_not_loaded(answer):
    """Into the memory that it got, after it has answered."""
    near, far = Guarded("near", timeout=0.01), Guarded("far")
    tiers, future, rooms = Tiers([near.tier, far.tier]), Future(), []
    far.tier.keep(KEY, block().views)

    def load(_key, room):
        rooms.append(room)
        if answer == "raises":
            raise OSError("given up")
        if answer == "true":
            return MemoryStore.load(far.store, KEY, room)
        return future if answer == "late" else False

    near.store.instead["load"] = load
    buffer = empty()
    assert tiers.load(KEY, buffer.views)
    rooms[0].whole[:] = bytes(len(rooms[0].whole))
    assert contents(buffer) == [{5}, {5}]
    again = empty()
    near.store.instead.clear()
    near.tier.keep(KEY, block().views)
    assert near.tier.load(KEY, again.views)
    if answer in ("late", "raises"):  # its memory is not used again
        rooms[0].whole[:] = bytes(len(rooms[0].whole))
    assert contents(again) == [{5}, {5}]


def test_blocks_are_distinguished_by_generation(two):
    _, _, tiers = two
    a, b = block(), block()
    tiers.begin(KEY, a.views)
    tiers.begin(KEY, b.views)
    assert bytes(a.views[0]) != bytes(b.views[0])
