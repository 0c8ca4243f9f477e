from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from support.builtins.disk_harness import (
    SLOT,
    block,
    descriptors,
    has,
    keep,
    kept,
    key,
    open_disk,
    size_for,
)
from support.kv_stores import scripted_clock

from hardpoint.builtin_plugins.kv_stores.disk_files import FileLocks
from hardpoint.testing import ScriptedClock

STORES = "hardpoint.builtin_plugins.kv_stores"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ScriptedClock:
    return scripted_clock(monkeypatch, "kv_stores.disk")


def test_blocks_survive_the_store(path: Path) -> None:
    store = open_disk(path)
    assert not has(store, 1)
    assert store.lookup([]) == []
    assert keep(store, 1)
    assert keep(store, 1)
    assert keep(store, 2)
    assert store.lookup([key(2), key(3), key(1)]) == [True, False, True]
    store.drain()
    store.close()
    again = open_disk(path)
    assert kept(again, range(4)) == [1, 2]
    again.close()


def test_many_blocks_grow_the_slab_and_fill_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{STORES}.disk_slab._GROWTH", 50 * SLOT)
    store = open_disk(path, 1000)
    slab = next(path.glob("blocks-*/slab"))
    assert keep(store, 0)
    assert slab.stat().st_size == 50 * SLOT
    assert all(keep(store, number) for number in range(1, 1500))
    assert slab.stat().st_size == 1000 * SLOT
    # A bucket of the index may be full before the slab is.
    assert len(kept(store, range(500, 1500))) >= 980
    assert len(kept(store, range(1500))) <= 1000
    store.close()


def test_what_was_not_used_for_longest_is_replaced(path: Path) -> None:
    store = open_disk(path, 4)
    for number in range(4):
        assert keep(store, number)
    assert store.lookup([key(0), key(1)]) == [True, True]
    assert keep(store, 4)
    assert keep(store, 5)
    assert kept(store, range(6)) == [0, 1, 4, 5]
    # Of a request's blocks the last go first: they are of no use without those before.
    store.lookup([key(n) for n in (4, 5, 0, 1)])
    assert keep(store, 6)
    assert kept(store, (4, 5, 0, 1, 6)) == [4, 5, 0, 6]
    store.close()


def test_a_load_is_a_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{STORES}.disk._TOUCH_NS", 0)
    store = open_disk(path, 3)
    for number in range(3):
        assert keep(store, number)
    assert has(store, 0)
    assert keep(store, 3)
    assert kept(store, range(4)) == [0, 2, 3]
    store.close()


def test_stores_of_one_path_share_blocks_and_room(path: Path) -> None:
    first, other = open_disk(path, 4), open_disk(path, 4)
    for number in range(4):
        assert keep(first if number % 2 else other, number)
    assert kept(first, range(4)) == kept(other, range(4)) == [0, 1, 2, 3]
    for number in range(4, 8):
        assert keep(first if number % 2 else other, number)
    assert kept(first, range(8)) == kept(other, range(8)) == [4, 5, 6, 7]
    first.close()
    assert kept(other, range(8)) == [4, 5, 6, 7]
    other.close()


def test_threads_of_several_stores_get_what_was_stored(path: Path) -> None:
    stores = [open_disk(path, 16) for _store in range(2)]
    hits = []

    def use(seed: int) -> None:
        generator = random.Random(seed)
        for _turn in range(100):
            store, number = generator.choice(stores), generator.randrange(40)
            if generator.random() < 0.5:
                keep(store, number)
            else:
                hits.append(has(store, number))
            store.lookup([key(n) for n in range(40)])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))
    assert any(hits)
    assert not all(hits)
    last = list(range(100, 116))
    assert all(keep(stores[0], number) for number in last)
    assert kept(stores[1], last) == last
    for store in stores:
        store.close()


def test_blocks_of_several_sizes_share_a_path(path: Path) -> None:
    small, large = open_disk(path), open_disk(path, sizes=(128, 9000))
    assert keep(small, 1)
    assert large.lookup([key(1)]) == [False]
    assert large.store(key(1), block(1, (128, 9000)))
    assert has(small, 1)
    with pytest.raises(ValueError, match="expected a buffer of 9128 bytes, got 7128"):
        keep(large, 2)
    with pytest.raises(ValueError, match="expected a buffer of 9128 bytes, got 7128"):
        has(large, 1)
    small.close()
    large.close()


