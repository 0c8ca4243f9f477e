"""Parsers, stop strings and grammars in the turns of a conversation that stays open."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.scripted_server import CALL, TAGS, WEATHER

from hardpoint import LLM, AsyncLLM, RequestError, RequestOutputKind, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

BEGIN, END = 257, 258  # the first two of TAGS
ROME = CALL.replace("Paris", "Rome")
TURNS = [
    ("weather?", f"<think>where</think>I look. {CALL}"),
    ("[sun]", "<think>fine</think>It is sunny."),
    ("and in Rome?", ROME),
    ("[rain]", "It rains."),
]
SEAM = [("to ", "xab"), ("c", "cab"), ("then ", "no abc here")]
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY}
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, **FINAL)


def replies():
    """Return the replies of the turns, each after all turns before it."""
    found = {}
    for turns in (TURNS, SEAM):
        before = ""
        for part, reply in turns:
            found[before + part] = reply
            before += part + reply
    found["dream"] = "<think>of a long walk</think>awake"
    found["dream<think>of a </think>"] = "up"
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_scripted_model(folder, replies(), special_tokens=TAGS, max_position_embeddings=512)
    parsers = {"reasoning": {"parser": "think_tags"}, "tools": {"parser": "hermes"}}
    return scripted_config(folder, parsers)


@pytest.fixture(scope="module")
def llm(config):
    with LLM(config=config) as one:
        yield one


def answer_of(output):
    """Return the parts of an answer, and why it ended."""
    (completion,) = output.outputs
    calls = [(call.name, json.loads(call.arguments)) for call in completion.tool_calls or ()]
    return completion.reasoning, completion.content, calls, completion.finish_reason


ANSWERS = [
    ("where", "I look. ", [("get_weather", {"city": "Paris"})], "tool_calls"),
    ("fine", "It is sunny.", [], "stop"),
    (None, None, [("get_weather", {"city": "Rome"})], "tool_calls"),
    (None, "It rains.", [], "stop"),
]


def plain(answer):
    """Return an answer with None for what it does not have."""
    reasoning, content, calls, reason = answer
    return reasoning or None, content or None, calls, reason


def test_reasoning_and_calls_are_found_in_each_turn(llm):
    with llm.open_conversation(GREEDY, keep_last=False, tools=[WEATHER]) as talk:
        found = []
        for part, _ in TURNS:
            (output,) = talk.send(part)
            found.append(plain(answer_of(output)))
        assert found == ANSWERS


def test_calls_have_ids_of_their_own_in_each_turn(llm):
    with llm.open_conversation(GREEDY, keep_last=False, tools=[WEATHER]) as talk:
        ids = [
            call.id
            for part, _ in TURNS
            for output in talk.send(part)
            for call in output.outputs[0].tool_calls or ()
        ]
        assert len(ids) == len(set(ids)) == 2


def test_the_same_with_an_event_loop(config):
    async def main():
        async with AsyncLLM(config=config) as llm:
            options = {"keep_last": False, "tools": [WEATHER]}
            async with llm.open_conversation(GREEDY, **options) as talk:
                return [
                    plain(answer_of(output))
                    for part, _ in TURNS
                    async for output in talk.send(part)
                ]

    assert asyncio.run(main()) == ANSWERS


def test_without_tools_no_calls_are_sought(llm):
    with llm.open_conversation(GREEDY) as talk:
        (output,) = talk.send("weather?")
        assert output.outputs[0].tool_calls is None
        assert output.outputs[0].content.startswith("I look. ")
        assert "get_weather" in output.outputs[0].content


def test_a_required_call_is_made_in_each_turn(llm):
    options = {"tools": [WEATHER], "tool_choice": "required"}
    with llm.open_conversation(GREEDY, **options) as talk:
        for part in ("hello", "and again"):
            (output,) = talk.send(part)
            _, _, calls, _ = answer_of(output)
            assert [name for name, _ in calls] == ["get_weather"]


def test_wrong_tools_open_nothing(llm):
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        llm.open_conversation(GREEDY, tools=[{"type": "magic"}])
    with pytest.raises(TypeError, match="unexpected keyword argument 'chat_template_kwargs'"):
        llm.open_conversation(GREEDY, chat_template_kwargs={})


def test_a_turn_that_ends_while_it_thinks_is_gone_on_with(llm):
    short = SamplingParams(temperature=0.0, max_tokens=6, **FINAL)
    with llm.open_conversation(short) as talk:
        (output,) = talk.send("dream")
        assert plain(answer_of(output)) == ("of a ", None, [], "length")
        (output,) = talk.send("l", GREEDY)  # the last marker before the answer is open
        assert plain(answer_of(output)) == ("ong walk", "awake", [], "stop")
    with llm.open_conversation(short) as talk:
        list(talk.send("dream"))
        (output,) = talk.send([END], GREEDY)  # the part closes it
        assert plain(answer_of(output)) == (None, "up", [], "stop")


def test_a_thinking_budget_is_that_of_each_turn(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, thinking_token_budget=3, **FINAL)
    with llm.open_conversation(params) as talk:
        (first,) = talk.send("dream")
        assert first.outputs[0].reasoning == "of "
        assert first.outputs[0].token_ids[-1] == END
        (second,) = talk.send([BEGIN])
        assert END in second.outputs[0].token_ids[:4]


@pytest.fixture(scope="module")
def without_parsers(config):
    plain_config = {k: v for k, v in config.items() if k not in ("reasoning", "tools")}
    with LLM(config=plain_config) as one:
        yield one


def test_no_stop_string_reaches_over_the_seam(without_parsers):
    params = SamplingParams(temperature=0.0, max_tokens=30, stop=["abc"], **FINAL)
    with without_parsers.open_conversation(params, keep_last=False) as talk:
        found = [output.outputs[0] for part, _ in SEAM for output in talk.send(part)]
    assert [(one.text, one.stop_reason) for one in found] == [
        ("xab", None),  # what might have become one is given at the end of the turn
        ("cab", None),
        ("no ", "abc"),
    ]


def test_a_grammar_that_was_cut_begins_again(without_parsers):
    def letters(max_tokens):
        given = {"temperature": 1.0, "seed": 2, "structured": {"regex": "[ab]{6}"}}
        return SamplingParams(max_tokens=max_tokens, **given, **FINAL)

    with without_parsers.open_conversation(letters(3)) as talk:
        (first,) = talk.send("letters")
        (second,) = talk.send("more", letters(30))
    one, other = first.outputs[0], second.outputs[0]
    assert (len(one.text), one.finish_reason) == (3, "length")
    assert (len(other.text), other.finish_reason) == (6, "stop")
    assert set(one.text + other.text) <= {"a", "b"}
