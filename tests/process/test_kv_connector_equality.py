"""With blocks that are kept in stores, requests get the tokens that they get without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.driving import Job, alone, run, varied_jobs
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

from hardpoint import LLM
from hardpoint.plugins.stats import KVTierStats
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
    """Return the configuration of a store that lies, in front of one that does not."""
    store = {"use": f"{STORES}:HostileStore", "name": "hostile"}
    given = {"path": str(path), "ways": ways, "share": share}
    return stored(store, options={"timeout_seconds": 0.2, "breaker_seconds": 0.1}, hostile=given)


def tiers_of(llm: LLM) -> dict[str, KVTierStats]:
    return llm.scheduler_stats().kv_tiers


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
    """Compare rounds, each of which finds nothing in the KV cache."""
    engine, jobs = engine_of(llm), jobs_with_stops()
    for _ in range(rounds):
        assert run(engine, jobs, per_step=2) == expected
        llm.reset_prefix_cache()
        stats = llm.scheduler_stats()
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0
    assert llm.scheduler_stats().num_preemptions > 0  # else TIGHT would prove nothing


def test_cold_and_warm(scripted, expected):
    with opened(scripted, memory()) as llm:
        check_rounds(llm, expected)
        assert tiers_of(llm)["memory"].loaded_blocks > 50
        assert not llm.health().fallbacks


def test_after_a_restart(scripted, expected, tmp_path):
    for _ in range(2):
        with opened(scripted, folder(tmp_path / "blocks")) as llm:
            check_rounds(llm, expected, rounds=1)
            loaded = tiers_of(llm)["folder"].loaded_blocks
            assert not llm.health().fallbacks
    assert loaded > 50


OFF = {"kv_cache": {"prefix_caching": False}}
SHORT = {"no prefix caching", "small chunks", "write behind"}
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


def nightly_but(short: set[str], names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[] if n in short else pytest.mark.nightly) for n in names]


@pytest.mark.parametrize("choice", nightly_but(SHORT, CHOICES))
def test_every_choice(scripted, expected, choice):
    """Two stores, of which the nearest evicts most of what it gets."""
    options, settings = CHOICES[choice]
    near = {"use": "memory", "name": "near"}
    stores = stored(near, "memory", options=options, near={"size_bytes": 4000})
    with opened(scripted, stores, settings) as llm:
        check_rounds(llm, expected)
        tiers = tiers_of(llm)
        assert tiers["memory"].loaded_blocks > 30
        assert tiers["near"].misses > 100
        assert not llm.health().fallbacks


def test_a_store_that_fails_now_and_then(scripted, expected, tmp_path):
    with opened(scripted, hostile(tmp_path / "blocks", share=0.2)) as llm:
        check_rounds(llm, expected)
        assert tiers_of(llm)["hostile"].loaded_blocks > 10
        assert tiers_of(llm)["hostile"].failures > 3


@pytest.mark.parametrize("way", nightly_but({"damage"}, WAYS))
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
    """Return the configuration of a small Llama, and what it gives without stores."""
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
        stats = llm.scheduler_stats()
        assert stats.num_running == stats.num_waiting == stats.kv_cache_usage == 0
    assert stats.num_preemptions > 3


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ranks", nightly_but({"one rank", "tensor 2"}, RANKS))
def test_llama(llama, ranks, groups):
    config, expected = llama
    settings = parallel_config(*RANKS[ranks], **config, **memory(layer_groups=groups))
    with open_llm(settings) as llm:
        check_llama(llm, expected)
        tiers = tiers_of(llm)
        assert tiers["memory"].loaded_blocks > 50 * groups
        assert not llm.health().fallbacks


@pytest.mark.parametrize("ranks", nightly_but({"one rank"}, RANKS))
def test_llama_with_a_store_that_fails(llama, tmp_path, ranks):
    config, expected = llama
    settings = parallel_config(*RANKS[ranks], **config, **hostile(tmp_path / "blocks", share=0.2))
    with open_llm(settings) as llm:
        check_llama(llm, expected)
        assert tiers_of(llm)["hostile"].failures > 3