def test_slabs_that_are_not_in_use_make_room(path: Path) -> None:
    sizes = [(128, 1000 + 10000 * n) for n in range(3)]
    for n, of_size in enumerate(sizes):
        store = open_disk(path, sizes=of_size, size_bytes=16 * SLOT)
        assert store.store(key(1), block(1, of_size))
        store.close()
        lock = path / f"blocks-{sum(of_size)}" / "lock"
        os.utime(lock, (n + 1, n + 1))
    in_use = open_disk(path, sizes=sizes[0], size_bytes=16 * SLOT)
    os.utime(path / f"blocks-{sum(sizes[0])}" / "lock", (1, 1))
    store = open_disk(path, size_bytes=16 * SLOT)
    assert keep(store, 1)
    assert len(list(path.glob("blocks-*"))) == 4, "there is room for all"
    for number in range(2, 17):
        assert keep(store, number)
    left = {folder.name for folder in path.glob("blocks-*")}
    assert left == {f"blocks-{sum(sizes[0])}", "blocks-7128"}
    assert in_use.lookup([key(1)]) == [True]
    in_use.close()
    store.close()


OTHERS = [(128, 3000 + 8 * n, 4000) for n in range(4)]
"""Sizes of blocks of several models, with slots of one size."""


def fill(store, sizes: tuple[int, ...], numbers: range) -> None:
    assert all(store.store(key(number), block(number, sizes)) for number in numbers)


def allocated(path: Path) -> int:
    """Return how much of the disk a path has, without its folders."""
    return sum(file.stat().st_blocks * 512 for file in path.glob("blocks-*/*"))


def test_slabs_that_fit_together_are_kept(path: Path) -> None:
    numbers, counts = range(14), []
    for of in (0, 0, 1, 0, 1):
        store = open_disk(path, 128, sizes=OTHERS[of])
        counts.append(sum(store.lookup([key(number) for number in numbers])))
        fill(store, OTHERS[of], numbers)
        store.close()
    assert counts == [0, 14, 0, 14, 14]


def test_slabs_that_are_in_use_share_the_room(path: Path, clock: ScriptedClock) -> None:
    size, faults, numbers = size_for(128), list[str](), range(130)
    stores = [open_disk(path, 128, faults, sizes) for sizes in OTHERS[:3]]
    for store, sizes in zip(stores, OTHERS[:3], strict=True):
        fill(store, sizes, numbers)
    assert allocated(path) <= size * 1.4, "two more with an eighth each, and indexes"
    there = [store.used_bytes / 8192 for store in stores]
    assert there[0] > 90
    assert all(12 <= blocks <= 16 for blocks in there[1:])
    assert len(faults) == 3
    assert all(
        text.startswith("plugin.disk.path: it has no room for more than ")
        and f" of {size} bytes" in text
        for text in faults
    )
    stores[0].close()
    clock.advance(30.1)
    fill(stores[1], OTHERS[1], range(130, 200))
    assert stores[1].used_bytes / 8192 > 50, "what is not in use makes room"
    assert allocated(path) <= size * 1.1
    for store in stores[1:]:
        store.close()


def test_a_slab_waits_with_growing_while_another_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: ScriptedClock
) -> None:
    monkeypatch.setattr(f"{STORES}.disk_slab._GROW_SECONDS", 0.01)
    faults: list[str] = []
    store = open_disk(path, faults=faults)
    assert keep(store, 1)
    locks = FileLocks(os.open(path / "lock", os.O_RDWR))
    assert locks.try_lock(0)
    assert keep(store, 2), "in the place of the first one"
    assert kept(store, range(4)) == [2]
    locks.close()
    clock.advance(1.1)
    assert keep(store, 3)
    assert kept(store, range(4)) == [2, 3]
    assert faults == []
    store.close()


