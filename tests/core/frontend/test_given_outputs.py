"""Outputs that come with a prompt, and ready-made requests of another engine."""

from __future__ import annotations

import re

import msgspec
import pytest
from support.driving import run
from support.internals import engine_of

from hardpoint import LLM, RequestError, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest, RepetitionDetection
from hardpoint.plugins.requests import ResumedOutputs
from hardpoint.testing import scripted_config, scripted_engine, write_scripted_model

PROMPT = [7] * 20
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}
THINKING = {"reasoning": {"parser": "think_tags"}, "tools": {"parser": "hermes"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    replies = {"call": f"<think>hm</think>so 😀{CALL}!", "again": "ab" * 30}
    return write_scripted_model(tmp_path_factory.mktemp("model"), replies)


@pytest.fixture
def llm(folder):
    settings = THINKING | {"plugins": {"enable": ["support.plugins.observing:Follows"]}}
    with LLM(config=scripted_config(folder, settings)) as llm:
        yield llm


def going_on(outputs, prompt=PROMPT):
    return {"prompt_token_ids": prompt, "output_token_ids": outputs}


def outputs_of(engine, prompts, params, extras):
    """All completions of each prompt, in order."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params, extras)
    found = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)] += output.outputs
    return found


class TestCompletions:
    def test_each_goes_on_with_its_own_tokens_and_those_that_ended_are_left_out(self, llm):
        params = SamplingParams(**SEEDED, n=3, logprobs=1)
        (whole,) = llm.generate(PROMPT, params)
        for count in (0, 5, 11):
            given = [None if c.index == 0 else c.token_ids[:count] for c in whole.outputs]
            (output,) = llm.generate(going_on(given), params)
            assert [c.index for c in output.outputs] == [1, 2]
            for completion in output.outputs:
                expected = whole.outputs[completion.index]
                assert completion.token_ids == expected.token_ids
                assert completion.text == expected.text
                assert completion.logprobs == expected.logprobs[count:]
        assert output.seed == whole.seed == 11

    def test_the_seed_that_was_chosen_is_told_and_gives_the_same(self, llm):
        params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
        (first,) = llm.generate(PROMPT, params)
        seeded = msgspec.structs.replace(params, seed=first.seed)
        (second,) = llm.generate(going_on([first.outputs[0].token_ids[:4]]), seeded)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        others = {llm.generate(PROMPT, params)[0].seed for _ in range(3)}
        assert len(others | {first.seed}) == 4

    def test_a_single_one_of_several_is_streamed_with_its_index(self, llm):
        params = SamplingParams(**SEEDED, n=2)
        (whole,) = llm.generate(PROMPT, params)
        expected = whole.outputs[1].token_ids
        for given in ([], expected[:3]):
            outputs = list(llm.stream(going_on([None, given]), params))
            assert {c.index for output in outputs for c in output.outputs} == {1}
            streamed = [t for output in outputs for t in output.outputs[0].token_ids]
            assert streamed == expected[len(given) :]


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_text_reasoning_and_calls_go_on_at_every_token(folder, kind):
    engine = scripted_engine(folder, THINKING)
    extras = RequestExtras(tools={"add": {"type": "object"}})
    params = SamplingParams(temperature=0.0, max_tokens=120, output_kind=DELTA, logprobs=0)
    (parts,) = outputs_of(engine, ["call"], params, extras)
    tokens = [token for part in parts for token in part.token_ids]
    prompt = engine.parts.tokenizer.encode("call")
    params = msgspec.structs.replace(params, output_kind=kind)
    (whole,) = outputs_of(engine, ["call"], params, extras)
    assert whole[-1].finish_reason == "tool_calls"
    prompts = [going_on([tokens[:count]], prompt) for count in range(len(tokens))]
    for count, found in enumerate(outputs_of(engine, prompts, params, extras)):
        expected = parts[count:] if kind is DELTA else whole
        for name in ("text", "reasoning", "content"):
            texts = ["".join(getattr(c, name) or "" for c in some) for some in (found, expected)]
            assert texts[0] == texts[1], (count, name)
        calls = [
            [(call.name, call.arguments) for c in some for call in c.tool_calls or ()]
            for some in (found, expected)
        ]
        assert calls[0] == calls[1]
        assert sum(len(c.logprobs) for c in found) == len(tokens) - count
    engine.close()


def test_a_prebuilt_request_goes_on(folder):
    engine = scripted_engine(folder)
    params = SamplingParams(**SEEDED)
    (whole,) = run(engine, [("r", PROMPT, params)])["r"]
    tokens = whole[0][1]
    for count in range(len(tokens)):
        resumed = ResumedOutputs(tokens[:count])
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=PROMPT, params=params, resumed=resumed
        )
        engine.add_request("r", request)
        found = []
        while engine.has_unfinished_requests():
            found += engine.step()
        assert found[-1].outputs[0].token_ids == tokens
    engine.close()


REFUSED = [
    ([[1, 257]], {}, r"output_token_ids\[0\]\[1\]: expected a token id from 0 to 256, got 257"),
    ([[1], [2]], {}, r"output_token_ids: expected a list .* each of n \(1\) completions, got 2"),
    ([[1], [-1]], {"n": 2}, r"output_token_ids\[1\]\[0\]: expected a token id .* got -1"),
    ([None, None], {"n": 2}, "output_token_ids: expected a list of .* of a completion, got none"),
    ([["x"]], {}, r"output_token_ids\[0\]\[0\]: expected .* whole number"),
    (5, {}, "output_token_ids: expected a list"),
    ([[1] * 12], {}, r"output_token_ids\[0\]: expected fewer than max_tokens, 12, .* got 12"),
    ([[1, 256, 2]], {"ignore_eos": False}, r"\[0\]\[1\]: expected no token that ends .* got 256"),
    ([[1, 9]], {"stop_token_ids": [9]}, r"\[0\]\[1\]: expected no token that ends the request"),
    ([[65 - 33, 66 - 33]], {"stop": "AB"}, "expected no text that ends at stop 'AB'"),
    ([[1]], {"plugin_args": {"follows": {}}}, "observed_logprobs: expected .* 'follows' observes"),
]


@pytest.mark.parametrize(("given", "fields", "words"), REFUSED)
def test_what_cannot_be_gone_on_with_is_refused_and_others_go_on(llm, given, fields, words):
    params = SamplingParams(**SEEDED | fields)
    with pytest.raises(RequestError, match=words):
        llm.generate(going_on(given), params)
    assert len(llm.generate(PROMPT, SamplingParams(**SEEDED))[0].outputs[0].token_ids) == 12


ENDED = [
    (
        {"structured": {"regex": "[0-9]{4}"}, "ignore_eos": False},
        [15, 16, 70],
        r"resumed.output_token_ids\[2\]: expected a token that the grammar allows, got 70: "
        "structured.regex: llguidance: it does not allow the token 70",
    ),
    (
        {"repetition_detection": RepetitionDetection(max_pattern=2, min_count=3)},
        [5, 1, 2, 1, 2, 1, 2, 9],
        r"resumed.output_token_ids\[6\]: expected no token with which repetition_detection ends "
        "the request, got 2",
    ),
]


@pytest.mark.parametrize("in_process", [True, False])
def test_what_the_engine_alone_can_tell(folder, in_process):
    settings = {"engine": {"in_process": in_process}}
    with LLM(config=scripted_config(folder, settings)) as llm:
        for fields, given, words in ENDED:
            try:
                (output,) = llm.generate(going_on([given]), SamplingParams(**SEEDED | fields))
            except RequestError as error:
                message = str(error)
            else:  # a grammar is compiled while its request waits
                assert output.outputs[0].finish_reason == "error"
                message = output.outputs[0].error
            assert re.search(words, message), message
        assert len(llm.generate(PROMPT, SamplingParams(**SEEDED))[0].outputs[0].token_ids) == 12


def test_texts_conversations_and_several_completions_of_one_request_take_none(llm):
    with pytest.raises(RequestError, match="output_token_ids: expected prompt_token_ids with it"):
        llm.generate({"prompt": "hello", "output_token_ids": [[1]]})
    with pytest.raises(RequestError, match="prompt.output_token_ids: expected none in a part"):
        list(llm.open_conversation().send(going_on([[1]])))
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(n=2),
        resumed=ResumedOutputs([1]),
    )
    with pytest.raises(RequestError, match="resumed: expected none with n 2, for each"):
        engine_of(llm).add_request("r", request)


def test_no_room_is_left(folder):
    engine = scripted_engine(folder, {"max_model_len": 16})
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * 10,
        params=SamplingParams(max_tokens=40),
        resumed=ResumedOutputs([2] * 6),
    )
    words = "expected fewer than 6, the room that the prompt leaves of max_model_len 16, got 6"
    with pytest.raises(RequestError, match=words):
        engine.add_request("r", request)
    engine.close()
