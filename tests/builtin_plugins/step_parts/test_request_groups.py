"""Groups of requests in an engine: combinations, limits and errors."""

from __future__ import annotations

import time

import pytest

from hardpoint import LLM, HardpointError, RequestError, SamplingParams
from hardpoint.testing import scripted_config

HERE = "support.plugins.grouped"
MIXED = {"plugins": {"enable": [f"{HERE}:Mixed"]}}
SHORT_STEPS = {"chunked_prefill": False, "max_num_batched_tokens": 32}
PROMPTS = ["say", "a longer prompt that needs more than one block of the cache", "b" * 40]
MEMBERS = [["no"], ["something else of another length"], ["one", "and another of them"]]
SETTINGS = {
    "chunks": {"scheduler": {"max_num_batched_tokens": 16}},
    "threshold": {"scheduler": {"long_prefill_token_threshold": 3}},
    "few blocks": {"max_model_len": 128, "kv_cache": {"num_blocks": 16, "watermark": 0.0}},
    "step by step": {"scheduler": {"asynchronous": False}},
    "step time": {"scheduler": {"step_milliseconds": 1.0}},
    "no prefix cache": {"kv_cache": {"prefix_caching": False}},
    "drafts": {"speculation": {"use": ["hardpoint.testing:ScriptedSpeculator"], "adaptive": False}},
    "own process": {"engine": {"in_process": False}},
}


def params(prompts, **fields):
    arguments = {name: fields.pop(name) for name in ("fails_at", "gives") if name in fields}
    fields = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields}
    return SamplingParams(plugin_args={"mixed": {"prompts": prompts, **arguments}}, **fields)


def token_ids(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(scripted):
    """The tokens of each group alone, and of the plain request."""
    with LLM(config=scripted_config(scripted, MIXED)) as llm:
        groups = [
            token_ids(llm.generate([prompt], params(members)))[0]
            for prompt, members in zip(PROMPTS, MEMBERS, strict=True)
        ]
        plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        return [*groups, token_ids(llm.generate(["say"], plain))[0]]


@pytest.mark.parametrize("name", SETTINGS)
def test_groups_among_others_have_their_tokens(scripted, alone, name):
    assert alone[0] != alone[3]
    config = scripted_config(scripted, {**MIXED, **SETTINGS[name]})
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(config=config) as llm:
        for _ in range(2):
            every = [*map(params, MEMBERS), plain]
            assert token_ids(llm.generate([*PROMPTS, "say"], every)) == alone
        stats = llm.engines.scheduler_stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        if name == "few blocks":
            assert stats.num_preemptions
        if name == "drafts":
            assert stats.num_drafts


@pytest.fixture(scope="module")
def llm(scripted):
    with LLM(config=scripted_config(scripted, MIXED)) as llm:
        yield llm


def test_completions_have_groups_of_their_own(llm, alone):
    (output,) = llm.generate(["say"], params(["no"], n=3))
    assert [completion.token_ids for completion in output.outputs] == alone[0] * 3


def test_sampled_tokens_stop_strings_and_logprobs_are_of_the_combination(llm):
    seeded = params(["no"], temperature=1.0, seed=3, logprobs=1, repetition_penalty=1.3)
    first, second = (llm.generate(["say"], seeded)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert [
        set(entry) & {token} for entry, token in zip(first.logprobs, first.token_ids, strict=True)
    ] == [{token} for token in first.token_ids]
    stopped = llm.generate(["say"], params(["no"], stop=[first.text[:1] or "x"]))[0]
    assert stopped.finished


def test_a_group_ends_at_the_longest_member(scripted):
    config = scripted_config(scripted, {**MIXED, "max_model_len": 48})
    with LLM(config=config) as llm:
        (output,) = llm.generate(["say"], params(["b" * 40], max_tokens=40))
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 48 - 40
        with pytest.raises(RequestError, match="maximum context length is 48"):
            llm.generate(["say"], params(["b" * 60]))
        assert len(llm.generate(["say"], params(["no"], max_tokens=2))[0].outputs[0].token_ids) == 2


def test_a_fault_of_combine_ends_its_request_alone(llm, alone):
    asked = [params(["no"], fails_at=0), params(MEMBERS[1]), params(["no"], gives="rows")]
    faulty, good, wrong = llm.generate(["say", PROMPTS[1], "say"], asked)
    assert faulty.outputs[0].finish_reason == wrong.outputs[0].finish_reason == "error"
    assert "mixed" in faulty.outputs[0].error
    assert "its combine() failed: ValueError: no logits today" in faulty.outputs[0].error
    assert "expected a tensor [" in wrong.outputs[0].error
    assert token_ids([good])[0] == alone[1]


def test_a_fault_of_members_refuses_the_request(llm):
    with pytest.raises(RequestError, match=r"its members\(\) failed: KeyError: 'empty'"):
        llm.generate(["say"], params([""]))


def test_two_parts_combine_in_their_order(scripted):
    enabled = {"plugins": {"enable": [f"{HERE}:Mixed", f"{HERE}:Doubled"]}}
    with LLM(config=scripted_config(scripted, enabled)) as llm:
        both = params(["no"])
        both.plugin_args["doubled"] = {"prompts": ["one", "two"]}
        together = token_ids(llm.generate(["say"], both))
        assert together == token_ids(llm.generate(["say"], params(["no", "one", "two"])))


def test_a_part_without_combine_is_named(scripted):
    with LLM(config=scripted_config(scripted, {"plugins": {"enable": [f"{HERE}:Lonely"]}})) as llm:
        (output,) = llm.generate(["say"], SamplingParams(max_tokens=2))
        assert (
            "'lonely': expected a worker half with combine(), got none" in output.outputs[0].error
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kv_connector": {"stores": ["memory"]}, "plugin": {"memory": {"size_bytes": 1 << 20}}},
            r"members: expected none with a KV connector \(kv_connector.use\)",
        ),
        (
            {"scheduler": {"max_num_seqs": 2}},
            r"members: expected at most 1, .*\(scheduler.max_num_seqs\), got 2",
        ),
        (
            {"max_model_len": 32, "kv_cache": {"num_blocks": 4}},
            r"members: the request and its 2 members need \d+ KV blocks, the cache has \d",
        ),
        (
            {"max_model_len": 32, "scheduler": SHORT_STEPS},
            r"members: the request and its 2 members need 43 tokens in a step, .* at most 32",
        ),
    ],
)
def test_what_does_not_compose_is_refused_by_name(scripted, config, message):
    with LLM(config=scripted_config(scripted, {**MIXED, **config})) as llm:
        with pytest.raises(HardpointError, match=message):
            llm.generate(["say"], params(["b" * 20, "c" * 20]))
        assert llm.generate(["say"], SamplingParams(max_tokens=1))[0].finished


