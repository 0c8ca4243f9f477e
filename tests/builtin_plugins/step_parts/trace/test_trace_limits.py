"""Notes on omissions of a trace: positions, rows of a step, tokens of another engine, steps."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.driving import FINAL

from hardpoint import LLM, AsyncLLM, ConfigError, HardpointError, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.trace.recorder import MAX_STEPS, TraceRecorder
from hardpoint.plugins import EngineCoreRequest, ModelRunnerOutput, Request, SchedulerOutput
from hardpoint.plugins.requests.request import RequestStatus
from hardpoint.plugins.scheduling.step_record import WaitingFor, WaitReason
from hardpoint.testing import scripted_config
from hardpoint.toolkit.trace import trace_of
from hardpoint.toolkit.trace.records import TraceRecord

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def opened(scripted, **options):
    return LLM(config=scripted_config(scripted, {"plugin": {"trace": options}}))


def test_positions_beyond_the_limit(scripted):
    with opened(scripted, positions=2, candidates=1) as llm:
        (completion,) = llm.debug.trace("say abc", SamplingParams(**GREEDY)).completions
    assert [token.position for token in completion.tokens] == [0, 1]
    assert [len(token.candidates) for token in completion.tokens] == [1, 1]
    assert completion.notes == ["positions from 2 on have no record (plugin.trace.positions)"]
    assert len(completion.token_ids) == 6


def test_rows_of_a_step_beyond_the_limit(scripted):
    with opened(scripted, rows=1) as llm:
        params = SamplingParams(**GREEDY, include=["trace"])
        outputs = llm.generate(["say abc", "say abc"], params)
        first, second = (trace_of(output).completions[0] for output in outputs)
    assert len(first.tokens) == 6
    assert second.tokens == []
    assert second.notes == [
        "6 positions have no record: more of them were sampled at once than are traced "
        "(plugin.trace.rows), or reading them failed"
    ]


def test_positions_of_another_engine(scripted):
    with opened(scripted) as llm:
        (whole,) = llm.debug.trace("say abc", SamplingParams(**GREEDY)).completions
        ids = llm.tokenizer.encode("say abc")
        prompt = {"prompt_token_ids": ids, "output_token_ids": [whole.token_ids[:4]]}
        (completion,) = llm.debug.trace(prompt, SamplingParams(**GREEDY)).completions
    assert completion.token_ids == whole.token_ids
    assert [token.position for token in completion.tokens] == [4, 5]
    assert completion.notes == [
        "positions before 4 came with the request, of a fork or another engine: no record"
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_ends_a_trace(scripted, n):
    """It is found in the frontend: the engine learns of it afterwards."""
    with opened(scripted) as llm:
        (whole, *_) = llm.debug.trace("say abc", SamplingParams(**GREEDY)).completions
        params = SamplingParams(**GREEDY, n=n, stop=["bc"])
        completions = llm.debug.trace("say abc", params).completions
    assert len(completions) == n
    for completion in completions:
        assert completion.finish_reason == "stop"
        length = len(completion.token_ids)
        assert 0 < length < len(whole.token_ids)
        assert completion.token_ids == whole.token_ids[:length]
        assert [token.position for token in completion.tokens] == list(range(length))
        assert completion.notes == []


def test_a_request_asks_for_a_number_of_candidates(scripted):
    settings = GREEDY | {"top_k": 30, "temperature": 1.0, "seed": 1}
    with opened(scripted, candidates=5) as llm:
        params_list = [
            SamplingParams(**settings, include=["trace"], plugin_args=arguments)
            for arguments in ({}, {"trace": {}}, {"trace": {"candidates": 20}})
        ]
        outputs = llm.generate(["say abc"] * 3, params_list)
        traces = [trace_of(output).completions[0] for output in outputs]
        with pytest.raises(RequestError, match="plugin_args.trace.candidates: .*<= 20, got 21"):
            llm.debug.trace("a", SamplingParams(plugin_args={"trace": {"candidates": 21}}))
    for trace, number in zip(traces, (5, 5, 20), strict=True):
        assert {len(token.candidates) for token in trace.tokens} == {number}
        assert {len(token.changes[-1].tokens) for token in trace.tokens} == {number}
    assert traces[0].token_ids == traces[2].token_ids


@pytest.mark.parametrize("arguments", [{}, {"candidates": 9}])
@pytest.mark.parametrize("include", [[], ["timings"]])
def test_arguments_of_a_request_that_is_not_traced_are_refused(scripted, include, arguments):
    params = SamplingParams(**GREEDY, include=include, plugin_args={"trace": arguments})
    expected = (
        r"plugin_args\.trace: expected none without include = \['trace'\], as only requests that "
        rf"include it use it, got include = \{include}"
    )
    with opened(scripted) as llm:
        with pytest.raises(RequestError, match=expected):
            llm.generate("say abc", params)
        assert llm.generate("say abc", SamplingParams(**GREEDY))[0].outputs[0].token_ids


@pytest.mark.parametrize(("name", "limit"), [("candidates", 20), ("positions", 4096)])
def test_limits_cannot_be_raised(scripted, name, limit):
    expected = rf"plugin\.trace\.{name}: expected .*{limit}, got {limit + 1}"
    with pytest.raises(ConfigError, match=expected):
        opened(scripted, **{name: limit + 1})


def test_a_request_that_did_not_ask_has_no_trace(scripted):
    with opened(scripted) as llm:
        (output,) = llm.generate("say abc", SamplingParams(**GREEDY))
    expected = r'completion 0 has no trace: .*include=\["trace"\], got finish reason .length'
    with pytest.raises(HardpointError, match=expected):
        trace_of(output)


def test_wrong_parameters_are_refused_as_ever(scripted):
    with opened(scripted) as llm, pytest.raises(RequestError, match="temperature: expected"):
        llm.debug.trace("say abc", SamplingParams(temperature=-1.0))


def test_an_event_loop_gets_the_same(scripted):
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=5, n=2)

    async def traced():
        async with AsyncLLM(config=scripted_config(scripted)) as llm:
            return await llm.debug.trace("say abc", params)

    with opened(scripted) as llm:
        expected = llm.debug.trace("say abc", params)
    result = asyncio.run(traced())
    tokens = [
        [completion.tokens for completion in trace.completions] for trace in (result, expected)
    ]
    assert tokens[0] == tokens[1]
    assert [completion.index for completion in result.completions] == [0, 1]


class Recorded:
    """A recorder with one request, driven by hand."""

    def __init__(self, reasons=()):
        self.reasons = list(reasons)
        self.recorder = TraceRecorder("trace", 4096, lambda _: self.reasons.pop(0))
        params = SamplingParams(include=["trace"], **FINAL)
        self.request = Request(
            EngineCoreRequest(request_id="a", prompt_token_ids=[1], params=params)
        )
        self.recorder.gate(self.request)

    def plan(self, step, **fields):
        plan = SchedulerOutput(step=step, **fields)
        return plan, self.recorder.begin(plan)

    def record(self):
        self.request.status = RequestStatus.FINISHED
        return msgspec.json.decode(self.recorder.figures("a")["record"], type=TraceRecord)


def test_waits_for_the_same_thing_are_one_entry():
    slot = WaitReason(WaitingFor.SLOT, "1 request is running")
    blocks = WaitReason(WaitingFor.BLOCKS, "it needs up to 2 KV blocks, 1 are free")
    recorded = Recorded([slot, slot, blocks])
    assert [recorded.plan(step)[1] for step in (3, 4, 5)] == [None] * 3
    assert recorded.plan(6, num_scheduled_tokens={"a": 1, "b": 2})[1] is not None
    first, second, third = recorded.record().steps
    assert (first.step, first.num_steps, first.waits_for) == (3, 2, "slot")
    assert (second.step, second.reason) == (5, blocks.message)
    assert (third.num_tokens, third.num_requests, third.num_cached) == (1, 2, 0)
    assert recorded.recorder.figures("a") != {}
    recorded.recorder.ended("a")
    assert recorded.recorder.figures("a") == {}


def test_a_lost_step_and_a_preemption_are_marked():
    recorded = Recorded()
    plan, _ = recorded.plan(1, num_scheduled_tokens={"a": 1})
    recorded.recorder.lost(plan)
    recorded.recorder.preempted("a")
    plan, _ = recorded.plan(2, num_scheduled_tokens={"a": 3}, draft_token_ids={"a": [7, 8]})
    recorded.recorder.result(plan, ModelRunnerOutput(sampled_token_ids={"a": [7, 9]}))
    first, second = recorded.record().steps
    assert (first.is_lost, first.is_preempted) == (True, False)
    assert (second.is_lost, second.is_preempted) == (False, True)
    assert (second.drafts, second.num_accepted) == ([7, 8], 1)


def test_steps_beyond_the_limit_are_counted():
    recorded = Recorded()
    for step in range(1, MAX_STEPS + 4):
        recorded.plan(step, num_scheduled_tokens={"a": 1})
    record = recorded.record()
    assert len(record.steps) == MAX_STEPS
    assert record.notes == [f"3 steps have no record, beyond {MAX_STEPS}"]
