"""The worker half of the connector "stores": which bytes go where, and when it reports them."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from support.builtins.kv_store_fakes import NUM_BLOCKS, identity, opened
from support.kv_stores import scripted_clock
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_connectors.jobs import BlockLoad, Jobs, Lookup, Save
from hardpoint.builtin_plugins.kv_connectors.staging import Buffer, BufferPool, CacheBlocks
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.plugins import ConfigError


def hashes(*numbers):
    return [bytes([number]) * 32 for number in numbers]


SAVED = (3, 1, 7)


@pytest.fixture(params=[1, 2, 4], ids=lambda groups: f"{groups} groups")
def groups(request):
    return request.param


@pytest.fixture
def rank(groups):
    with opened(layers=4, layer_groups=groups) as rank:
        yield rank


@pytest.fixture
def saved(rank, groups):
    """A rank with blocks 3, 1 and 7 stored under the hashes 0, 1 and 2; by block."""
    before = {block: rank.content(block) for block in range(NUM_BLOCKS)}
    rank.until_saved(Save(hashes(0, 1, 2), list(SAVED)), stores=groups)
    return before


def test_what_was_saved_is_loaded(rank, saved, groups):
    others = {block: rank.content(block) for block in range(NUM_BLOCKS)}
    errors = rank.until_loaded(BlockLoad("a", hashes(2, 0, 1), [10, 11, 12]))
    assert errors == set()
    assert [rank.content(block) for block in (10, 11, 12)] == [saved[b] for b in (7, 3, 1)]
    for block in set(range(NUM_BLOCKS)) - {10, 11, 12}:
        assert rank.content(block) == others[block]
    totals = rank.totals["memory"]
    assert totals.loaded_blocks == totals.stored_blocks == 3 * groups
    assert totals.failures == totals.dropped_blocks == 0
    assert not rank.faults


def test_sizes_of_buffers(rank, groups):
    assert rank.sizes == (128,) + (48,) * (4 // groups)


def test_lookup_counts_leading_blocks(rank, saved):
    rank.step(Lookup(5, hashes(0, 1, 2)), Lookup(6, hashes(1, 9, 2)), Lookup(7, hashes(9)))
    counts = {}
    while len(counts) < 3:
        counts |= rank.answers().found
    assert counts == {5: 3, 6: 1, 7: 0}


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_blocks_from_the_first_that_is_missing_on_are_reported(rank, saved, missing):
    wanted = hashes(0, 1, 2)
    wanted[missing] = hashes(9)[0]
    errors = rank.until_loaded(BlockLoad("a", wanted, [10, 11, 12]))
    assert errors == set(range(10 + missing, 13))
    for index in range(missing):
        assert rank.content(10 + index) == saved[SAVED[index]]


def test_parts_that_are_missing_make_the_block_missing(saved, rank, groups):
    """A block with one part dropped by a store."""
    lost = []

    def load(key, buffer):
        lost.append(key)
        return len(lost) != groups and MemoryStore.load(rank.store, key, buffer)

    rank.store.instead["load"] = load
    assert rank.until_loaded(BlockLoad("a", hashes(0), [10])) == {10}


def test_blocks_are_saved_as_they_are_in_their_step(rank, saved, groups):
    """The next step may overwrite them at once."""
    hold = threading.Event()
    rank.store.instead["store"] = lambda key, buffer: (
        hold.wait(60.0) and MemoryStore.store(rank.store, key, buffer)
    )
    rank.step(Save(hashes(4), [20]))
    rank.wipe()
    hold.set()
    wait_until(lambda: rank.kept == 4 * groups)
    assert rank.until_loaded(BlockLoad("a", hashes(4), [21])) == set()
    assert rank.content(21) == saved[20]


def test_layers_are_saved_as_they_are_computed():
    with opened(layers=4, layer_groups=2) as rank:
        before = rank.content(5)
        rank.half.start_load_kv(Jobs(saves=[Save(hashes(0), [5])]))
        assert rank.half.wants_layers
        for layer in range(4):
            rank.half.wait_for_layer_load(layer)
            rank.half.save_kv_layer(layer)
            if layer == 1:  # what is saved later is taken from the cache as it is then
                rank.caches[0][0].zero_()
                rank.caches[3][0].fill_(9)
        rank.half.wait_for_save()
        wait_until(lambda: rank.kept == 2)
        assert rank.until_loaded(BlockLoad("a", hashes(0), [6])) == set()
        after = rank.content(6)
        assert after[:3] == before[:3]
        assert after[3][:32] == bytes([9]) * 32
        assert not rank.half.wants_layers


def test_with_one_group_no_layer_is_waited_for(groups):
    with opened(layers=4) as rank:
        rank.half.start_load_kv(Jobs(saves=[Save(hashes(0), [5])]))
        assert not rank.half.wants_layers
        rank.half.wait_for_save()


def test_groups_that_do_not_divide():
    message = "plugin.stores.layer_groups: 4 layers cannot be divided into 3 equal groups; 1, 2, 4"
    with pytest.raises(ConfigError, match=re.escape(message)), opened(layers=4, layer_groups=3):
        pass


def test_groups_of_layers_of_different_sizes():
    sizes = {"layer_bytes": (48, 48, 96, 48)}
    with (
        pytest.raises(ConfigError, match="layer_groups"),
        opened(layers=4, layer_groups=2, identity_changes=sizes),
    ):
        pass


# Loads that fail, are cancelled or too late


def test_a_cancelled_load_writes_no_more(rank, saved, groups):
    before = {block: rank.content(block) for block in (10, 11)}
    began, hold = threading.Event(), threading.Event()

    def load(key, buffer):
        began.set()
        hold.wait(60.0)
        return MemoryStore.load(rank.store, key, buffer)

    rank.store.instead["load"] = load
    assert rank.step(BlockLoad("a", hashes(0, 1), [10, 11])) == (frozenset(), set())
    assert began.wait(60.0)
    rank.half.cancel_loads(["a", "unknown"])
    assert rank.step() == ({"a"}, {10, 11})
    hold.set()
    wait_until(lambda: rank.totals["memory"].loaded_blocks >= 1)
    assert rank.half.close() is None
    assert {block: rank.content(block) for block in (10, 11)} == before


def test_a_load_that_is_late_is_given_up():
    with opened(load_seconds=0.05) as rank:
        hold = threading.Event()
        rank.store.instead["load"] = lambda *_: hold.wait(60.0)
        errors = rank.until_loaded(BlockLoad("a", hashes(0, 1), [10, 11]))
        assert errors == {10, 11}
        hold.set()


def test_each_load_is_reported_once(rank, saved):
    rank.until_loaded(BlockLoad("a", hashes(0, 9), [10, 11]))
    assert rank.step() == (frozenset(), set())


def test_a_load_that_begins_again(rank, saved):
    """As it does if the plan that began it was lost."""
    hold = threading.Event()
    rank.store.instead["load"] = lambda key, buffer: (
        hold.wait(60.0) and MemoryStore.load(rank.store, key, buffer)
    )
    rank.step(BlockLoad("a", hashes(0), [10]))
    assert rank.step(BlockLoad("a", hashes(1), [11]))[0] == frozenset()
    before = rank.content(10)
    hold.set()
    assert rank.until_loaded(BlockLoad("b", hashes(2), [12])) == set()
    wait_until(lambda: rank.content(11) == saved[1])
    assert rank.content(10) == before


def test_the_cache_is_released_while_blocks_are_loaded(rank, saved):
    hold = threading.Event()
    rank.store.instead["load"] = lambda key, buffer: (
        hold.wait(60.0) and MemoryStore.load(rank.store, key, buffer)
    )
    rank.step(BlockLoad("a", hashes(0, 1), [10, 11]))
    before = rank.content(10)
    rank.half.release_kv_caches()
    hold.set()
    rank.half.register_kv_caches(rank.caches)
    assert rank.step() == ({"a"}, {10, 11})
    assert rank.content(10) == before
    rank.store.instead.clear()
    assert rank.until_loaded(BlockLoad("a", hashes(0, 1), [10, 11])) == set()


def test_a_load_ends_if_a_thread_fails(rank, saved):
    """As it does if there is no memory for its buffer, or the device fails."""
    rank.half.register_kv_caches([[torch.zeros(1, 1, dtype=torch.uint8)]] * 4)
    assert rank.until_loaded(BlockLoad("a", hashes(0), [10])) == {10}
    wait_until(lambda: rank.faults, what="the fault, which the thread reports after its part")
    assert rank.faults[0][0] == "stores"
    assert "KVLoad: " in rank.faults[0][1]


@pytest.fixture
def only_futures_are_late(monkeypatch):
    """The time of calls stands still; only futures take time."""
    scripted_clock(monkeypatch, "kv_connectors.tiers", "kv_connectors.threads")


@pytest.mark.usefixtures("only_futures_are_late")
def test_what_a_late_future_writes_is_not_used():
    """The store goes on writing into a buffer that it was given, long after its time."""
    with opened(timeout_seconds=0.02, threads=1) as rank:
        rank.until_saved(Save(hashes(0, 1), [3, 4]))
        expected, late = rank.content(4), []

        def load(key, buffer):
            if not late:
                late.append(buffer)
                return Future()
            is_loaded = MemoryStore.load(rank.store, key, buffer)
            late[0][1][:] = b"?" * len(late[0][1])
            return is_loaded

        rank.store.instead["load"] = load
        assert rank.until_loaded(BlockLoad("a", hashes(0), [10])) == {10}
        assert rank.until_loaded(BlockLoad("b", hashes(1), [11])) == set()
        assert rank.content(11) == expected


@pytest.mark.usefixtures("only_futures_are_late")
def test_what_a_late_future_reads_is_not_overwritten():
    """The store goes on reading a buffer after its time; it is not used for another block."""
    room = 128 + 2 * 48
    with opened(timeout_seconds=0.02, save_bytes=room, save_threads=1) as rank:
        buffers, future = [], Future()

        def store(_key, buffer):
            buffers.append((buffer, bytes(buffer.whole)))
            return future

        rank.store.instead["store"] = store
        rank.until_saved(Save(hashes(0), [3]))
        rank.step(Save(hashes(1), [4]))  # there is no other buffer
        assert rank.dropped == 2
        assert len(buffers) == 1
        assert bytes(buffers[0][0].whole) == buffers[0][1]
        future.set_result(True)
        rank.store.instead.clear()
        rank.until_saved(Save(hashes(1), [4]))
        assert rank.kept == 1


@pytest.mark.usefixtures("only_futures_are_late")
def test_what_a_late_future_copies_to_a_nearer_store_is_not_overwritten():
    with opened("near", "far", timeout_seconds=0.02, threads=1) as rank:
        near, buffers, future = rank.store, [], Future()
        near.instead["store"] = lambda *_: False
        rank.until_saved(Save(hashes(0, 1), [3, 4]), stores=2)

        def store(_key, buffer):
            buffers.append((buffer, bytes(buffer.whole)))
            return future

        near.instead["store"] = store
        for number, block in enumerate((10, 11)):
            assert rank.until_loaded(BlockLoad(f"{number}", hashes(number), [block])) == set()
            assert [bytes(buffer.whole) for buffer, _ in buffers] == [b for _, b in buffers]
        assert len(buffers) == 2
        future.set_result(True)


# Saves that fail


def test_blocks_that_no_store_has_kept_are_named():
    with opened("near", "far") as rank:
        for store in rank.stores:
            store.instead["store"] = lambda *_: False
        rank.step(Save(hashes(0), [3]))
        assert rank.answers().unsaved == hashes(0)
        assert (rank.totals["near"].dropped_blocks, rank.totals["far"].dropped_blocks) == (1, 1)
        del rank.stores[1].instead["store"]
        rank.until_saved(Save(hashes(1), [4]), stores=2)
        assert rank.half.take_message() is None


def test_without_room_blocks_are_not_saved_and_no_step_waits():
    with opened(save_bytes=1, save_threads=1) as rank:
        hold = threading.Event()
        rank.store.instead["store"] = lambda *_: hold.wait(60.0)
        began = time.monotonic()
        rank.step(Save(hashes(0, 1, 2), [3, 4, 5]))
        assert time.monotonic() - began < 30.0
        assert rank.answers().unsaved == hashes(1, 2)
        assert rank.dropped == 2
        hold.set()


def test_a_step_waits_for_room_as_long_as_it_may():
    with opened(save_bytes=1, save_threads=1, save_wait_seconds=0.05) as rank:
        hold = threading.Event()
        rank.store.instead["store"] = lambda *_: hold.wait(60.0)
        began = time.monotonic()
        rank.step(Save(hashes(0, 1, 2), [3, 4, 5]))
        assert 0.05 <= time.monotonic() - began < 30.0  # for all of them together
        assert rank.answers().unsaved == hashes(1, 2)
        hold.set()
    with opened(save_bytes=1, save_wait_seconds=60.0) as rank:
        rank.step(Save(hashes(0, 1, 2), [3, 4, 5]))
        wait_until(lambda: rank.kept == 3)


def test_write_behind():
    """The nearest store has a block before the others get it; then they do."""
    with opened("near", "far", write="behind", save_threads=1) as rank:
        hold = threading.Event()
        far = rank.stores[1]
        far.instead["store"] = lambda key, buffer: (
            hold.wait(60.0) and MemoryStore.store(far, key, buffer)
        )
        rank.step(Save(hashes(0, 1, 2), [3, 4, 5]))
        wait_until(lambda: rank.totals["near"].stored_blocks == 3)
        assert rank.totals["far"].stored_blocks == 0
        hold.set()
        wait_until(lambda: rank.totals["far"].stored_blocks == 3)


def test_close_stores_what_is_to_be_stored():
    with opened("near", "far", write="behind") as rank:
        for store in rank.stores:
            store.instead["store"] = lambda *_: time.sleep(0.01) or True
        rank.step(Save(hashes(*range(9)), list(range(9))))
    assert rank.kept == 18
    assert [store.calls[-2:] for store in rank.stores] == [["drain", "close"]] * 2


def test_close_does_not_wait_for_a_store_that_hangs():
    hold = threading.Event()
    with opened(timeout_seconds=0.05) as rank:
        for method in ("store", "drain", "close"):
            rank.store.instead[method] = lambda *_: hold.wait(60.0)
        rank.step(Save(hashes(0), [3]))
        began = time.monotonic()
    assert time.monotonic() - began < 30.0
    hold.set()


def test_statistics_are_reported_when_they_have_changed(rank, saved):
    assert rank.half.stats() is None  # the fixture has seen them
    rank.step(Lookup(1, hashes(0)))
    rank.answers()
    assert rank.half.stats()["memory"].hits > 0
    assert rank.half.stats() is None


# Keys: only blocks of the same identity meet


CHANGES = [
    {"weights": "v"},
    {"config": "d"},
    {"quantization": "int4"},
    {"architecture": "b"},
    {"dtype": "bfloat16"},
    {"kv_layout": "m"},
    {"kv_layout_version": 2},
    {"block_size": 8},
    {"tensor_rank": 1},
    {"tensor_size": 2},
    {"stage": 1},
    {"num_stages": 2},
    {"hash_algorithm": "blake2b"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_blocks_of_another_identity_are_not_there(change):
    assert identity(**change).digest() != identity().digest()
    with opened() as first:
        first.until_saved(Save(hashes(0), [3]))
        first.store.instead["close"] = lambda: None  # others use it first
        with opened(stores=first.stores, identity_changes=change) as other:
            assert other.until_loaded(BlockLoad("a", hashes(0), [10])) == {10}
        with opened(stores=first.stores) as other:
            assert other.until_loaded(BlockLoad("a", hashes(0), [10])) == set()
        del first.store.instead["close"]


def test_parts_of_other_groups_are_not_there():
    with opened(layers=4, layer_groups=2) as first:
        first.until_saved(Save(hashes(0), [3]), stores=2)
        with opened(layers=4, layer_groups=4, stores=first.stores) as other:
            assert other.until_loaded(BlockLoad("a", hashes(0), [10])) == {10}


# Buffers


def test_views_of_a_buffer_are_its_layers():
    buffer = Buffer([4, 0, 3], pin_memory=False)
    assert [len(view) for view in buffer.views] == [128, 4, 0, 3]
    buffer.views[3][:] = b"abc"
    assert bytes(buffer.layers[2].tolist()) == b"abc"


def test_caches_with_strides():
    """Views of a cache need not be contiguous: keys and values of a block may lie apart."""
    memory = torch.arange(2 * 5 * 6, dtype=torch.uint8).view(2, 5, 6)
    blocks = CacheBlocks([[memory[0], memory[1]], [memory[:, :, :2].transpose(0, 1).flatten(1)]])
    assert blocks.layer_bytes == [12, 4]
    buffer = Buffer([12], pin_memory=False)
    blocks.read(3, range(1), buffer)
    assert bytes(buffer.views[1]) == bytes([*range(18, 24), *range(48, 54)])
    blocks.write(4, range(1), buffer)
    assert memory[1, 4].tolist() == list(range(48, 54))


def test_pool_has_room_for_one_at_least():
    pool = BufferPool([8], 1, pin_memory=False)
    buffer = pool.acquire()
    assert pool.acquire() is None
    pool.release(buffer)
    assert pool.acquire() is buffer


def test_pool_makes_no_more_than_its_limit():
    pool = BufferPool([8], 3 * (128 + 8) + 7, pin_memory=False)
    taken = [pool.acquire() for _ in range(4)]
    assert [buffer is None for buffer in taken] == [False, False, False, True]


def test_pool_waits_for_a_buffer():
    pool = BufferPool([8], 1, pin_memory=False)
    buffer = pool.acquire()
    threading.Timer(0.02, pool.release, [buffer]).start()
    assert pool.acquire(60.0) is buffer
    began = time.monotonic()
    assert pool.acquire(0.02) is None
    assert time.monotonic() - began >= 0.02
