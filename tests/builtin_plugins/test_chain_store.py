"""The KV store "chain"."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import pytest
from support.kv_stores import (
    SIZES,
    block_of,
    found,
    keep,
    key_of,
    loaded,
    open_store,
    room,
    scripted_clock,
)
from support.waiting import wait_until

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.builtin_plugins.kv_stores.chain import ChainStore
from hardpoint.builtin_plugins.kv_stores.disk import DiskStore
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.errors import PluginError
from hardpoint.testing import scripted_config

BLOCK = sum(SIZES)


class Chain:
    """A chain of stores in memory.

    Attributes:
        store: the chain.
        stores: those in it, by name.
        calls: calls of their methods.
        before: called with name and method before each.
        faults: faults that the chain has reported.
    """

    def __init__(self, *names: str, sizes=(), timeout: float = 60.0, **options) -> None:
        self.calls: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self.stores: dict[str, MemoryStore] = {}
        self.before = lambda _name, _method: None
        blocks = dict(zip(names, sizes, strict=True) if sizes else dict.fromkeys(names, 10))

        def create(name: str):
            store = open_store(self._recorded(), name=name, size_bytes=blocks[name] * BLOCK)
            self.stores[name] = store
            return store

        context = {
            "creator": create,
            "report_fault": self.faults.append,
            "timeout_seconds": timeout,
        }
        self.store = open_store(
            ChainStore, name="chain", context=context, stores=list(names), **options
        )

    def _recorded(self) -> type[MemoryStore]:
        chain = self

        class Recorded(MemoryStore):
            contract = 1

        def recorded(method):
            def run(store, *args):
                chain.calls.append((store.name, method))
                chain.before(store.name, method)
                return getattr(super(Recorded, store), method)(*args)

            return run

        for method in ("lookup", "store", "load", "drain", "close"):
            setattr(Recorded, method, recorded(method))
        return Recorded


@pytest.fixture
def clock(monkeypatch):
    """A clock for chains and for the pauses of their stores."""
    return scripted_clock(monkeypatch, "kv_stores.chain", "kv_connectors.tiers")


def names_of(calls, method: str) -> list[str]:
    return [name for name, called in calls if called == method]


def failing(*failures: tuple[str, str]):
    def before(name, method):
        if (name, method) in failures:
            raise OSError(f"{name} is broken")

    return before


def test_what_is_written_through_is_in_all_stores():
    chain = Chain("near", "far")
    keep(chain.store, 1, 2)
    for store in chain.stores.values():
        assert found(store, 1, 2, 3) == [True, True, False]
    assert loaded(chain.store, 1)
    assert names_of(chain.calls, "load") == ["near"]
    chain.store.close()


def test_what_was_far_is_near_once_it_was_loaded():
    chain = Chain("near", "middle", "far")
    keep(chain.stores["far"], 1)
    assert loaded(chain.store, 1)
    assert [found(store, 1) for store in chain.stores.values()] == [[True]] * 3
    assert not loaded(chain.store, 2)
    chain.store.close()


@pytest.mark.parametrize("write", ["through", "behind"])
def test_a_bad_block_that_was_brought_near_is_replaced(tmp_path, write):
    far = open_store(MemoryStore, size_bytes=10 * BLOCK)
    near = open_store(DiskStore, path=str(tmp_path / "kv"), size_bytes=1 << 16)
    stores = {"near": near, "far": far}
    context = {"creator": stores.__getitem__}
    chain = open_store(ChainStore, context=context, stores=list(stores), write=write)
    far.store(key_of(1), block_of(2))  # another one than that of the key
    buffer = room()
    assert chain.load(key_of(1), buffer)
    assert buffer.whole == block_of(2).whole
    keep(chain, 1)
    chain.drain()
    assert [loaded(store, 1) for store in (chain, near, far)] == [True] * 3
    chain.close()


def test_lookups_ask_each_store_for_what_is_missing_alone():
    chain = Chain("near", "far")
    keep(chain.stores["near"], 1)
    keep(chain.stores["far"], 2)
    assert found(chain.store, 1, 2, 3) == [True, True, False]
    keep(chain.stores["near"], 2)
    chain.calls.clear()
    assert found(chain.store, 1, 2) == [True, True]
    assert names_of(chain.calls, "lookup") == ["near"]
    chain.store.close()


def test_what_the_near_store_drops_is_in_the_far_one():
    chain = Chain("near", "far", sizes=(2, 10))
    keep(chain.store, *range(6))
    assert found(chain.stores["near"], *range(6)).count(True) == 2
    assert all(loaded(chain.store, number) for number in range(6))
    chain.store.close()


def test_what_is_written_behind_does_not_hold_up_the_call():
    chain = Chain("near", "far", write="behind")
    go_on = threading.Event()
    chain.before = lambda name, method: (name, method) == ("far", "store") and go_on.wait(60)
    block = room()
    block.whole[:] = block_of(1).whole
    assert chain.store.store(key_of(1), block.read_only()) is True
    block.whole[:] = bytes(BLOCK)  # the buffer is the connector's again
    assert found(chain.stores["near"], 1) == [True]
    assert found(chain.stores["far"], 1) == [False]
    go_on.set()
    chain.store.drain()
    assert loaded(chain.stores["far"], 1)
    chain.store.close()


def test_what_is_not_written_yet_is_loaded_from_its_copy():
    chain = Chain("near", "far", sizes=(1, 10), write="behind")
    go_on = threading.Event()
    chain.before = lambda name, method: (name, method) == ("far", "store") and go_on.wait(60)
    keep(chain.store, 1, 2, 3)
    assert found(chain.stores["near"], 1, 2, 3) == [False, False, True]
    assert found(chain.store, 1, 2, 3, 4) == [True, True, True, False]
    assert all(loaded(chain.store, number) for number in (1, 2, 3))
    assert chain.store.store(key_of(1), block_of(9)) is True  # while the first one is written
    go_on.set()
    chain.store.drain()
    buffer = room()
    assert chain.stores["far"].load(key_of(1), buffer)
    assert buffer.whole == block_of(9).whole
    assert all(loaded(chain.stores["far"], number) for number in (2, 3))
    chain.store.close()


def test_copies_that_wait_have_a_limit():
    chain = Chain("near", "far", write="behind", copy_bytes=3 * BLOCK)
    go_on = threading.Event()
    chain.before = lambda name, method: (name, method) == ("far", "store") and go_on.wait(60)
    keep(chain.store, *range(6))
    assert all(found(chain.stores["near"], *range(6)))
    go_on.set()
    chain.store.drain()
    assert found(chain.stores["far"], *range(6)) == [True] * 3 + [False] * 3
    keep(chain.store, 7)
    chain.store.drain()
    assert loaded(chain.stores["far"], 7)
    chain.store.close()


def test_without_a_thread_blocks_are_in_the_nearest_store_alone(monkeypatch):
    chain = Chain("near", "far", write="behind")

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", start)
        assert chain.store.store(key_of(1), block_of(1)) is True
    chain.before = failing(("near", "lookup"))
    assert found(chain.store, 1) == [False]  # nothing waits for a thread
    keep(chain.store, 2)
    chain.store.drain()
    assert found(chain.stores["far"], 1, 2) == [False, True]
    chain.store.close()


def test_draining_waits_for_copies_and_then_for_each_store():
    chain = Chain("near", "far", write="behind")
    chain.before = lambda name, method: (name, method) == ("far", "store") and time.sleep(0.05)
    keep(chain.store, 1, 2)
    chain.store.drain()
    calls = [call for call in chain.calls if call != ("near", "store")]
    assert calls == [
        ("far", "store"),
        ("far", "store"),
        ("near", "drain"),
        ("far", "drain"),
    ]
    chain.store.close()


@pytest.mark.parametrize("write", ["through", "behind"])
def test_a_store_that_fails_harms_no_other(write):
    chain = Chain("near", "far", write=write)
    keep(chain.stores["far"], 1)
    chain.before = failing(*(("near", method) for method in ("lookup", "load", "store")))
    assert found(chain.store, 1, 2) == [True, False]
    assert loaded(chain.store, 1)
    keep(chain.store, 3)
    chain.store.drain()
    assert loaded(chain.stores["far"], 3)
    assert chain.faults[0] == (
        "KV store 'near' in 'chain': lookup() failed: OSError: near is broken"
    )
    chain.store.close()


def test_a_block_that_no_store_keeps_is_not_kept():
    chain = Chain("near", "far")
    chain.before = failing(("near", "store"), ("far", "store"))
    assert chain.store.store(key_of(1), block_of(1)) is False
    assert len(chain.faults) == 2
    chain.store.close()


def test_a_store_that_keeps_failing_is_left_out_for_a_while(clock):
    chain = Chain("near", "far", breaker_failures=2, breaker_seconds=10.0)
    keep(chain.stores["far"], 1)
    chain.before = failing(("near", "lookup"))
    for _ in range(5):
        assert found(chain.store, 1) == [True]
    assert names_of(chain.calls, "lookup").count("near") == 2
    assert chain.faults[1].endswith("near is broken; it is left out for a while")
    chain.before = lambda name, method: None
    clock.advance(9.0)
    assert found(chain.store, 1) == [True]
    assert names_of(chain.calls, "lookup").count("near") == 2
    clock.advance(1.0)
    assert found(chain.store, 1) == [True]
    assert names_of(chain.calls, "lookup").count("near") == 3
    chain.store.close()


def test_a_store_whose_loads_fail_is_left_out_though_its_lookups_work():
    chain = Chain("near", "far", breaker_failures=2)
    keep(chain.store, 1)
    chain.before = failing(("near", "load"))
    for _ in range(4):
        assert found(chain.store, 1) == [True]
        assert loaded(chain.store, 1)
    assert names_of(chain.calls, "load").count("near") == 2
    assert chain.faults[-1].endswith("near is broken; it is left out for a while")
    chain.store.close()


def test_a_store_that_is_slow_is_left_out_for_a_while(clock):
    chain = Chain("near", "far", timeout=2.0, breaker_failures=2)
    keep(chain.store, 1)
    chain.before = lambda name, method: (name, method) == ("near", "load") and clock.advance(3.0)
    assert all(loaded(chain.store, 1) for _ in range(4))
    assert names_of(chain.calls, "load") == ["near", "near", "far", "far"]
    assert "KV store 'near' in 'chain': load() took 3 s, more than 2 s" in chain.faults[0]
    chain.store.close()


def test_the_size_is_that_of_all_stores_if_they_report_it():
    chain = Chain("near", "far", sizes=(1, 10))
    keep(chain.store, 1, 2)
    assert chain.store.used_bytes == 3 * BLOCK
    type(chain.stores["far"]).used_bytes = None
    assert chain.store.used_bytes is None
    chain.store.close()


def test_answers_that_are_none_are_faults():
    chain = Chain("near", "far")
    keep(chain.stores["far"], 1)
    chain.stores["near"].lookup = lambda keys: [True]
    assert found(chain.store, 1, 2) == [True, False]
    assert "lookup() of 2 keys did not return as many answers" in chain.faults[0]
    chain.store.close()


def test_a_future_is_waited_for_while_the_store_may_use_the_buffer():
    chain = Chain("near", "far")
    keep(chain.stores["far"], 1)
    done: Future[bool] = Future()
    chain.stores["near"].load = lambda key, buffer: done
    results = []
    thread = threading.Thread(target=lambda: results.append(loaded(chain.store, 1)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert names_of(chain.calls, "load") == []
    done.set_result(False)
    thread.join(60)
    assert results == [True]
    chain.store.close()


def test_closing_closes_all_and_ends_the_thread():
    chain = Chain("near", "far", write="behind")
    keep(chain.store, 1)
    chain.before = failing(("near", "close"))
    chain.store.close()
    assert names_of(chain.calls, "close") == ["near", "far"]
    assert "KV store 'near' in 'chain': close() failed: OSError: near is broken" in chain.faults
    wait_until(lambda: not any(t.name == "KVChain" for t in threading.enumerate()))


def test_a_closed_chain_has_nothing_and_keeps_nothing():
    chain = Chain("near", "far", write="behind")
    keep(chain.store, 1)
    chain.store.close()
    assert not loaded(chain.store, 1)
    assert chain.store.store(key_of(1), block_of(1)) is False


def engine(scripted, *stores: str, **tables):
    config = scripted_config(scripted) | {
        "kv_connector": {"stores": ["chain"]},
        "plugin": {"chain": {"stores": list(stores)}, **tables},
    }
    return LLM(str(scripted), config=config)


def test_an_engine_builds_the_stores_with_options_of_their_own(scripted):
    with contextlib.closing(engine(scripted, "memory", memory={"size_bytes": 1 << 24})) as llm:
        prompt, params = "say abc " * 20, SamplingParams(max_tokens=8, temperature=0)
        (cold,) = llm.generate([prompt], params)
        llm.reset_prefix_cache()
        (warm,) = llm.generate([prompt], params)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert warm.num_cached_tokens >= 16
        assert llm.plugins.health().fallbacks == {}


def test_stores_that_cannot_be_in_a_chain_are_refused(scripted):
    with pytest.raises(ConfigError, match=r"plugin\.chain\.stores: 'memory' is named twice"):
        engine(scripted, "memory", "memory")
    with pytest.raises(ConfigError, match=r"plugin\.chain\.stores: expected"):
        engine(scripted)
    with pytest.raises(PluginError, match="it wraps 'chain', which is already around it"):
        engine(scripted, "chain")
    with pytest.raises(ConfigError, match=r"plugin\.memory\.size_bytes: expected at least"):
        engine(scripted, "memory", memory={"size_bytes": 1})
