"""Requests that were made elsewhere: checked alike wherever the engine runs, and never changed."""

from __future__ import annotations

import copy
import math

import pytest

from hardpoint import RequestError, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest, ReasoningMarkers, hookimpl

FOUR = {"max_tokens": 4, "ignore_eos": True}


class Meddler:
    """Changes what it gets in place."""

    contract = 1

    @hookimpl
    def request_received(self, request):
        request.prompt_token_ids.append(1)
        request.tags["seen"] = "yes"
        for arguments in request.plugin_args.values():
            arguments.clear()


@pytest.fixture(scope="module")
def engine(meddled):
    return meddled


def ready(prompt=(5, 6, 7), params=None, **fields) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="x",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**(FOUR | (params or {}))),
        **fields,
    )


def test_a_sound_one_runs(engine):
    engine.add_request("mine", ready(child_index=2))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].outputs[0].index == 2
    assert outputs[-1].prompt_token_ids == [5, 6, 7, 1]  # as the hook would have it


@pytest.mark.parametrize(
    ("prompt", "given", "shown"),
    [
        (ready(), "the text", "the text"),
        (ready(), None, None),
        ([5, 6, 7], "the text", "the text"),
        ("abc", None, "abc"),
    ],
)
def test_outputs_have_the_text_that_is_given(engine, prompt, given, shown):
    params = None if isinstance(prompt, EngineCoreRequest) else SamplingParams(**FOUR)
    engine.add_request("mine", prompt, params, RequestExtras(prompt_text=given))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.prompt for output in outputs} == {shown}


def test_other_extras_are_refused_with_a_text(engine):
    with pytest.raises(RequestError, match="brings its own"):
        engine.add_request("mine", ready(), None, RequestExtras(prompt_text="x", priority=1))


def test_live_requests_are_counted(engine):
    assert engine.get_num_unfinished_requests() == 0
    ids = [engine.add_request("mine", ready(params={"n": n})) for n in (1, 2)]
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_requests(ids[1:])
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_requests(ids)
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("n", [1, 2])
def test_the_callers_object_stays_as_it_is(engine, n):
    request = ready(params={"n": n}, plugin_args={"min_p": {"min_p": 0.5}}, tags={"tenant": "acme"})
    before = copy.deepcopy(request)
    internal = engine.add_request("mine", request)
    engine.abort_requests([internal])
    assert request == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [1, 99_999]}, "prompt_token_ids: expected token ids from 0 to 256, got 99999"),
        ({"prompt": [-1]}, "prompt_token_ids: expected token ids from 0 to 256, got -1"),
        ({"prompt": []}, "prompt_token_ids: expected at least one token, got none"),
        ({"prompt": ["a"]}, r"prompt_token_ids\[0\]: expected a whole number"),
        ({"params": {"temperature": -3.0}}, "temperature: expected a number >= 0, got -3.0"),
        ({"params": {"min_tokens": 9}}, r"min_tokens: expected at most max_tokens \(4\), got 9"),
        ({"params": {"logprobs": 999}}, "logprobs: expected at most the vocabulary's 257, got 999"),
        ({"params": {"plugin_args": {"a": {}}}}, "params.plugin_args: expected none"),
        ({"prompt_embeds": [[0.5]]}, "prompt_embeds: expected token ids"),
        ({"priority": "high"}, "priority: expected a whole number, got a string"),
        ({"priority": 2**70}, "^priority: .*can't serialize ints"),
        ({"timeout": -1.0}, "^timeout: expected seconds > 0 or none, got -1.0"),
        ({"timeout": math.nan}, "^timeout: expected seconds > 0 or none, got nan"),
        ({"tags": {"a": object()}}, "a builtins.object cannot travel"),
        ({"cache_salt": "\ud800"}, "cache_salt: expected text that UTF-8 can hold"),
        ({"client_index": 3}, "client_index: expected 0, the client that sends it, got 3"),
        ({"external_req_id": "theirs"}, "external_req_id: expected None, for the frontend gives"),
        ({"reasoning_markers": ReasoningMarkers()}, "reasoning_markers: expected None, for the fr"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_one_is_refused_before_the_engine_has_it(engine, fields, words):
    with pytest.raises(RequestError, match=words):
        engine.add_request("mine", ready(**fields))
    assert not engine.has_unfinished_requests()


def test_params_of_another_type(engine):
    request = ready()
    request.params = {"max_tokens": 3}
    with pytest.raises(RequestError, match="sampling_params: expected SamplingParams, got dict"):
        engine.add_request("mine", request)


def test_callables_only_where_they_can_be_called(engine):
    calls = []

    def watch(output_ids, logits):
        calls.append(len(output_ids))
        return logits

    request = ready(params={"logits_processors": [watch]}, plugin_args={"callables": {}})
    if not engine.parts.client.in_process:
        with pytest.raises(RequestError, match="logits_processors: callables cannot travel to w"):
            engine.add_request("mine", request)
        return
    engine.add_request("mine", request)
    while engine.has_unfinished_requests():
        engine.step()
    assert calls == [0, 1, 2, 3]


def tokens_of(engine, request):
    engine.add_request("mine", request)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids


def test_one_without_a_seed_gets_one(engine):
    sampled = {tuple(tokens_of(engine, ready(params={"max_tokens": 8}))) for _ in range(3)}
    assert len(sampled) == 3
    seeded = {
        tuple(tokens_of(engine, ready(params={"max_tokens": 8, "seed": 5}))) for _ in range(2)
    }
    assert len(seeded) == 1


def test_one_without_an_arrival_time_arrives_now(engine):
    assert len(tokens_of(engine, ready(timeout=600.0))) == 4


def test_what_nobody_honours_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine._frontend._arguments, "_honoured", set())
    with pytest.raises(RequestError, match=r"^min_p: no enabled logits processor applies it"):
        engine.add_request("mine", ready(params={"min_p": 0.99}))
