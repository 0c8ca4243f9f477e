"""The size of a KV cache with states: how its memory is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint import ConfigError, EngineConfig
from hardpoint.core.kv_cache import size_cache
from hardpoint.plugins import WorkerInfo
from hardpoint.plugins.cache_memory import CacheMemory, tightest
from hardpoint.plugins.config_tables import KVCacheConfig, SchedulerConfig
from hardpoint.plugins.kv_cache.manager import STATE_WINDOW

GIB = 1 << 30
# Qwen3-Next-80B in bfloat16: 12 layers with 2 heads of 256 for keys and for values; 36 with 32
# matrices of 128 x 128 in float32 and 3 inputs of a convolution of 8192 channels.
KEYS = 12 * 2 * 2 * 256 * 2
STATE = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def info_of(keys: int, state: int, available: int = 1 << 50, **fields) -> WorkerInfo:
    windows = (None, STATE_WINDOW) if keys else (STATE_WINDOW,)
    fields = {"cache_share": 1.0, "windows": windows} | fields
    return WorkerInfo(keys, available, has_states=True, bytes_per_state=state, **fields)


def config_of(max_model_len=None, max_num_seqs=256, **cache) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        kv_cache=KVCacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def divided(config: EngineConfig, max_model_len: int, info: WorkerInfo) -> tuple[int, int]:
    """Return the blocks for keys, that of no request included, and those for states."""
    size = size_cache(config, max_model_len, info)
    assert size.max_model_len == max_model_len
    return size.num_blocks - size.num_states, size.num_states


def test_the_figures_of_qwen3_next():
    """At default settings, in 40 GiB; as docs/scheduler.md has them."""
    assert (KEYS, STATE) == (24 << 10, 77_266_944)
    keys, states = divided(config_of(), 32_768, info_of(16 * KEYS, STATE, 40 * GIB))
    assert (16 * (keys - 1), states) == (874_016, 277)
    assert 16 * keys * KEYS + states * STATE <= 40 * GIB
    # When a block had room for both:
    assert 16 * (40 * GIB // (16 * KEYS + STATE) - 1) == 8_832


def test_more_memory_than_states_need_is_for_keys():
    info = info_of(16 * KEYS, STATE, 400 * GIB)
    keys, states = divided(config_of(max_num_seqs=64), 262_144, info)
    assert states == 4 * 64
    assert keys == (400 * GIB - states * STATE) // (16 * KEYS)


def test_the_longest_request_comes_before_further_states():
    info = info_of(100, 1_000)
    assert divided(config_of(memory_bytes=20_000), 320, info) == (100, 10)
    assert divided(config_of(memory_bytes=20_000), 2_400, info) == (151, 4)
    assert divided(config_of(memory_bytes=20_000), 16 * 169, info) == (170, 3)
    with pytest.raises(ConfigError) as error:
        size_cache(config_of(memory_bytes=20_000), 16 * 170, info)
    assert str(error.value) == (
        "kv_cache.memory_bytes: one request of 2720 tokens needs 174 blocks (20100 bytes) of KV "
        "cache, more than kv_cache.memory_bytes = 20000; a max_model_len of 2704 would fit"
    )
    # Where the length is found, there are as many states as otherwise.
    found = size_cache(config_of("auto", memory_bytes=20_000), 16 * 170, info)
    assert (found.num_blocks, found.max_model_len, found.num_states) == (110, 16 * 99, 10)
    # Further replicas get both, and divide the blocks alike.
    assert size_cache(config_of(16 * 99, num_blocks=110), 16 * 99, info) == found


def test_less_than_a_request_holds_does_not_fit():
    with pytest.raises(ConfigError, match="not even one block fits"):
        size_cache(config_of("auto", memory_bytes=3_100), 512, info_of(100, 1_000))
    found = size_cache(config_of("auto", memory_bytes=3_200), 512, info_of(100, 1_000))
    assert (found.num_blocks, found.max_model_len, found.num_states) == (5, 16, 3)


def test_layers_with_states_alone():
    assert divided(config_of(memory_bytes=20_000), 512, info_of(0, 1_000)) == (1, 20)
    with pytest.raises(
        ConfigError, match="more than kv_cache.memory_bytes = 2999; a max_model_len"
    ):
        size_cache(config_of(memory_bytes=2_999), 512, info_of(0, 1_000))


def test_ranks_have_as_many_of_both_kinds():
    """Stages of a pipeline with other layers each: the largest sizes, in the least memory."""
    infos = [info_of(100, 0, 9_000), info_of(0, 1_000, 8_000), info_of(50, 500, 7_000)]
    found = tightest(infos, None)
    assert (found.bytes_per_block, found.bytes_per_state) == (100, 1_000)
    assert found.available_bytes == 7_000
    plain = [WorkerInfo(100, 9_000), WorkerInfo(50, 5_000), WorkerInfo(70, 6_000)]
    assert tightest(plain, None) is plain[2]
    assert tightest(plain, 100) is plain[0]


sizes = st.integers(1, 3_000)


@given(sizes, sizes, st.integers(1, 40), st.integers(1, 4_000), st.integers(0, 10**6))
def test_what_fits_is_used_and_found_again(keys, state, seqs, length, memory):
    info, config = info_of(keys, state), config_of(max_num_seqs=seqs, memory_bytes=memory)
    cache = CacheMemory.of_rank(config, info, length)
    count = cache.num_blocks(memory)
    assert not count or cache.size(count) <= memory < cache.size(count + 1)
    states = cache.num_states(count)
    assert min(3, -(-length // 16)) <= states <= max(3, 4 * seqs)
    if cache.of(length) > memory:
        with pytest.raises(ConfigError, match="kv_cache.memory_bytes: one request of"):
            size_cache(config, length, info)
        return
    found = size_cache(config, length, info)
    assert (found.num_blocks, found.num_states) == (count, states)
    # Further replicas get the number of all blocks, and find as many states.
    again = size_cache(config_of(max_num_seqs=seqs, num_blocks=count), length, info)
    assert again == found
