"""The block manager against a naive one, and the sizing of the cache."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint import ConfigError, EngineConfig, SamplingParams
from hardpoint.core.kv_cache import BlockManager, size_cache
from hardpoint.plugins import EngineCoreRequest, Request, WorkerInfo
from hardpoint.plugins.config import KVCacheConfig, SchedulerConfig


def request(name: str) -> Request:
    return Request(
        EngineCoreRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())
    )


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 16]),
    moves=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=40
    ),
)
def test_no_block_is_held_twice_or_lost(num_blocks, block_size, moves):
    manager = BlockManager(num_blocks, block_size)
    live = {name: request(name) for name in "abcd"}
    held: dict[str, list[int]] = {name: [] for name in live}
    for name, tokens, leave in moves:
        if leave:
            manager.free(live[name])
            held[name], live[name].num_computed_tokens = [], 0
            continue
        wanted = -(-(live[name].num_computed_tokens + tokens) // block_size) - len(held[name])
        free = num_blocks - sum(map(len, held.values()))
        new = manager.allocate(live[name], tokens)
        if wanted > free:
            assert new is None
        else:
            assert new is not None
            assert len(new) == max(wanted, 0)
            held[name] += new
            live[name].num_computed_tokens += tokens
        assert manager.block_ids(live[name]) == held[name]
        every = [block for blocks in held.values() for block in blocks]
        assert len(every) == len(set(every))
        assert manager.num_free_blocks == num_blocks - len(every)


def config(**fields) -> EngineConfig:
    return EngineConfig(kv_cache=KVCacheConfig(**fields), scheduler=SchedulerConfig(max_num_seqs=4))


def test_size_by_bytes():
    info = WorkerInfo(bytes_per_block=100, available_bytes=10**9)
    assert size_cache(config(memory_bytes=1_050), 128, info) == 10


def test_size_by_need_and_by_memory():
    assert size_cache(config(), 160, WorkerInfo(100, 10**9)) == 40  # 4 requests of 10 blocks
    assert size_cache(config(), 160, WorkerInfo(100, 5_000)) == 20  # 40 % of 5000 bytes


def test_too_small_a_cache_names_the_length_that_fits():
    with pytest.raises(ConfigError) as error:
        size_cache(config(memory_bytes=1_000), 512, WorkerInfo(100, 10**9))
    assert str(error.value) == (
        "kv_cache.memory_bytes: one request of 512 tokens needs 3200 bytes of KV cache, more than "
        "kv_cache.memory_bytes = 1000; a max_model_len of 160 would fit"
    )
