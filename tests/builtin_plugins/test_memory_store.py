"""The KV store "memory"."""

from __future__ import annotations

import itertools
import threading
import time

import psutil
import pytest
from support.kv_stores import SIZES, block_of, found, keep, key_of, loaded, open_store, room

from hardpoint import LLM, ConfigError
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.testing import scripted_config

BLOCK = sum(SIZES)
BIG = (128, 600_000, 400_000)


def test_blocks_come_back_as_they_were():
    store = open_store(MemoryStore, size_bytes=10 * BLOCK)
    keep(store, 1, 2, 3)
    assert found(store, 1, 2, 3, 4) == [True, True, True, False]
    assert [loaded(store, number) for number in (3, 1, 2, 4)] == [True, True, True, False]
    store.close()


def test_the_block_that_was_not_used_for_longest_makes_room():
    store = open_store(MemoryStore, size_bytes=3 * BLOCK + BLOCK - 1)
    keep(store, 1, 2, 3)
    assert found(store, 1) == [True]
    keep(store, 4)
    assert found(store, 1, 2, 3, 4) == [True, False, True, True]
    keep(store, 3, 5)
    assert found(store, 1, 3, 4, 5) == [True, True, False, True]
    store.close()


def test_the_last_blocks_of_a_prompt_make_room_first():
    store = open_store(MemoryStore, size_bytes=4 * BLOCK)
    keep(store, 1, 2, 3)
    assert found(store, 1, 2, 3) == [True, True, True]
    keep(store, 7, 8)
    assert found(store, 1, 2, 3, 7, 8) == [True, True, False, True, True]
    store.close()


def test_a_block_that_is_stored_again_takes_no_more_room_and_is_replaced():
    store = open_store(MemoryStore, size_bytes=2 * BLOCK)
    keep(store, 1)
    for number in range(10):
        assert store.store(key_of(2), block_of(100 + number)) is True
    buffer = room()
    assert store.load(key_of(2), buffer)
    assert buffer.whole == block_of(109).whole
    assert loaded(store, 1)
    store.close()


def test_what_makes_room_is_reported_and_what_is_kept_is_counted():
    evicted = []
    context = {"report_evicted": evicted.extend}
    store = open_store(MemoryStore, size_bytes=2 * BLOCK, context=context)
    assert store.used_bytes == 0
    keep(store, 1, 2, 2, 1)
    assert evicted == []
    assert store.used_bytes == 2 * BLOCK
    keep(store, 3, 4)
    assert evicted == [key_of(2), key_of(1)]
    assert store.used_bytes == 2 * BLOCK
    store.close()
    assert store.used_bytes == 0


def test_what_is_stored_is_a_copy():
    store = open_store(MemoryStore, size_bytes=2 * BLOCK)
    block = room()
    block.whole[:] = block_of(1).whole
    store.store(key_of(1), block)
    block.whole[:] = bytes(BLOCK)
    assert loaded(store, 1)
    store.close()


def test_a_buffer_of_another_size_is_refused_and_harms_no_other_block():
    store = open_store(MemoryStore, size_bytes=3 * BLOCK)
    keep(store, 1, 2)
    sizes = (*SIZES, 8)
    with pytest.raises(ValueError, match="expected a buffer of 1152 bytes, got 1160"):
        store.store(key_of(3), block_of(3, sizes))
    with pytest.raises(ValueError, match="expected a buffer of 1152 bytes, got 1160"):
        store.load(key_of(1), room(sizes))
    assert found(store, 1, 2, 3) == [True, True, False]
    keep(store, 3)
    assert all(loaded(store, number) for number in (1, 2, 3))
    store.close()