def test_a_preempted_group_that_fits_in_no_step_ends_and_others_go_on(scripted):
    config = {**MIXED, "max_model_len": 32, "scheduler": SHORT_STEPS}
    config["kv_cache"] = {"prefix_caching": False}
    with LLM(config=scripted_config(scripted, config)) as llm:
        engine = llm.llm_engine
        engine.add_request("group", "say", params(["b" * 10, "c" * 10], max_tokens=18))
        for _ in range(8):
            engine.step()
        engine.call_utility("reset_prefix_cache", True)  # preempts
        engine.add_request("other", "say", SamplingParams(max_tokens=2, ignore_eos=True))
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
        assert "need 47 tokens in a step" in ended["group"].error
        assert ended["other"].finish_reason == "length"


def test_waiting_prompts_of_members_count(scripted):
    scheduler = {"max_num_seqs": 2, "max_waiting_tokens": 40}
    with LLM(config=scripted_config(scripted, {**MIXED, "scheduler": scheduler})) as llm:
        first = llm.stream("say", params(["b" * 30], max_tokens=8))
        next(first)
        second = llm.stream("say", params(["b" * 30], max_tokens=8))
        with pytest.raises(HardpointError, match=r"33 more .* 40 \(scheduler.max_waiting_tokens\)"):
            llm.stream("say", params(["b" * 30]))
        assert list(first)
        assert list(second)


def test_aborted_groups_leave_nothing(llm):
    stream = llm.stream("say", params(["no"], max_tokens=40))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 30
    while llm.engines.scheduler_stats().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.engines.scheduler_stats().kv_cache_usage == 0.0


def test_a_malformed_prompt_of_a_member_is_named(llm):
    with pytest.raises(RequestError, match=r"members\.mixed\[1\]\.prompt.*: expected"):
        llm.generate(["say"], params(["no", [-1]]))


def test_a_group_that_waits_for_slots_is_explained(scripted):
    config = scripted_config(scripted, {**MIXED, "scheduler": {"max_num_seqs": 3}})
    with LLM(config=config) as llm:
        engine = llm.llm_engine
        for name in ("first", "second"):
            engine.add_request(name, "say", params(["no"], max_tokens=8))
        engine.step()
        reason = engine.why_waiting("second")[0]
        assert reason.message == (
            "2 requests are running, of 3 at most (max_num_seqs); it and its members are 2"
        )
        assert (reason.needed, reason.available) == (2, 1)
