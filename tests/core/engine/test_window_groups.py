"""Layers with a sliding window have blocks of their own, and requests get the tokens they got."""

from __future__ import annotations

import logging

import pytest
import torch
from support.internals import engine_of, scheduler_of, worker_of
from support.parallel import write_random_model

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.kernels import cpu

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = [SLIDING, SLIDING, FULL, SLIDING, FULL]  # of which a cache has two, and there are 3 groups
WINDOW, BLOCK = 20, 8
PROMPTS = [
    {"prompt_token_ids": [(7 * count + i) % 250 for i in range(count)]} for count in (3, 40, 90)
]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, seed=1, n=2)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Their results are the same, bit for bit, in any step."""
    try:
        cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(f"sums of other steps are rounded otherwise without kernels, and they: {cause}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    fields = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": len(LAYERS),
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
    }
    folder = tmp_path_factory.mktemp("random")
    return write_random_model(folder / "qwen2", "Qwen2ForCausalLM", **fields)


def opened(folder, groups, **extra) -> LLM:
    config = {
        "dtype": "float32",
        "device": "cpu",
        "load": {"use": "dummy"},
        "max_model_len": 256,
        "attention": {"use": "native_cpu"},
        **extra,
    }
    config["kv_cache"] = {"block_size": BLOCK, "window_groups": groups, **extra.get("kv_cache", {})}
    return LLM(str(folder), config=config, progress=False)


def results(outputs):
    return [
        (list(part.token_ids), [str(list(place.items())) for place in part.logprobs])
        for output in outputs
        for part in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(folder):
    """Results of requests without groups, each alone in the cache and computed at once."""
    with opened(folder, groups=False, kv_cache={"prefix_caching": False}) as llm:
        return results(llm.generate(PROMPTS, PARAMS))


def windows_of(llm):
    return [group.window for group in scheduler_of(engine_of(llm)).context.kv_cache.groups]


CHUNKED = {"scheduler": {"max_num_batched_tokens": 16}}
CASES = {
    "whole": {},
    "chunked": CHUNKED,
    "eager": CHUNKED | {"executor": {"enforce_eager": True}},
    "uncached": CHUNKED | {"kv_cache": {"prefix_caching": False}},
}


@pytest.mark.parametrize("extra", CASES.values(), ids=CASES)
def test_the_same_tokens(folder, expected, extra, caplog):
    with caplog.at_level(logging.WARNING, "hardpoint"), opened(folder, groups=True, **extra) as llm:
        assert windows_of(llm) == [None, WINDOW, WINDOW]
        for _ in range(2):  # the second round finds blocks of the first one
            assert results(llm.generate(PROMPTS, PARAMS)) == expected
        assert "a repeated step gave other hidden states" not in caplog.text
        hits = llm.engines.scheduler_stats().prefix_cache.hit_tokens
        assert (hits > 0) == extra.get("kv_cache", {}).get("prefix_caching", True)


def test_the_same_tokens_when_blocks_run_out(folder, expected):
    extra = {"kv_cache": {"num_blocks": 50, "watermark": 0.0}, "max_model_len": 136}
    with opened(folder, groups=True, **CHUNKED, **extra) as llm:
        for _ in range(2):
            assert results(llm.generate(PROMPTS, PARAMS)) == expected
        stats = llm.engines.scheduler_stats()
        assert stats.num_preemptions > 3
        assert stats.kv_cache_usage == 0


def test_the_same_tokens_after_sleeps_and_a_reset(folder, expected):
    with opened(folder, groups=True, **CHUNKED) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert results(llm.generate(PROMPTS, PARAMS)) == expected
        hits = llm.engines.scheduler_stats().prefix_cache.hit_tokens
        llm.reset_prefix_cache()
        assert results(llm.generate(PROMPTS[:1], PARAMS)) == expected[:2]
        assert llm.engines.scheduler_stats().prefix_cache.hit_tokens == hits


def test_blocks_that_a_window_has_passed_are_not_read(folder, expected, monkeypatch):
    """Free blocks are filled with NaN before each step."""
    caches, filled = [], []
    allocate = CheckedAttention.allocate

    def allocated(self, num_blocks):
        caches[:] = allocate(self, num_blocks)
        return list(caches)

    monkeypatch.setattr(CheckedAttention, "allocate", allocated)
    with opened(folder, groups=True, kv_cache={"prefix_caching": False}, **CHUNKED) as llm:
        engine = engine_of(llm)
        pool, runner = scheduler_of(engine).context.kv_cache.pool, worker_of(engine).runner
        execute = runner.execute

        def fill(plan):
            for cache in {id(cache): cache for cache in caches}.values():
                cache[pool.empty] = torch.nan
            filled.append(len(pool.empty))
            return execute(plan)

        monkeypatch.setattr(runner, "execute", fill)
        assert results(llm.generate(PROMPTS, PARAMS)) == expected
    assert min(filled) < max(filled) - 20


def most_held(llm, num_tokens) -> int:
    """Return the bytes of the most blocks that a request of so many tokens holds at once."""
    engine, params = engine_of(llm), SamplingParams(max_tokens=20, ignore_eos=True)
    cache, held = scheduler_of(engine).context.kv_cache, 0
    engine.add_request("one", [1] * (num_tokens - 20), params)
    while engine.has_unfinished_requests():
        engine.step()
        held = max(held, cache.num_usable_blocks - cache.num_free_blocks)
    assert held <= cache.blocks_needed(num_tokens)
    return held * worker_of(engine).runner.attention.bytes_per_block


def test_requests_hold_less_memory(folder):
    held = {}
    for groups in (False, True):
        with opened(folder, groups=groups, **CHUNKED) as llm:
            held[groups] = most_held(llm, 240)
            block = worker_of(engine_of(llm)).runner.attention.layer_bytes[0]
    print(f"a request of 240 tokens holds {held[False]} bytes, with groups {held[True]}")
    assert held[False] == 30 * 5 * block
    # 30 blocks of the full layers, of the others those that 20 - 1 + 16 tokens touch.
    assert 30 * 2 * block < held[True] <= (30 + 2 * 6) * 2 * block


def test_one_window_for_all_layers_is_one_group(folder, tmp_path):
    fields = {"hidden_size": 64, "intermediate_size": 96, "sliding_window": WINDOW}
    write_random_model(tmp_path / "mistral", "MistralForCausalLM", **fields)
    held, tokens = {}, {}
    for groups in (False, True):
        with opened(tmp_path / "mistral", groups=groups, **CHUNKED) as llm:
            assert windows_of(llm) == [WINDOW if groups else None]
            tokens[groups] = results(llm.generate(PROMPTS, PARAMS))
            held[groups] = most_held(llm, 240)
    assert tokens[False] == tokens[True]
    assert held[True] * 5 <= held[False]


def test_a_window_that_sees_every_request_makes_no_group(folder, expected):
    with opened(folder, groups=True, max_model_len=WINDOW) as llm:
        assert windows_of(llm) == [None]


def test_the_smallest_cache_serves_the_longest_request(folder):
    longest = {"max_model_len": 200, **CHUNKED}
    # 25 blocks of the full layers; 20 - 1 + 16 tokens of the others touch 6 blocks; the null block.
    needed = 25 + 2 * 6 + 1
    with opened(folder, groups=True, kv_cache={"num_blocks": needed}, **longest) as llm:
        (output,) = llm.generate(PROMPTS[2], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 110
        assert output.outputs[0].finish_reason == "length"
    words = (
        f"^kv_cache.num_blocks: one request of 200 tokens needs {needed} blocks .*; a "
        f"max_model_len of 192 would fit"
    )
    with pytest.raises(ConfigError, match=words):
        opened(folder, groups=True, kv_cache={"num_blocks": needed - 1}, **longest)