def test_a_path_that_is_too_large_makes_room_when_it_is_opened(path: Path) -> None:
    for sizes in OTHERS[:2]:
        store = open_disk(path, 128, sizes=sizes)
        fill(store, sizes, range(50))
        store.close()
    (path / "blocks-7777").mkdir(0o700)  # of a process that was killed
    assert len(list(path.glob("blocks-*"))) == 3
    open_disk(path, 64, sizes=OTHERS[1]).close()
    assert [folder.name for folder in path.glob("blocks-*")] == ["blocks-7136"]
    store = open_disk(path, 64, sizes=OTHERS[1])
    assert sum(store.lookup([key(number) for number in range(50)])) >= 48
    store.close()


@pytest.mark.parametrize("blocks", [4, 6, 100])
def test_another_size_keeps_the_blocks_that_fit(path: Path, blocks: int) -> None:
    store = open_disk(path, 8)
    for number in range(8):
        assert keep(store, number)
    store.close()
    store = open_disk(path, blocks)
    assert len(kept(store, range(8))) == min(blocks, 8)
    assert next(path.glob("blocks-*/slab")).stat().st_size <= blocks * SLOT
    more = range(10, 10 + blocks)
    assert all(keep(store, number) for number in more)
    assert len(kept(store, more)) >= 0.9 * blocks
    store.close()


def test_a_full_disk_stops_saving_until_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: ScriptedClock
) -> None:
    monkeypatch.setattr(f"{STORES}.disk_slab._GROWTH", 2 * SLOT)
    allocate, is_full, tries = os.posix_fallocate, True, []

    def allocate_unless_full(descriptor: int, start: int, size: int) -> None:
        tries.append(size)
        if is_full:
            raise OSError(28, "No space left on device")
        allocate(descriptor, start, size)

    faults: list[str] = []
    store = open_disk(path, 4, faults)
    monkeypatch.setattr("os.posix_fallocate", allocate_unless_full)
    assert not any(keep(store, number) for number in range(20))
    assert len(tries) == 1
    clock.advance(30.1)
    assert not keep(store, 1)
    assert len(tries) == 2
    fault = "plugin.disk.path: it has no room for more than 0 blocks: [Errno 28] No space left"
    assert [text[: len(fault)] for text in faults] == [fault]
    is_full = False
    clock.advance(30.1)
    assert keep(store, 1)
    assert keep(store, 2)
    is_full = True
    assert keep(store, 3), "in the place of the first one"
    assert kept(store, range(4)) == [2, 3]
    assert len(faults) == 2
    store.close()


def test_no_room_for_a_block_itself_pauses_saving(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: ScriptedClock
) -> None:
    faults: list[str] = []
    store = open_disk(path, 4, faults)
    assert keep(store, 1)
    write, calls = os.pwritev, []

    def fail(*args: object) -> int:
        calls.append(args)
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("os.pwritev", fail)
    assert not any(keep(store, number) for number in range(2, 10))
    assert len(calls) == 1
    assert faults == ["plugin.disk.path: no block is saved: [Errno 122] Disk quota exceeded"]
    assert kept(store, range(10)) == [1]
    monkeypatch.setattr("os.pwritev", write)
    clock.advance(30.1)
    assert all(keep(store, number) for number in range(2, 5))
    assert kept(store, range(10)) == [1, 2, 3, 4]
    store.close()


def test_an_error_of_the_disk_is_a_fault_of_the_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(path, 4)
    monkeypatch.setattr("os.pwritev", lambda *_args: 0)
    with pytest.raises(OSError, match="the file does not accept more bytes"):
        keep(store, 1)
    monkeypatch.undo()
    assert kept(store, [1]) == []
    assert all(keep(store, number) for number in range(1, 5))
    assert kept(store, range(1, 5)) == [1, 2, 3, 4]
    store.close()


