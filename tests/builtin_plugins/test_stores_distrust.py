"""Results from blocks that could not be loaded in the step are not kept anywhere."""

from __future__ import annotations

import time

import pytest
import torch
from support.waiting import wait_until

from hardpoint.builtin_plugins.kv_connectors.jobs import BlockLoad, Jobs, Save
from hardpoint.builtin_plugins.kv_connectors.stores import StoresConnector
from hardpoint.plugins import Executor, KVConnectorContext, KVStore, KVStoreContext
from hardpoint.plugins.config_tables import KVConnectorConfig
from hardpoint.plugins.kv_connector import BlockIdentity, KVWorkerContext

IDENTITY = BlockIdentity(
    weights="w",
    config="c",
    architecture="a",
    dtype="float32",
    kv_layout="l",
    kv_layout_version=1,
    block_size=4,
    layer_bytes=(16,),
    hash_algorithm="sha256",
)


class SlowStore(KVStore):
    """Has nothing, keeps everything, and may take its time."""

    contract = 1

    def __init__(self, context):
        super().__init__(context)
        self.kept = []
        self.seconds = 0.0

    def lookup(self, keys):
        return [False] * len(keys)

    def load(self, key, buffer):
        time.sleep(self.seconds)
        buffer[1][:] = bytes([9]) * 16
        return False

    def store(self, key, buffer):
        self.kept.append(key)
        return True


@pytest.fixture
def half():
    made = []

    def open_stores(sizes, _timeout_seconds):
        context = KVStoreContext(
            name="slow", options=SlowStore.Options(), sizes=tuple(sizes), identity="i"
        )
        made.append(SlowStore(context))
        return made

    config = KVConnectorConfig(stores=["slow"])
    connector = StoresConnector(
        KVConnectorContext(name="stores", options=StoresConnector.Options(), config=config)
    )
    half = connector.worker_half(
        KVWorkerContext(identity=IDENTITY, device=torch.device("cpu"), open_stores=open_stores)
    )
    half.register_kv_caches([[torch.zeros(8, 16, dtype=torch.uint8)]])
    yield half, made[0]
    half.close()


def run_step(half, jobs=None):
    half.start_load_kv(jobs)
    half.wait_for_save()
    half.get_finished(frozenset())
    errors = half.load_errors()
    message = half.take_message()
    return errors, [] if message is None else message.unsaved


def save(number):
    return Jobs(saves=[Save([bytes([number])], [number])])


def test_blocks_after_a_failed_load_of_the_step_are_not_stored(half):
    half, store = half
    failing = Jobs(loads=[BlockLoad("r", [b"x"], [1], in_step=True)], saves=[Save([b"after"], [2])])
    errors, unsaved = run_step(half, failing)
    assert errors == {1}
    assert unsaved == [b"after"]
    # Nor are those of steps that were planned before that was known.
    for number in range(Executor.MAX_CONCURRENT_BATCHES - 1):
        assert run_step(half, save(number))[1] == [bytes([number])]
    run_step(half, save(7))
    half.close()
    assert len(store.kept) == 1


def test_without_a_kv_cache_all_loads_fail(half):
    half, store = half
    cache = torch.zeros(8, 16, dtype=torch.uint8)
    half.register_kv_caches([[cache]])
    job = Jobs(loads=[BlockLoad("r", [b"x"], [1])])
    store.seconds = 0.2
    half.start_load_kv(job)
    half.release_kv_caches()
    half.get_finished(frozenset())
    assert half.load_errors() == {1}
    half.start_load_kv(Jobs(loads=[BlockLoad("asleep", [b"y"], [2])]))
    wait_until(lambda: "asleep" in half.get_finished(frozenset()).loaded)
    assert half.load_errors() == {2}
    assert not cache.any()
