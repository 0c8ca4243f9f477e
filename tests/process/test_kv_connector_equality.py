"""With blocks that are kept in stores, requests get the tokens that they get without."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.driving import Job, alone, run, summary, varied_jobs
from support.internals import engine_of
from support.parallel import (
    drive,
    mixed_jobs,
    open_llm,
    parallel_config,
    reference_of,
    same,
    write_random_model,
)
from support.plugins.kv_stores import FolderStore

from hardpoint import LLM, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins.requests.stats import KVTierStats
from hardpoint.testing import scripted_config, scripted_engine

STORES = "support.plugins.kv_stores"
WAYS = ["fail", "forget", "invent", "damage", "foreign", "slow", "nonsense"]
TIGHT = {  # requests are preempted, and prompts computed in pieces
    "max_model_len": 128,
    "kv_cache": {"block_size": 8, "num_blocks": 20},
    "scheduler": {"max_num_batched_tokens": 48},
}
PATIENT = {"timeout_seconds": 20.0}


def stored(*stores: Any, options: dict[str, Any] | None = None, **plugin: Any) -> dict[str, Any]:
    """Return the configuration of stores, with options of the connector and of plugins."""
    return {
        "kv_connector": {"stores": list(stores)},
        "plugin": {"stores": PATIENT | (options or {}), **plugin},
    }


def memory(size_bytes: int = 1 << 26, **options: Any) -> dict[str, Any]:
    return stored("memory", options=options, memory={"size_bytes": size_bytes})


def folder(path: Path, **options: Any) -> dict[str, Any]:
    store = {"use": f"{STORES}:FolderStore", "name": "folder"}
    return stored(store, options=options, folder={"path": str(path)})


def hostile(path: Path, share: float = 0.05, ways: list[str] = WAYS) -> dict[str, Any]:
    """Return the configuration of a store that lies, in front of an honest one."""
    store = {"use": f"{STORES}:HostileStore", "name": "hostile"}
    settings = {"path": str(path), "ways": ways, "share": share}
    timeout_s = 0.2 if "nonsense" in ways else 20.0  # nonsense is not answered
    options = {"timeout_seconds": timeout_s, "breaker_seconds": 0.1}
    return stored(store, options=options, hostile=settings)


def tiers_of(llm: LLM) -> dict[str, KVTierStats]:
    return llm.engines.scheduler_stats().kv_tiers


def jobs_with_stops() -> list[Job]:
    """Return 40 requests of all kinds, some ended by a string that their own output holds."""
    jobs = varied_jobs()
    for index in (3, 9, 15):
        request_id, prompt, params = jobs[index]
        jobs[index] = (request_id, prompt, msgspec.structs.replace(params, stop=["5", "e", "\\"]))
    return jobs


@pytest.fixture(scope="module")
def expected(scripted: Path) -> dict[str, list]:
    """Each request alone, without stores, with memory to spare."""
    engine = scripted_engine(scripted)
    results = alone(engine, jobs_with_stops())
    engine.close()
    return results


@contextlib.contextmanager
def opened(scripted: Path, *extra: dict[str, Any]) -> Iterator[LLM]:
    config: dict[str, Any] = dict(TIGHT)
    for table in extra:
        for key, value in table.items():
            known = config.get(key)
            config[key] = {**known, **value} if isinstance(known, dict) else value
    with LLM(config=scripted_config(scripted, config)) as llm:
        yield llm


def check_rounds(llm: LLM, expected: dict[str, list], rounds: int = 2) -> None:
    """Compare rounds; each finds nothing in the KV cache."""
    engine, jobs = engine_of(llm), jobs_with_stops()
    for _ in range(rounds):
        assert run(engine, jobs, per_step=2) == expected
        llm.reset_prefix_cache()
        stats = llm.engines.scheduler_stats()
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0
    assert llm.engines.scheduler_stats().num_preemptions > 0  # else TIGHT would prove nothing


@pytest.mark.nightly
def test_cold_and_warm(scripted, expected):
    with opened(scripted, memory()) as llm:
        check_rounds(llm, expected)
        assert tiers_of(llm)["memory"].loaded_blocks > 50
        assert not llm.plugins.health().fallbacks


NEAR_BYTES = 400_000


def durable(name: str, path: Path) -> dict[str, Any]:
    """Return the configuration of stores that outlive their engine, with a small one in front."""
    tables = {
        "memory": {"size_bytes": NEAR_BYTES},
        "disk": {"path": str(path), "size_bytes": 1 << 26},
    }
    if name == "folder":
        return folder(path)
    if name == "chain":
        return stored("chain", chain={"stores": ["memory", "disk"], "write": "behind"}, **tables)
    names = name.split(" and ")
    return stored(*names, **{store: tables[store] for store in names})


DURABLE = ["folder", "disk", "memory and disk", "chain"]


def nightly_but(short: set[str], names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[] if n in short else pytest.mark.nightly) for n in names]


@pytest.mark.nightly
@pytest.mark.parametrize("store", nightly_but({"disk"}, DURABLE))
def test_after_a_restart(scripted, expected, tmp_path, store):
    for _ in range(2):
        with opened(scripted, durable(store, tmp_path / "blocks")) as llm:
            check_rounds(llm, expected, rounds=1)
            loaded = sum(tier.loaded_blocks for tier in tiers_of(llm).values())
            assert not llm.plugins.health().fallbacks
    assert loaded > 50


@pytest.mark.nightly
@pytest.mark.parametrize("store", DURABLE)
@pytest.mark.parametrize("ranks", ["tensor 2", "pipeline 2"])
def test_llama_after_a_restart(llama, tmp_path, store, ranks):
    config, expected = llama
    for _ in range(2):
        tables = durable(store, tmp_path / "blocks")
        with open_llm(parallel_config(*RANKS[ranks], **config, **tables)) as llm:
            check_llama(llm, expected, rounds=1)
            loaded = sum(tier.loaded_blocks for tier in tiers_of(llm).values())
            assert not llm.plugins.health().fallbacks
    assert loaded > 50


OFF = {"kv_cache": {"prefix_caching": False}}
SHORT = {"write behind"}
CHOICES = {
    "write behind": ({"write": "behind"}, {}),
    "one thread": ({"threads": 1, "save_threads": 1}, {}),
    "room for one block": ({"save_bytes": 1}, {}),
    "wait for room": ({"save_bytes": 1, "save_wait_seconds": 1.0}, {}),
    "no prefix caching": ({}, OFF),
    "large blocks": ({}, {"kv_cache": {"block_size": 16, "num_blocks": 12}}),
    "small chunks": ({}, {"scheduler": {"max_num_batched_tokens": 9}}),
    "fair": ({}, {"scheduler": {"policy": "fair"}}),
    "another hash": ({}, {"kv_cache": {"hash_algorithm": "blake2b"}}),
    "engine process": ({}, {"engine": {"in_process": False}}),
}


@pytest.mark.parametrize("choice", nightly_but(SHORT, CHOICES))
def test_every_choice(scripted, expected, choice):
    """Two stores; the nearest evicts most of its blocks."""
    options, settings = CHOICES[choice]
    near = {"use": "memory", "name": "near"}
    stores = stored(near, "memory", options=options, near={"size_bytes": 4000})
    with opened(scripted, stores, settings) as llm:
        check_rounds(llm, expected)
        tiers = tiers_of(llm)
        assert tiers["memory"].loaded_blocks > 30
        assert tiers["near"].misses > 100
        assert not llm.plugins.health().fallbacks


@pytest.mark.nightly
def test_a_store_that_fails_now_and_then(scripted, expected, tmp_path):
    with opened(scripted, hostile(tmp_path / "blocks", share=0.2)) as llm:
        check_rounds(llm, expected)
        assert tiers_of(llm)["hostile"].loaded_blocks > 10
        assert tiers_of(llm)["hostile"].failures > 3


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_always_fails(scripted, expected, tmp_path, way):
    path = tmp_path / "blocks"
    if way != "invent":
        with opened(scripted, folder(path)) as llm:
            check_rounds(llm, expected, rounds=1)  # what there is to load
    with opened(scripted, hostile(path, share=1.0, ways=[way])) as llm:
        check_rounds(llm, expected)
        failures = tiers_of(llm)["hostile"].failures
        assert (failures > 0) == (way not in ("forget", "slow"))


# Several ranks, and a model with layers


RANKS = {"one rank": (1, 1), "tensor 2": (2, 1), "pipeline 2": (1, 2), "2 x 2": (2, 2)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the configuration of a small Llama, and its results without stores."""
    path = tmp_path_factory.mktemp("random") / "llama"
    write_random_model(path, "LlamaForCausalLM", num_hidden_layers=4)
    config = {"model": str(path), "load": {"use": "dummy"}}
    return config, reference_of(config, mixed_jobs())