def test_a_block_that_cannot_be_read_is_dropped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted: list[bytes] = []
    store = open_disk(path, 4, report_evicted=evicted.extend)
    assert all(keep(store, number) for number in range(3))

    def fail(*_args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        has(store, 1)
    monkeypatch.undo()
    assert store.lookup([key(1)]) == [False]
    assert evicted == [key(1)]
    assert keep(store, 1), "in another place, since that one may be bad"
    assert store.lookup([key(number) for number in range(3)]) == [True] * 3
    assert kept(store, range(3)) == [0, 1, 2]
    store.close()


def test_a_block_replaces_the_old_one_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted: list[bytes] = []
    store, other = open_disk(path, 4, report_evicted=evicted.extend), open_disk(path, 4)
    assert all(keep(store, number) for number in range(3))
    for turn in range(10):  # without damage that the store itself would see
        assert store.store(key(1), block(50 + turn))
        assert not holds(other, 1, 49 + turn)
        assert holds(other, 1, 50 + turn)
    assert keep(store, 1)
    assert kept(other, range(3)) == [0, 1, 2]
    assert evicted == []
    calls: list[object] = []
    monkeypatch.setattr("os.pwritev", lambda *args: calls.append(args))
    assert keep(store, 1), "it has these bytes already"
    assert calls == []
    monkeypatch.undo()
    store.close()
    other.close()
    again = open_disk(path, 100)  # with a new index
    assert kept(again, range(3)) == [0, 1, 2]
    again.close()


def holds(store, number: int, content: int) -> bool:
    """Whether there is the content of another block under a key."""
    buffer = [memoryview(bytearray(len(part))) for part in block(content)]
    assert store.load(key(number), buffer)
    return [bytes(part) for part in buffer] == [bytes(part) for part in block(content)]


def test_a_block_is_checked_once_and_again_if_it_is_stored_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums: list[object] = []
    begin = xxhash.xxh3_64
    monkeypatch.setattr("xxhash.xxh3_64", lambda: checksums.append(1) or begin())
    faults: list[str] = []
    store = open_disk(path, 4, faults)
    assert keep(store, 1)
    checksums.clear()
    assert all(has(store, 1) for _turn in range(5))
    assert len(checksums) == 1
    with next(path.glob("blocks-*/slab")).open("r+b") as slab:
        slab.write(bytes(10))
    assert not holds(store, 1, 1), "the connector finds this out"
    assert keep(store, 1)
    assert not has(store, 1)
    assert len(faults) == 1
    assert keep(store, 1)
    assert has(store, 1)
    store.close()


def test_what_makes_room_is_reported_and_counted(path: Path) -> None:
    evicted: list[bytes] = []
    store = open_disk(path, 4, report_evicted=evicted.extend)
    assert store.used_bytes == 0
    assert all(keep(store, number) for number in range(3))
    assert store.used_bytes == 3 * 7128
    assert all(keep(store, number) for number in range(3, 10))
    assert evicted == [key(number) for number in range(6)]
    assert store.used_bytes == 4 * 7128
    store.close()
    assert store.used_bytes == 0
    store = open_disk(path, 2)
    assert store.used_bytes == 2 * 7128
    store.close()


def test_a_full_bucket_of_the_index_is_reported(path: Path) -> None:
    evicted: list[bytes] = []
    store = open_disk(path, 1000, report_evicted=evicted.extend)
    assert all(keep(store, number) for number in range(1000))
    left = kept(store, range(1000))
    assert {key(number) for number in range(1000)} - {key(number) for number in left} == set(
        evicted
    )
    assert store.used_bytes == len(left) * 7128
    store.close()


def test_a_larger_store_next_to_a_smaller_one_is_reported(path: Path) -> None:
    faults: list[str] = []
    small, large = open_disk(path, 10, faults), open_disk(path, 1000, faults)
    assert len(faults) == 1
    assert faults[0].startswith(
        f"plugin.disk.size_bytes: there is room for 16 blocks, and not for 1000 as in "
        f"{size_for(1000)} bytes: "
    )
    assert all(keep(large, number) for number in range(100))
    assert len(kept(large, range(100))) <= 16
    small.close()
    large.close()
    open_disk(path, 1000, faults).close()
    assert len(faults) == 1


def test_parts_that_the_system_moves_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev
    for name, move in (("preadv", read), ("pwritev", write)):
        monkeypatch.setattr(
            f"os.{name}", lambda fd, parts, start, m=move: m(fd, [parts[0][:700]], start)
        )
    store = open_disk(path, 4)
    assert keep(store, 1)
    assert has(store, 1)
    monkeypatch.undo()
    assert has(store, 1)
    store.close()


def test_a_block_with_more_parts_than_one_call_moves(path: Path) -> None:
    sizes = (128, *[8] * 3000)
    store = open_disk(path, 4, sizes=sizes)
    content = block(1, sizes)
    assert store.store(key(1), content)
    buffer = [memoryview(bytearray(size)) for size in sizes]
    assert store.load(key(1), buffer)
    assert [bytes(part) for part in buffer] == [bytes(part) for part in content]
    store.close()


def test_a_slot_that_is_still_written_is_not_given_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardpoint.builtin_plugins.kv_stores.disk_slab import Slab

    late, other = open_disk(path, 4), open_disk(path, 4)
    started, may_write, write = threading.Event(), threading.Event(), Slab.write

    def write_late(slab: Slab, slot: int, parts: object) -> None:
        if threading.current_thread() is thread:
            started.set()
            assert may_write.wait(60)
        write(slab, slot, parts)

    monkeypatch.setattr(Slab, "write", write_late)
    thread = threading.Thread(target=keep, args=(late, 1))
    thread.start()
    assert started.wait(60)
    for number in range(10, 40):
        assert keep(other if number % 2 else late, number)
    assert len(kept(other, range(10, 40))) == 3, "the fourth slot is being written"
    may_write.set()
    thread.join()
    assert kept(other, [1]) == [1]
    assert len(kept(other, range(10, 40))) == 3
    late.close()
    other.close()


def test_a_block_that_is_replaced_while_it_is_read_is_a_miss(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(path, 1)
    assert keep(store, 1)
    read = os.preadv

    def replace_and_read(*args: object) -> int:
        monkeypatch.undo()
        assert keep(store, 2)
        return read(*args)

    monkeypatch.setattr("os.preadv", replace_and_read)
    assert not has(store, 1)
    assert kept(store, [1, 2]) == [2]
    store.close()


def test_two_that_store_a_block_at_once_keep_it_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(path, 2)
    write = os.pwritev

    def store_and_write(*args: object) -> int:
        monkeypatch.undo()
        assert keep(store, 1)
        return write(*args)

    monkeypatch.setattr("os.pwritev", store_and_write)
    assert keep(store, 1)
    assert keep(store, 2)
    assert kept(store, [1, 2]) == [1, 2]
    store.close()


def test_another_process_that_keeps_the_index_is_not_waited_for_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: ScriptedClock
) -> None:
    monkeypatch.setattr(f"{STORES}.disk._BUSY_SECONDS", 0.05)
    faults: list[str] = []
    store = open_disk(path, 4, faults)
    assert keep(store, 1)
    other = open_disk(path, 4)
    with other.slab.writing_index(1) as is_locked:
        assert is_locked
        began = time.monotonic()
        assert not keep(store, 2)
        assert not keep(store, 3)
        assert time.monotonic() - began < 30
        assert kept(store, range(4)) == [1]
    assert faults == ["plugin.disk.path: no block is saved: another process keeps the index locked"]
    clock.advance(0.06)
    assert keep(store, 2)
    store.close()
    other.close()


def test_close_leaves_the_files_to_a_call_that_still_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(path)
    assert keep(store, 1)
    started, may_read, read = threading.Event(), threading.Event(), os.preadv

    def read_late(*args: object) -> int:
        started.set()
        assert may_read.wait(60)
        return read(*args)

    monkeypatch.setattr("os.preadv", read_late)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(has(store, 1)))
    before = descriptors()
    thread.start()
    assert started.wait(60)
    store.close()
    assert descriptors() >= before, "no number of a file is given away"
    assert not has(store, 1)
    assert not keep(store, 2)
    assert store.lookup([key(1)]) == [False]
    may_read.set()
    thread.join()
    assert results == [True]
    assert not descriptors() >= before
    store.close()


def test_drain_lets_the_disk_have_the_blocks_before_the_index(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fdatasync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    )
    store = open_disk(path)
    assert keep(store, 1)
    store.drain()
    assert synced == ["slab"]
    store.close()
    store.drain()
    assert synced == ["slab"]


@pytest.mark.timing
def test_lookups_are_fast(path: Path) -> None:
    store = open_disk(path, 1024)
    for number in range(256):
        assert keep(store, number)
    keys = [key(number) for number in range(256)]
    seconds = []
    for _turn in range(20):
        began = time.perf_counter()
        assert all(store.lookup(keys))
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.001
    store.close()
