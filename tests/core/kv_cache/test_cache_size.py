"""The size of the KV cache, and the error when it is too small."""

from __future__ import annotations

import dataclasses

import pytest

from hardpoint import ConfigError, EngineConfig, SamplingParams
from hardpoint.configuration.loading import load_config
from hardpoint.core.kv_cache import CacheSize, size_cache
from hardpoint.plugins import WorkerInfo
from hardpoint.plugins.config_tables import KVCacheConfig, SchedulerConfig
from hardpoint.testing import scripted_engine


def config(max_model_len=None, **fields) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        kv_cache=KVCacheConfig(**fields),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


def size(wished: int, info: WorkerInfo, **fields) -> int:
    found = size_cache(config(**fields), wished, info)
    assert found.max_model_len == wished
    return found.num_blocks


def test_size_by_blocks_then_bytes_then_share():
    info = WorkerInfo(bytes_per_block=100, available_bytes=10**9)
    assert size(128, info, num_blocks=11, memory_bytes=1_050) == 11
    assert size(128, info, memory_bytes=1_050) == 10
    assert size(160, info) == 40  # 4 requests of 10 blocks
    assert size(160, WorkerInfo(100, 5_000)) == 20  # 40 % of 5000 bytes
    assert size(160, WorkerInfo(100, 5_000, cache_share=0.9)) == 40
    assert size(160, WorkerInfo(100, 5_000), memory_fraction=0.6) == 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"memory_bytes": 1_000},
            "kv_cache.memory_bytes: one request of 512 tokens needs 32 blocks (3200 bytes) of KV "
            "cache, more than kv_cache.memory_bytes = 1000; a max_model_len of 160 would fit",
        ),
        (
            {"num_blocks": 1},
            "kv_cache.num_blocks: one request of 512 tokens needs 32 blocks (3200 bytes) of KV "
            "cache, more than kv_cache.num_blocks = 1; a max_model_len of 16 would fit",
        ),
        (
            {"memory_bytes": 99},
            "kv_cache.memory_bytes: one request of 512 tokens needs 32 blocks (3200 bytes) of KV "
            "cache, more than kv_cache.memory_bytes = 99; not even one block fits",
        ),
        (
            {"memory_fraction": 0.5},
            "kv_cache.memory_fraction: one request of 512 tokens needs 32 blocks (3200 bytes) of "
            "KV cache, more than 50% of the 2000 bytes that are available; a max_model_len of 160 "
            "would fit",
        ),
    ],
)
def test_too_small_a_cache_names_the_length_that_fits(fields, message):
    with pytest.raises(ConfigError) as error:
        size_cache(config(**fields), 512, WorkerInfo(100, 2_000))
    assert str(error.value) == message


def test_auto_takes_the_context_that_fits():
    info = WorkerInfo(100, 10**9)
    assert size_cache(config("auto", memory_bytes=1_000), 512, info) == CacheSize(10, 160)
    assert size_cache(config("auto", memory_bytes=10**6), 512, info) == CacheSize(10_000, 512)
    with pytest.raises(ConfigError, match="not even one block fits"):
        size_cache(config("auto", memory_bytes=10), 512, info)


WINDOWED = WorkerInfo(100, 2_000, windows=(None, 32))
"""A full group, and one of windows: 32 tokens and those of a step, 64, touch 7 blocks at most."""


def with_steps(max_model_len=None, **fields) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return EngineConfig(
        max_model_len=max_model_len, kv_cache=KVCacheConfig(**fields), scheduler=scheduler
    )


def test_windows_lower_what_requests_need():
    info = dataclasses.replace(WINDOWED, available_bytes=10**9)
    # The null block comes once.
    assert size_cache(with_steps(), 512, info) == CacheSize(4 * (32 + 7) + 1, 512)
    all_windows = dataclasses.replace(info, windows=(32,))
    assert size_cache(with_steps(), 512, all_windows) == CacheSize(4 * 7 + 1, 512)