def check_llama(llm: LLM, expected: dict[str, Any], rounds: int = 2) -> None:
    """Compare rounds of requests with grammars, seeds, log-probabilities and more."""
    engine, jobs = engine_of(llm), mixed_jobs()
    for _ in range(rounds):
        same(engine, jobs, expected, drive(engine, jobs))
        llm.reset_prefix_cache()
        stats = llm.engines.scheduler_stats()
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0
    assert stats.num_preemptions > 3


CASES = [(ranks, groups) for ranks in RANKS for groups in (1, 2)]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "groups"), CASES)
def test_llama(llama, ranks, groups):
    config, expected = llama
    settings = parallel_config(*RANKS[ranks], **config, **memory(layer_groups=groups))
    with open_llm(settings) as llm:
        check_llama(llm, expected)
        tiers = tiers_of(llm)
        assert tiers["memory"].loaded_blocks > 50 * groups
        assert not llm.plugins.health().fallbacks


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", RANKS)
def test_llama_with_a_store_that_fails(llama, tmp_path, ranks):
    config, expected = llama
    settings = parallel_config(*RANKS[ranks], **config, **hostile(tmp_path / "blocks", share=0.2))
    with open_llm(settings) as llm:
        check_llama(llm, expected)
        assert tiers_of(llm)["hostile"].failures > 3


