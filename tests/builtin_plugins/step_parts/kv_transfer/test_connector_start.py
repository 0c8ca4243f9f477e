"""Options that a KV connector excludes are refused at the start; a sleep starts it again."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch
from support.core.connector_driver import PROMPT, Driver
from support.core.scripted_connector import Script, use
from support.plugins.refused import NoLayout, SilentLoader, SlidingModel
from support.samples import Sample

from hardpoint import ConfigError, ModelError, typed
from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.kv_connectors.stores import StoresConnector
from hardpoint.builtin_plugins.kv_stores.memory import MemoryStore
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.core.build import build_engine
from hardpoint.errors import PluginError, PluginFaultError
from hardpoint.plugins import EngineConfig, ModelConfig
from hardpoint.testing import HistoryAttention, ScriptedModel, scripted_engine
from hardpoint.toolkit.kv_blocks.identity import config_hash

NAME = "support.core.scripted_connector:ScriptedConnector"
USES = {"kv_connector": {"use": NAME}}


class BareModel(Sample, ScriptedModel, contract=1):
    def kv_specs(self):
        return []

    def forward(self, batch):
        return torch.zeros(len(batch.token_ids), 2)


class NoViews(Sample, HistoryAttention, contract=1):
    def block_views(self, cache):
        raise NotImplementedError


class WrongViews(Sample, HistoryAttention, contract=1):
    def block_views(self, cache):
        return [cache]


class OddLoader(Sample, DummyLoader, contract=1):
    def content_hash(self, hash_file):
        return 5


class BrokenLoader(Sample, DummyLoader, contract=1):
    def content_hash(self, hash_file):
        raise KeyError("weights")


def table(**chosen):
    """Return a configuration with another class in place of the scripted one."""
    model = chosen.get("model", ScriptedModel)
    attention = chosen.get("attention", HistoryAttention)
    uses = [{"use": of(model), "name": "ScriptedForCausalLM"}]
    if loader := chosen.get("loader"):
        uses.append({"use": of(loader), "name": loader.__name__})
    return {
        **USES,
        "dtype": "float32",
        "attention": {"use": of(attention)},
        "load": {"use": loader.__name__ if loader else "dummy"},
        "plugins": {"enable": uses},
        "scheduler": {"max_num_batched_tokens": 512},
    }


def of(cls):
    return f"{cls.__module__}:{cls.__name__}"


REFUSED = {
    "sliding_window": (
        table(model=SlidingModel),
        ConfigError,
        ["kv_connector.use", NAME, "ScriptedForCausalLM has KV cache groups", "of 8 tokens;"],
    ),
    "no_cache": (
        table(model=BareModel),
        ConfigError,
        ["kv_connector.use", NAME, "moves blocks of the KV cache", "has none"],
    ),
    "no_block_views": (
        table(attention=NoViews),
        ConfigError,
        [f"kv_connector.use: '{NAME}' moves blocks", "NoViews", "has no block_views()"],
    ),
    "wrong_block_views": (
        table(attention=WrongViews),
        PluginFaultError,
        ["WrongViews", "block_views", "uint8 tensors [num_blocks, bytes]"],
    ),
    "no_layout": (
        table(attention=NoLayout),
        ConfigError,
        [f"kv_connector.use: '{NAME}' has to distinguish", "NoLayout", "has no kv_layout"],
    ),
    "no_content_hash": (
        table(loader=SilentLoader),
        ConfigError,
        [
            f"kv_connector.use: '{NAME}' has to distinguish blocks of different weights",
            "SilentLoader",
            "has no content_hash()",
        ],
    ),
    "odd_content_hash": (
        table(loader=OddLoader),
        PluginFaultError,
        ["OddLoader", "its content_hash() gave 5, expected a text"],
    ),
    "broken_content_hash": (
        table(loader=BrokenLoader),
        PluginFaultError,
        ["BrokenLoader", "its content_hash() failed: KeyError: 'weights'"],
    ),
}


def test_the_built_in_connector_by_its_fqcn_needs_stores_too(scripted):
    with pytest.raises(ConfigError) as error:
        scripted_engine(scripted, {"kv_connector": {"use": of(StoresConnector)}})
    assert str(error.value).startswith(
        'kv_connector.stores: expected at least one store, as in stores = ["memory"], for '
        f"'{of(StoresConnector)}' to drive, got none; leave out use"
    )


def hashing():
    return [t for t in threading.enumerate() if t.name == "WeightsHash" and t.is_alive()]


@pytest.mark.parametrize("settings", [{"kv_cache": {"window_groups": False}}, {"max_model_len": 8}])
def test_windows_that_release_no_blocks_do_not_matter(scripted, settings):
    use(Script())
    tree = {**table(model=SlidingModel), **settings, "model": str(scripted)}
    build_engine(typed.convert(tree, EngineConfig, path="")).close()


def test_windows_are_part_of_the_identity(scripted):
    config = ModelConfig(architecture="Any", hf={}, vocab_size=9, max_position_embeddings=8)
    hashes = [config_hash(config, "", windows) for windows in ([None, 4], [4, None], [4, 4], [])]
    assert len(set(hashes)) == 4
    assert config_hash(config, "", [None, None]) == config_hash(config)


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_at_the_start_with_both_named(scripted, case):
    script = use(Script())
    config, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        build_engine(typed.convert({**config, "model": str(scripted)}, EngineConfig, path=""))
    for word in words:
        assert word in str(caught.value)
    halves = [half.name for half in script.halves]
    closed = [call for call in script.calls if call.endswith(".close") and "conn" not in call]
    assert sorted(closed) == sorted(f"{half}.close" for half in halves)
    assert hashing() == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("scheduler_half", "its scheduler_half() failed: ZeroDivisionError: half"),
        ("worker_half", "its worker_half() failed: ZeroDivisionError: half"),
        ("worker.register_kv_caches", "its register_kv_caches() failed: ZeroDivisionError: half"),
        ("worker.handshake", "its handshake() failed: ZeroDivisionError: half"),
    ],
)
def test_a_half_that_cannot_be_built_is_named(scripted, fault, words):
    script = use(Script(faults={fault: ZeroDivisionError("half")}))
    with pytest.raises(PluginError) as caught:
        scripted_engine(scripted, USES)
    assert words in str(caught.value)
    assert "ScriptedConnector" in str(caught.value)
    if fault != "scheduler_half":
        assert script.calls.count("scheduler.close") == 1
    if fault.startswith("worker."):
        assert script.calls.count("worker.close") == 1
    assert script.calls.count("connector.close") == (1 if fault == "scheduler_half" else 2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("scheduler_half", "its scheduler_half() gave 7, expected a KVConnectorScheduler"),
        ("worker_half", "its worker_half() gave 7, expected a KVConnectorWorker"),
        ("worker.handshake", "its handshake() failed: TypeError"),
    ],
)
def test_a_half_that_is_none_is_named(scripted, fault, words):
    value = (lambda half: object()) if "." in fault else 7
    use(Script(faults={fault: value}))
    with pytest.raises(PluginError) as caught:
        scripted_engine(scripted, USES)
    assert words in str(caught.value)


def test_stores_that_the_connector_does_not_open_are_refused(scripted):
    use(Script())
    config = {"kv_connector": {**USES["kv_connector"], "stores": ["memory"]}}
    with pytest.raises(ConfigError) as caught:
        scripted_engine(scripted, {**USES, **config})
    assert "kv_connector.stores: the connector " in str(caught.value)
    assert "opens no stores; leave out use or stores" in str(caught.value)


CONFIGS = [
    (
        {"use": "stores"},
        "kv_connector: the connector 'stores' needs stores to drive: stores = [\"memory\"], for",
    ),
    ({"stores": ["memory", "memory"]}, "kv_connector.stores[1]: 'memory' is named twice"),
    (
        {"stores": ["memory", {"use": "memory"}]},
        "kv_connector.stores[1]: 'memory' is named twice, here and by kv_connector.stores[0]",
    ),
    ({"stores": ["no_such_store"]}, "kv_connector.stores[0]"),
    ({"use": "no_such_connector"}, "kv_connector.use"),
    ({"on_load_failure": "panic"}, "kv_connector.on_load_failure"),
    ({"load_seconds": 0}, "kv_connector.load_seconds"),
    ({"lease_seconds": -1}, "kv_connector.lease_seconds"),
    ({"engine_id": "a b"}, "kv_connector.engine_id"),
]


@pytest.mark.parametrize(("table", "words"), CONFIGS)
def test_a_wrong_configuration_is_refused(scripted, table, words):
    with pytest.raises((ConfigError, PluginError)) as caught:
        scripted_engine(scripted, {"kv_connector": table})
    assert words in str(caught.value)


class SeesItsContext(MemoryStore):
    contract = 1
    seen: ClassVar[list[float]] = []

    def __init__(self, context):
        super().__init__(context)
        self.seen.append(context.timeout_seconds)


def test_stores_know_when_the_connector_gives_up_their_calls(scripted):
    table = {
        "kv_connector": {"stores": [{"use": of(SeesItsContext), "name": "seen"}]},
        "plugin": {"stores": {"timeout_seconds": 0.7}, "seen": {"size_bytes": 1 << 20}},
    }
    scripted_engine(scripted, table).close()
    assert SeesItsContext.seen.pop() == 0.7


@pytest.fixture
def driver(scripted):
    driver = Driver(scripted, Script())
    driver.add("first")
    driver.run()
    driver.core.reset_prefix_cache()
    yield driver
    driver.engine.close()


def identities(driver):
    return [c.identity.digest() for c in driver.script.contexts if hasattr(c, "identity")]


class TestSleep:
    def test_level_1_keeps_the_halves_and_what_is_kept(self, driver):
        driver.core.sleep(1).result(0)
        driver.core.wake_up()
        assert len(identities(driver)) == 1
        assert driver.script.calls.count("worker.register_kv_caches") == 2
        driver.add("v")
        driver.run()
        assert driver.cached["v"].num_external_tokens == 16
        assert driver.tokens["v"] == driver.tokens["first"]

    @pytest.mark.parametrize("tags", [None, "one by one"])
    def test_level_2_builds_the_worker_halves_anew(self, driver, tags):
        driver.core.sleep(2).result(0)
        assert driver.script.calls.count("worker.close") == 1
        driver.script.calls.clear()
        for wanted in [None] if tags is None else [["weights"], ["kv_cache"]]:
            driver.core.wake_up(wanted)
        assert driver.script.calls.count("scheduler.set_handshakes") == 1
        first, second = identities(driver)
        assert first == second
        driver.add("v")
        driver.run()
        assert driver.cached["v"].num_external_tokens == 16
        assert driver.tokens["v"] == driver.tokens["first"]

    def test_other_weights_are_another_identity(self, driver, monkeypatch):
        driver.core.sleep(2).result(0)
        monkeypatch.setattr(DummyLoader, "content_hash", lambda self, hash_file: "others")
        driver.core.wake_up()
        first, second = identities(driver)
        assert first != second

    def test_files_that_change_during_loading_are_shared_with_no_one(self, driver, monkeypatch):
        files = ["one"]
        monkeypatch.setattr(DummyLoader, "fingerprint", lambda self: files[-1])
        collective_rpc, changes = UniprocExecutor.collective_rpc, []

        def call(executor, method, *args):
            if method == "wake_up" and changes.pop():
                files.append(f"{files[-1]}, changed")
            return collective_rpc(executor, method, *args)

        monkeypatch.setattr(UniprocExecutor, "collective_rpc", call)
        for changed in (True, False, True):
            changes.append(changed)
            driver.core.sleep(2).result(0)
            driver.core.wake_up()
        first, second, third, fourth = identities(driver)
        assert first == third
        assert len({first, second, fourth}) == 3

    def test_the_engine_goes_on_without_one_that_cannot_start_again(self, driver, monkeypatch):
        driver.core.sleep(2).result(0)
        with monkeypatch.context() as patch:
            patch.setattr(DummyLoader, "content_hash", lambda self, hash_file: None)
            driver.core.wake_up()
        for name in ("u", "v"):
            driver.add(name)
            driver.run()
            driver.core.reset_prefix_cache()
            assert driver.tokens[name] == driver.tokens["first"]
        (message,) = driver.faults.values()
        words = f"it cannot be started again: ConfigError: kv_connector.use: '{NAME}' has to"
        assert words in message
        driver.core.sleep(2).result(0)
        driver.core.wake_up()
        driver.add("w")
        driver.run()
        assert driver.cached["w"].num_external_tokens == 16
        assert driver.tokens["w"] == driver.tokens["first"]

    def test_halves_that_did_start_end_if_another_rank_cannot(self, driver, monkeypatch):
        driver.core.sleep(2).result(0)
        driver.script.calls.clear()
        collective_rpc = UniprocExecutor.collective_rpc

        def call(executor, method, args=(), timeout=None):
            results = collective_rpc(executor, method, args, timeout)
            if method == "start_parts" and args[0] is not None:
                raise ModelError("rank 1 has no memory")
            return results

        monkeypatch.setattr(UniprocExecutor, "collective_rpc", call)
        driver.core.wake_up()
        assert driver.script.calls.count("worker.handshake") == 1
        assert driver.script.calls.count("worker.close") == 1
        driver.add("v")
        driver.run()
        assert driver.tokens["v"] == driver.tokens["first"]
        (message,) = driver.faults.values()
        assert "it cannot be started again: ModelError: rank 1 has no memory" in message


def test_a_request_that_is_not_taken_is_forgotten(driver):
    driver.script.faults = {"scheduler.check_request": lambda half, request: None}
    with pytest.raises(ValueError, match="prompt"):
        driver.add("long", range(200), kv_transfer_params={"a": 1})
    assert driver.script.calls[-2:] == ["scheduler.check_request", "scheduler.request_refused"]
    driver.script.faults = {}
    with pytest.raises(ValueError, match="kv_transfer_params: the KV connector SchedulerHalf"):
        driver.add("v", PROMPT, kv_transfer_params={"a": 1})
    assert driver.script.calls[-1] == "scheduler.check_request"
    assert driver.core.num_unfinished_requests() == 0


def words_of_transfer(caplog):
    return [r.getMessage() for r in caplog.records if "kv_transfer_params" in r.getMessage()]


def test_parameters_without_a_connector_are_warned_of_once_and_nothing_is_transferred(
    scripted, caplog
):
    driver = Driver(scripted)
    driver.add("a", max_tokens=3, kv_transfer_params={"from": "there"})
    driver.add("b", max_tokens=3)
    driver.run()
    assert driver.tokens["a"] == driver.tokens["b"]
    (words,) = words_of_transfer(caplog)
    assert words.startswith("request a has kv_transfer_params, which are ignored: this engine")
    driver.engine.close()


def test_parameters_that_a_connector_takes_are_not_warned_of(scripted, caplog):
    driver = Driver(
        scripted, Script(faults={"scheduler.check_request": lambda half, request: None})
    )
    driver.add("a", max_tokens=3, kv_transfer_params={"from": "there"})
    driver.run()
    assert words_of_transfer(caplog) == []
    driver.engine.close()