def test_windows_are_in_the_message_about_too_small_a_cache():
    with pytest.raises(ConfigError) as error:
        size_cache(with_steps(memory_bytes=2_000), 512, WINDOWED)
    assert str(error.value) == (
        "kv_cache.memory_bytes: one request of 512 tokens needs 40 blocks (4000 bytes) of KV "
        "cache, more than kv_cache.memory_bytes = 2000; a max_model_len of 192 would fit"
    )
    assert size_cache(with_steps(memory_bytes=2_000), 192, WINDOWED) == CacheSize(20, 192)
    with pytest.raises(ConfigError, match="a max_model_len of 192 would fit"):
        size_cache(with_steps(memory_bytes=2_000), 193, WINDOWED)
    with pytest.raises(ConfigError, match="not even one block fits"):
        size_cache(with_steps(memory_bytes=200), 512, WINDOWED)


def test_auto_counts_windows():
    assert size_cache(with_steps("auto", memory_bytes=2_000), 512, WINDOWED) == CacheSize(20, 192)
    all_windows = dataclasses.replace(WINDOWED, windows=(32,))
    assert size_cache(with_steps("auto", memory_bytes=800), 512, all_windows) == CacheSize(8, 512)
    assert size_cache(with_steps("auto", memory_bytes=700), 512, all_windows) == CacheSize(7, 96)


def test_a_context_that_was_fitted_is_told_and_enforced(open_engine):
    engine = open_engine({"max_model_len": "auto", "kv_cache": {"num_blocks": 3}})
    assert engine.parts.config.max_model_len == 48
    assert engine.parts.config.kv_cache.num_blocks == 3
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    engine.add_request("r", [1] * 20, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert len(outputs[0].outputs[0].token_ids) == 28
    assert outputs[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_cache": {"num_blocks": 1}}, "kv_cache.num_blocks: one request of 512 tokens needs"),
        (
            {"kv_cache": {"block_size": 24}},
            "kv_cache.block_size: expected a power of two, 16 or 32, got 24 (from default)",
        ),
        (
            {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 511}},
            "scheduler.max_num_batched_tokens: expected at least max_model_len (512) without "
            "scheduler.chunked_prefill, got 511 (from default)",
        ),
        (
            {
                "scheduler": {
                    "chunked_prefill": False,
                    "max_num_batched_tokens": 512,
                    "long_prefill_token_threshold": 64,
                }
            },
            "scheduler.long_prefill_token_threshold: expected 0 without "
            "scheduler.chunked_prefill, got 64 (from default)",
        ),
        (
            {"scheduler": {"policy": "fcsf"}},
            "scheduler.policy: no scheduling_policies component is called 'fcsf' (did you mean "
            "'fcfs'?); found: fair, fcfs, priority, shortest_first (from default)",
        ),
        (
            {"kv_cache": {"eviction": "fifo"}},
            "kv_cache.eviction: no eviction_policies component is called 'fifo'; found: lru "
            "(from default)",
        ),
    ],
)
def test_limits_that_cannot_work_are_refused(scripted, extra, message):
    with pytest.raises(Exception) as error:  # noqa: PT011 - the words are what counts
        scripted_engine(scripted, extra)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "kv_cache.num_blocks=0",
            "kv_cache.num_blocks: expected a whole number >= 1, got 0",
        ),
        ("kv_cache.watermark=1", "kv_cache.watermark: expected a number < 1, got 1"),
        ("scheduler.max_waiting=0", "scheduler.max_waiting: expected a whole number >= 1, got 0"),
        ("kv_cache.hash_algorithm=md5", 'kv_cache.hash_algorithm: expected "blake2b" or "sha256"'),
    ],
)
def test_wrong_values_are_told(setting, message):
    with pytest.raises(ConfigError) as error:
        load_config(settings=[setting], environ={})
    assert message in str(error.value)