# What happens while blocks are loaded and saved

LONG = [index * 11 % 250 for index in range(100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def slow(path: Path, seconds: float, **options: Any) -> dict[str, Any]:
    """Return the configuration of a store with calls of this duration."""
    store = {"use": f"{STORES}:HostileStore", "name": "slow"}
    settings = {"path": str(path), "ways": ["slow"], "share": 1.0, "slow_seconds": seconds}
    return stored(store, options=options, slow=settings)


def test_what_several_requests_need_is_loaded_once(scripted, tmp_path):
    with opened(scripted, folder(tmp_path)) as llm:
        (alone_,) = llm.generate([LONG], GREEDY)
    roomy = {"kv_cache": {"block_size": 8, "num_blocks": 200}}
    with opened(scripted, slow(tmp_path, 0.01), roomy) as llm:
        outputs = llm.generate([LONG] * 6 + [LONG[:60]] * 2, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs[:6]] == [alone_.outputs[0].token_ids] * 6
        assert [o.num_cached_tokens for o in outputs] == [96] * 6 + [56] * 2
        assert tiers_of(llm)["slow"].loaded_blocks == 12  # of 8 tokens each
        assert llm.engines.scheduler_stats().kv_cache_usage == 0


@pytest.mark.nightly
def test_a_store_that_has_room_for_few(scripted, expected):
    with opened(scripted, memory(4000)) as llm:
        check_rounds(llm, expected)
        assert 0 < tiers_of(llm)["memory"].loaded_blocks < 200


@pytest.mark.nightly
def test_requests_that_leave(scripted, expected, tmp_path):
    """Neighbours are aborted or time out, while their blocks are loaded or saved."""
    with opened(scripted, folder(tmp_path)) as llm:
        check_rounds(llm, expected, rounds=1)
    jobs = jobs_with_stops()
    with opened(scripted, slow(tmp_path, 0.003)) as llm:
        engine, results, step = engine_of(llm), {}, 0
        while jobs or engine.has_unfinished_requests():
            for request_id, prompt, params in jobs[:2]:
                engine.add_request(request_id, prompt, params)
                limit = RequestExtras(timeout=0.001 + step % 7 * 0.002)
                engine.add_request(f"late {request_id}", prompt, params, limit)
                engine.add_request(f"left {request_id}", prompt, params)
            jobs, step = jobs[2:], step + 1
            left = [f"left r{index}" for index in range(40) if (index + step) % 3 == 0]
            engine.abort_requests(left)
            for output in engine.step():
                if output.finished:
                    results[output.request_id] = [summary(output)]
        assert {name: results[name] for name in expected} == expected
        stats = llm.engines.scheduler_stats()
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0
        assert tiers_of(llm)["slow"].loaded_blocks > 20
        assert not llm.plugins.health().fallbacks


class Hangs(FolderStore):
    """Its calls take a minute, unless they are let go."""

    contract = 1
    let_go = threading.Event()

    def lookup(self, keys):
        self.let_go.wait(60)
        return super().lookup(keys)

    def store(self, key, buffer):
        self.let_go.wait(60)
        return super().store(key, buffer)

    def load(self, key, buffer):
        self.let_go.wait(60)
        return super().load(key, buffer)


def test_a_store_that_hangs_keeps_no_request_for_long(scripted, tmp_path):
    with opened(scripted, folder(tmp_path)) as llm:
        (before,) = llm.generate([LONG], GREEDY)
    store, limit = {"use": f"{__name__}:Hangs", "name": "hangs"}, {"timeout_seconds": 0.05}
    hangs = stored(store, options=limit, hangs={"path": str(tmp_path)})
    hangs["kv_connector"]["load_seconds"] = 0.2
    Hangs.let_go.clear()
    with opened(scripted, hangs) as llm:
        began = time.monotonic()
        for _ in range(3):
            (output,) = llm.generate([LONG], GREEDY)
            assert output.outputs[0].token_ids == before.outputs[0].token_ids
            llm.reset_prefix_cache()
        assert time.monotonic() - began < 30
        assert "hangs" in llm.plugins.health().fallbacks
        Hangs.let_go.set()


def reset_cache(engine):
    engine.call_utility("reset_prefix_cache", True)


def pause_and_resume(engine):
    engine.call_utility("pause", "keep")
    engine.call_utility("resume")


def sleep_and_wake(level):
    def call(engine):
        engine.call_utility("sleep", level, "keep")
        engine.call_utility("wake_up", None)

    return call


BETWEEN = [reset_cache, pause_and_resume, sleep_and_wake(1), sleep_and_wake(2)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "groups"),
    [pytest.param(*c, marks=[] if c == ("one rank", 2) else pytest.mark.nightly) for c in CASES],
)
def test_calls_between_steps(llama, tmp_path, ranks, groups):
    """The cache is reset, the engine pauses and sleeps, while blocks are loaded and saved."""
    config, expected = llama
    jobs = mixed_jobs()
    store = slow(tmp_path / "blocks", 0.002, layer_groups=groups)
    with open_llm(parallel_config(*RANKS[ranks], **config, **store)) as llm:
        engine = engine_of(llm)
        for _ in range(2):
            calls = {5 + 6 * index: call for index, call in enumerate(BETWEEN * 2)}
            same(engine, jobs, expected, drive(engine, jobs, before_step=calls))
            llm.reset_prefix_cache()
        assert tiers_of(llm)["slow"].loaded_blocks > 0
        assert llm.engines.scheduler_stats().kv_cache_usage == 0
        assert not llm.plugins.health().fallbacks