def test_threads_get_whole_blocks_of_their_keys():
    """Few places and many keys, so that each block that is stored takes the place of another."""
    store = open_store(MemoryStore, sizes=BIG, size_bytes=4 * sum(BIG))
    began = time.monotonic()
    blocks = {number: block_of(number, BIG) for number in range(6)}
    loads: list[bool] = []
    errors: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            buffer = room(BIG)
            for turn in itertools.count(seed):
                # On a slow machine, longer: some blocks have to be found again.
                if time.monotonic() - began > (0.2 if loads.count(True) > 10 else 30):
                    return
                number = turn * (seed + 1) % 6
                if turn % 3:
                    is_there = store.load(key_of(number), buffer)
                    right = buffer.whole == blocks[number].whole
                    assert right or not is_there, f"wrong bytes in {number}"
                    loads.append(is_there)
                else:
                    store.store(key_of(number), blocks[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert loads.count(True) > 10
    assert loads.count(False) > 0
    assert [store.store(key_of(n), blocks[n]) for n in range(4)] == [True] * 4
    assert sum(loaded(store, number, BIG) for number in range(6)) == 4  # no place is lost
    store.close()


def test_closing_returns_the_memory():
    sizes = (128, 4 << 20)
    process = psutil.Process()
    before = process.memory_info().rss
    store = open_store(MemoryStore, sizes=sizes, size_bytes=12 * sum(sizes))
    block = block_of(1, sizes)
    for number in range(12):
        store.store(key_of(number), block)
    held = process.memory_info().rss - before
    assert held > 40 << 20
    store.close()
    assert process.memory_info().rss - before < held - (40 << 20)


def test_memory_is_taken_as_blocks_come():
    before = psutil.Process().memory_info().rss
    store = open_store(MemoryStore, size_bytes=1 << 30)
    keep(store, 1)
    assert psutil.Process().memory_info().rss - before < 32 << 20
    store.close()


def test_a_closed_store_has_nothing_and_keeps_nothing():
    store = open_store(MemoryStore, size_bytes=2 * BLOCK)
    keep(store, 1)
    store.close()
    assert found(store, 1) == [False]
    assert not loaded(store, 1)
    assert store.store(key_of(2), block_of(2)) is False
    store.close()


def test_closing_while_others_copy():
    for _ in range(10):
        store = open_store(MemoryStore, sizes=BIG, size_bytes=2 * sum(BIG))
        block, errors = block_of(1, BIG), []

        def use(store=store, block=block, errors=errors) -> None:
            buffer = room(BIG)
            try:
                while store.store(key_of(1), block):
                    if store.load(key_of(1), buffer):
                        assert buffer.whole == block.whole
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        store.close()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert not any(thread.is_alive() for thread in threads)


def test_a_size_that_holds_no_block_is_refused():
    expected = r"plugin\.kept\.size_bytes: expected at least 1152, the size of a block, got 1151"
    with pytest.raises(ConfigError, match=expected):
        open_store(MemoryStore, size_bytes=BLOCK - 1)


def test_more_than_the_host_has_is_refused():
    expected = (
        r"plugin\.kept\.size_bytes: 1048577 bytes are more host memory than a rank's process may "
        r"still allocate, 1048576 bytes; make it smaller, or the KV cache"
    )
    with pytest.raises(ConfigError, match=expected):
        open_store(MemoryStore, size_bytes=(1 << 20) + 1, context={"host_memory": 1 << 20})
    with pytest.raises(ConfigError, match=r"plugin\.kept\.size_bytes: \d+ bytes of host memory: "):
        open_store(MemoryStore, size_bytes=1 << 60)


class Cuda:
    """Stands in for the CUDA runtime.

    Attributes:
        pinned: size of each piece of memory that is pinned, by its address.
    """

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self._error:
            self.pinned[address] = size
        return self._error

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"


def test_memory_for_a_gpu_is_pinned_until_it_is_returned(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr("torch.cuda.cudart", lambda: cuda)
    store = open_store(MemoryStore, size_bytes=4 * BLOCK + 1, context={"pin_memory": True})
    assert list(cuda.pinned.values()) == [4 * BLOCK]
    keep(store, 1)
    assert loaded(store, 1)
    store.close()
    assert not cuda.pinned
    open_store(MemoryStore, size_bytes=4 * BLOCK).close()


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.cudart", lambda: Cuda(error=2))
    expected = r"plugin\.kept\.size_bytes: 4608 bytes of host memory cannot be pinned: error 2"
    with pytest.raises(ConfigError, match=expected):
        open_store(MemoryStore, size_bytes=4 * BLOCK, context={"pin_memory": True})


def test_an_engine_logs_what_its_host_has(scripted):
    config = scripted_config(scripted) | {
        "kv_connector": {"stores": ["memory"]},
        "plugin": {"memory": {"size_bytes": 1 << 50}},
    }
    expected = r"plugin\.memory\.size_bytes: 1125899906842624 bytes are more host memory"
    with pytest.raises(ConfigError, match=expected):
        LLM(str(scripted), config=config)
