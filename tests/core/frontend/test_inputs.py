"""Inputs of a request: prompts, arrival times, headers, and the fields that are read from them."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.internals import input_processor_of

from hardpoint import RequestError, SamplingParams
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.plugins import EngineCoreRequest, hookimpl
from hardpoint.testing import ScriptedClock, scripted_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
NOW = 100.0


class Seen:
    """Keeps the last request that came by."""

    contract = 1
    last: EngineCoreRequest

    @hookimpl
    def request_received(self, request):
        Seen.last = request


class Mute(ThinkTags):
    """Does not know its own markers."""

    contract = 1

    def markers(self):
        raise OSError("lost them")


def opened(scripted, **extra):
    config = {"plugins": {"enable": [f"{__name__}:Seen"]}, **extra}
    return scripted_engine(scripted, config, clock=ScriptedClock(now=NOW))


@pytest.fixture(scope="module")
def engine(scripted):
    engine = opened(scripted)
    yield engine
    engine.close()


def received(engine, prompt, extras=None):
    """Add a request; return what the engine got and what the user is shown."""
    engine.add_request("r", prompt, GREEDY, *([extras] if extras else []))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return Seen.last, outputs[-1]


def ids(engine, text):
    return engine.parts.tokenizer.encode(text)


class TestTokenInputs:
    def test_it_is_used_as_it_is(self, engine, monkeypatch):
        token_ids = ids(engine, "say abc")
        monkeypatch.setattr(engine.parts.tokenizer, "encode", None)
        prompt = {
            "type": "token",
            "prompt_token_ids": token_ids,
            "prompt": "as you know it",
            "cache_salt": "salt",
            "arrival_time": 7.5,
        }
        request, output = received(engine, prompt)
        assert (request.prompt_token_ids, request.cache_salt) == (token_ids, "salt")
        assert request.arrival_time == 7.5
        assert output.prompt == "as you know it"
        assert output.outputs[0].text == " abc "
        assert token_ids is not request.prompt_token_ids

    def test_nothing_but_the_ids_is_needed(self, engine):
        given = {"type": "token", "prompt_token_ids": ids(engine, "x")}
        request, output = received(engine, given)
        assert (output.prompt, request.cache_salt, request.arrival_time) == (None, None, NOW)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"prompt_token_ids": [1, 257]}, r"prompt_token_ids\[1\]: expected .* 256, got 257"),
            ({"prompt_token_ids": []}, "prompt: expected at least one token"),
            ({"prompt_token_ids": "text"}, "prompt_token_ids: expected a list of .*, got str"),
            ({}, "prompt.prompt_token_ids: missing, and it has no default"),
            ({"prompt_token_ids": [1] * 512}, "prompt: the prompt is too long: 512 tokens"),
            ({"prompt_token_ids": [1], "prompt": 3}, "prompt.prompt: expected a string"),
            ({"prompt_token_ids": [1], "cache_salt": ""}, "prompt.cache_salt: expected "),
            ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, "cache_salt: expected text that"),
            ({"prompt_token_ids": [1], "arrival_time": "now"}, "prompt.arrival_time: expected a n"),
            (
                {"prompt_token_ids": [1], "salt": "x"},
                "prompt.salt: unknown field; known here: type, ",
            ),
            ({"prompt_token_ids": [1], "type": "embeds"}, "prompt.type: expected .*token.*embeds"),
            ({"prompt_token_ids": [1], "type": "multimodal"}, "prompt.type: expected .*multimodal"),
            ({"type": "enc_dec", "decoder_prompt": "a"}, "prompt.type: expected .*token.*enc_dec"),
        ],
    )
    def test_it_is_checked(self, engine, fields, words):
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", {"type": "token", **fields}, GREEDY)
        assert not engine.has_unfinished_requests()

    def test_its_text_is_not_tokenised(self, engine):
        prompt = {"type": "token", "prompt_token_ids": [1], "prompt": "x" * 5000}
        assert input_processor_of(engine).length_of(prompt) == 0
        assert input_processor_of(engine).length_of({"prompt": "xy"}) == 2

    def test_a_prompt_of_more_than_texts_is_long(self, engine):
        length_of = input_processor_of(engine).length_of
        assert length_of({"text": "ab", "text_pair": "c"}) == 4
        assert length_of({"prompt": "x", "multi_modal_data": {}}) >= 2000
        assert [length_of(prompt) for prompt in ("xyz", [1, 2], {"prompt_token_ids": [1]})] == [
            3,
            0,
            0,
        ]

    def test_ids_of_a_mapping_are_a_list(self, engine):
        with pytest.raises(
            RequestError, match="^prompt_token_ids: expected a list of token ids, go"
        ):
            engine.add_request("r", {"prompt_token_ids": "text"}, GREEDY)

    @pytest.mark.parametrize(
        "others",
        [
            {"cache_salt": "s"},
            {"mm_processor_kwargs": {}},
            {"multi_modal_uuids": {}, "multi_modal_data": {}},
            {"encoder_prompt": "a", "decoder_prompt": "b"},
        ],
    )
    def test_a_text_has_no_other_fields(self, engine, others):
        name = next(iter(others))
        words = f"^prompt: expected a mapping with either .*, got the keys .*'{name}'"
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", {"prompt": "x", **others}, GREEDY)
        assert not engine.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("several", "what"),
        [(["x", "y"], "texts"), ([{"prompt": "x"}], "prompts"), ([[1, 2], [3]], "prompts")],
    )
    def test_several_prompts_are_not_one(self, engine, several, what):
        words = f"^prompt: expected one prompt, got a list of {what}$"
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", several, GREEDY)
        assert not engine.has_unfinished_requests()


class TestWhoSaysSo:
    @pytest.mark.parametrize(
        ("caller", "given", "expected"),
        [(3.0, 4.0, 3.0), (None, 4.0, 4.0), (3.0, None, 3.0), (0.0, 4.0, 0.0), (None, None, NOW)],
    )
    def test_arrival_time(self, engine, caller, given, expected):
        prompt = {"type": "token", "prompt_token_ids": [1], "arrival_time": given}
        extras = RequestExtras(arrival_time=caller)
        assert received(engine, prompt, extras)[0].arrival_time == expected

    def test_cache_salt(self, engine):
        prompt = {"type": "token", "prompt_token_ids": [1], "cache_salt": "input's"}
        assert received(engine, prompt, RequestExtras(priority=1))[0].cache_salt == "input's"
        extras = RequestExtras(cache_salt="caller's")
        assert received(engine, prompt, extras)[0].cache_salt == "caller's"

    def test_trace_headers(self, engine):
        assert received(engine, "x")[0].trace_headers is None
        headers = {"traceparent": "00-ab-cd-01"}
        request, _ = received(engine, "x", RequestExtras(trace_headers=headers))
        assert request.trace_headers == headers

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"arrival_time": "soon"}, "arrival_time: expected a number"),
            ({"arrival_time": float("nan")}, "arrival_time: expected a finite number, got nan"),
            ({"trace_headers": {"a": 1}}, "trace_headers.a: expected a string, got 1"),
            ({"trace_headers": {"a": "\ud800"}}, "trace_headers.a: expected text that UTF-8 can"),
        ],
    )
    def test_what_is_wrong_is_refused(self, engine, fields, words):
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", "x", GREEDY, RequestExtras(**fields))


class TestReasoning:
    def test_nobody_looks_without_a_parser(self, engine):
        assert received(engine, "<think>x</think>")[0].reasoning_ended is None

    def test_the_last_marker_decides(self, scripted):
        engine = opened(scripted, reasoning={"parser": "think_tags"})
        prompts = {
            "no marker": False,
            "<think>": False,
            "<think>so</think>": True,
            "</think>": True,
            "<think>so</think> then <think>": False,
        }
        found = {prompt: received(engine, prompt)[0].reasoning_ended for prompt in prompts}
        engine.close()
        assert found == prompts

    def test_a_parser_that_fails_is_named(self, open_engine):
        plugins = {"enable": [{"use": f"{__name__}:Mute", "name": "mute"}]}
        engine = open_engine({"plugins": plugins, "reasoning": {"parser": "mute"}})
        words = "output parser 'mute': its markers failed: OSError: lost them"
        with pytest.raises(RequestError, match=words):
            engine.add_request("r", "x", GREEDY)
        assert not engine.has_unfinished_requests()


def test_equal_parameters_are_checked_once(scripted, engine):
    with closing(scripted_engine(scripted)) as plain:
        check = input_processor_of(plain).checked
        given = [5]
        params = SamplingParams(stop_token_ids=given, top_k=1)
        first = check(params)
        assert first == params
        assert check(SamplingParams(stop_token_ids=[5], top_k=1)) is first
        with pytest.raises(RequestError, match=r"top_k: expected a whole number .*, got True"):
            check(SamplingParams(stop_token_ids=[5], top_k=True))
        with pytest.raises(TypeError, match="this list is read-only"):
            first.stop_token_ids.append(6)
        given.append(10**6)
        with pytest.raises(RequestError, match=r"stop_token_ids\[1\]: .*, got 1000000"):
            check(params)
    check = input_processor_of(engine).checked  # a hook may change the lists
    assert check(GREEDY).stop is not check(GREEDY).stop
