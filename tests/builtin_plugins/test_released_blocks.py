"""Step parts release KV blocks of running requests: the same tokens in any batch, few blocks."""

from __future__ import annotations

import re

import pytest
from support.internals import engine_of

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.testing import scripted_config

PART = "support.plugins.evicting:Window"
WINDOW, SIZE = 12, 4
FIRST_RELEASE = WINDOW + 8  # positions from which on tokens do not see all others
PROMPTS = ["a prompt of some length", "short", "another one, which is longer than the window is"]


def config(folder, part=PART, **tables):
    extra = {"plugins": {"enable": [part]}, "kv_cache": {"block_size": SIZE}, **tables}
    return scripted_config(folder, extra)


def params(max_tokens=40, window=WINDOW):
    arguments = {} if window is None else {"plugin_args": {"window": {"window": window}}}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **arguments)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(scripted):
    """The tokens of each prompt, alone in an engine."""
    with LLM(config=config(scripted)) as llm:
        return [tokens_of(llm.generate([prompt], params()))[0] for prompt in PROMPTS]


TABLES = {
    "in chunks": {"scheduler": {"max_num_batched_tokens": 8}},
    "with preemptions": {"kv_cache": {"block_size": SIZE, "num_blocks": 24}, "max_model_len": 96},
    "with drafts": {
        "speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False},
        "plugin": {"scripted_speculator": {"right": 0.7}},
    },
    "planned ahead": {"scheduler": {"asynchronous": True}, "executor": {"use": "uniproc"}},
    "in a process": {"engine": {"in_process": False}},
}


@pytest.mark.parametrize("name", TABLES)
def test_tokens_are_the_same_as_alone(scripted, alone, name):
    with LLM(config=config(scripted, **TABLES[name])) as llm:
        outputs = llm.generate(PROMPTS * 4, params())
        preemptions = llm.engines.scheduler_stats().num_preemptions
    assert tokens_of(outputs) == alone * 4
    assert (preemptions > 0) == (name == "with preemptions")


def test_released_tokens_are_not_seen(scripted, alone):
    with LLM(config=config(scripted)) as llm:
        whole = tokens_of(llm.generate(PROMPTS, params(window=None)))
    for prompt, tokens, others in zip(PROMPTS, whole, alone, strict=True):
        same = max(FIRST_RELEASE - len(prompt), 0)
        assert tokens[:same] == others[:same]
        assert tokens != others


def test_other_requests_find_no_block_after_a_release(scripted, alone):
    with LLM(config=config(scripted)) as llm:
        (output,) = llm.generate(PROMPTS[:1], params())
        known = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        plain = {"prompt_token_ids": known}
        (after,) = llm.generate([plain], params(window=None))
    with LLM(config=config(scripted)) as llm:
        (expected,) = llm.generate([plain], params(window=None))
    assert after.num_cached_tokens == FIRST_RELEASE // SIZE * SIZE
    assert tokens_of([after]) == tokens_of([expected])


def test_a_long_output_holds_the_blocks_of_its_window(scripted):
    with LLM(
        config=config(scripted, kv_cache={"block_size": SIZE, "num_blocks": 64}, max_model_len=256)
    ) as llm:
        peak, engine = 0, engine_of(llm)
        for _output in llm.stream("a prompt", params(max_tokens=200)):
            usage = engine.call_utility("scheduler_stats").kv_cache_usage
            peak = max(peak, round(usage * 64))
    assert peak <= (WINDOW + 8) // SIZE + 3


PART_ERRORS = {
    "Undeclared": r"expected releases_blocks = True in the step part",
    "TooLate": r"at: expected a position from \d+ on, because of \w+ \w+, got 1",
    "Beyond": r"span: expected positions from 0 to 30, got range\(0, 31\)",
}


@pytest.mark.parametrize("name", PART_ERRORS)
def test_a_wrong_release_ends_the_request_with_the_name_of_the_part(scripted, name):
    part = f"support.plugins.evicting:{name}"
    with LLM(config=config(scripted, part)) as llm:
        (output,) = llm.generate(["a prompt"], params(max_tokens=4, window=None))
    (completion,) = output.outputs
    assert completion.finish_reason == "error"
    assert re.search(PART_ERRORS[name], completion.error)
    assert f"evicting:{name}" in completion.error


def test_a_request_with_members_ends_with_an_error(scripted):
    parts = {"plugins": {"enable": [PART, "support.plugins.grouped:Mixed"]}}
    arguments = {"window": {"window": WINDOW}, "mixed": {"prompts": ["ab"]}}
    with LLM(config=config(scripted, **parts)) as llm:
        (output,) = llm.generate(["a prompt"], SamplingParams(plugin_args=arguments))
    (completion,) = output.outputs
    assert completion.finish_reason == "error"
    expected = "release_blocks: .*: members: expected none with released blocks"
    assert re.search(expected, completion.error)


def test_a_scheduler_that_does_not_end_steps_there_is_refused(scripted):
    table = {"scheduler": {"use": "support.broken.schedulers:WithoutReleases"}}
    words = "WithoutReleases.*expected a scheduler with releases_blocks = True, because .*Window"
    with pytest.raises(ConfigError, match=words):
        LLM(config=config(scripted, **table)).close()


def test_whole_prompts_are_refused(scripted):
    table = {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 512}}
    with pytest.raises(ConfigError, match="scheduler.chunked_prefill: expected true, because"):
        LLM(config=config(scripted, **table, max_model_len=256)).close()
