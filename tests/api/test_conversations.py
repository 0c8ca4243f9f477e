"""Conversations: messages and tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import pytest

from hardpoint import (
    LLM,
    AsyncLLM,
    ConfigError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.chat import Chat, read_messages
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.testing import scripted_config, write_scripted_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass
class Place:
    city: str
    country: str = "FR"


def get_weather(place: Place, unit: Literal["C", "F"] = "C", days: list[int] = []):  # noqa: B006
    """Tell the weather
    of a place.

    Args:
        place: where,
            for example Paris.
        unit (str): of the temperature.

    Returns:
        Text.
    """


def test_a_function_is_a_tool():
    chat = Chat([get_weather])
    (tool,) = chat.tools
    function = tool["function"]
    assert (tool["type"], function["name"]) == ("function", "get_weather")
    assert function["description"] == "Tell the weather\nof a place."
    schema = function["parameters"]
    assert chat.schemas == {"get_weather": schema}
    assert (schema["type"], schema["required"]) == ("object", ["place"])
    assert schema["properties"]["unit"]["enum"] == ["C", "F"]
    assert schema["properties"]["unit"]["description"] == "of the temperature."
    assert schema["properties"]["days"] == {"type": "array", "items": {"type": "integer"}}
    assert "where, for example Paris." in str(schema["properties"]["place"])
    assert schema["$defs"]["Place"]["required"] == ["city"]


def test_a_schema_is_a_tool():
    chat = Chat([WEATHER])
    assert chat.tools == [WEATHER]
    assert chat.schemas == {"get_weather": WEATHER["function"]["parameters"]}
    assert Chat([WEATHER], "none").schemas is None


def untyped(x):
    pass


def several(*x: int):
    pass


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({}, "tools: expected a list of tools, got dict"),
        ([5], r"tools\[0\]: expected"),
        ([{"type": "x", "function": {"name": "f"}}], r"tools\[0\].type: expected"),
        ([{"type": "function"}], r"tools\[0\].*function"),
        (
            [{"type": "function", "function": {"name": "a b"}}],
            r"tools\[0\].function.name: expected",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            r"tools\[0\].function.parameters.type: expected \"object\".*got 'array'",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}],
            r"tools\[0\].function.parameters.properties: expected a table, got \[\]",
        ),
        (
            [WEATHER, get_weather],
            r"tools\[1\].function.name: 'get_weather' is the name of tools\[0\]",
        ),
        ([untyped], r"tools\[0\]: the parameter 'x' of untyped\(\) has no type"),
        ([several], r"tools\[0\]: several\(\) has \*x; expected named parameters"),
    ],
)
def test_what_is_no_tool_is_refused(tools, words):
    with pytest.raises(RequestError, match=words):
        Chat(tools)


def test_the_choice_is_checked():
    expected = 'tool_choice: expected "none", "auto", "required" or {"name": ...}, got '
    for choice in (5, "all", {"name": 3}, {"name": "get_weather", "x": 1}, {}, [], None):
        with pytest.raises(RequestError, match=re.escape(expected)):
            Chat([WEATHER], choice)
    with pytest.raises(RequestError, match='tool_choice: "required" needs tools, got none'):
        Chat(None, "required")
    message = "tool_choice.name: expected one of the tools (get_weather), got 'get_wether' (did "
    with pytest.raises(RequestError, match=re.escape(message)):
        Chat([WEATHER], {"name": "get_wether"})


def test_the_choice_limits_the_calls_that_a_grammar_allows():
    strict = {"type": "function", "function": {"name": "exact", "strict": True}}
    named = {"type": "function", "function": {"name": "exact"}}
    assert Chat([WEATHER]).calls is Chat([WEATHER, strict], "none").calls is None
    assert Chat([WEATHER, strict]).calls == CallRules(strict=["exact"])
    both = CallRules(required=["get_weather", "exact"], strict=["exact"])
    assert Chat([WEATHER, strict], "required").calls == both
    one = CallRules(required=["exact"], strict=["exact"], parallel=False)
    assert Chat([WEATHER, strict], {"name": "exact"}).calls == one
    assert Chat([WEATHER, strict], named).calls == one
    assert Chat([WEATHER], parallel_tool_calls=False).calls == CallRules(parallel=False)
    assert Chat(None, parallel_tool_calls=False).calls is None


@pytest.mark.parametrize("strict", [True, False, None])
def test_the_template_does_not_get_strict(strict):
    function = {**WEATHER["function"], "strict": strict}
    assert Chat([{"type": "function", "function": function}]).tools == Chat([WEATHER]).tools


def test_parts_of_content_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = read_messages([{"role": "user", "content": parts}])
    assert message == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "image_url"},
            r"messages\[0\].content\[0\].type: expected \"text\", got 'image_url'",
        ),
        ({"type": "text"}, r"messages\[0\].content\[0\].text: expected a string, got None"),
        (5, r"messages\[0\].content\[0\]: expected .*, got 5"),
    ],
)
def test_other_parts_are_refused(part, words):
    with pytest.raises(RequestError, match=words):
        read_messages([{"role": "user", "content": [part]}])


def test_arguments_of_earlier_calls_are_objects():
    def message(arguments):
        return {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    assert read_messages([message('{"a": 1}')]) == [message({"a": 1})]
    for arguments in ({"a": 1}, "{", "[1]"):
        assert read_messages([message(arguments)]) == [message(arguments)]


MESSAGES = [{"role": "user", "content": "What time is it?"}]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def now():
    """Tell the time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("m"))
    with LLM(config=scripted_config(folder)) as llm:
        with_tools, without = (
            llm.model.apply_chat_template(MESSAGES, tools=tools)["prompt"]
            for tools in ([now], None)
        )
    assert "now" in with_tools
    return write_scripted_model(folder, {with_tools: f"Wait.{CALL}", without: f"No.{CALL}"})


def test_chat_with_tools(folder):
    params = SamplingParams(max_tokens=99)
    with LLM(config=scripted_config(folder, {"tools": {"parser": "hermes"}})) as llm:
        (output,) = llm.chat(MESSAGES, params, tools=[now])
        (completion,) = output.outputs
        assert (completion.content, completion.finish_reason) == ("Wait.", "tool_calls")
        assert [(call.name, call.arguments) for call in completion.tool_calls] == [("now", "{}")]
        (output,) = llm.chat(MESSAGES, params, tools=[now], tool_choice="none")
        assert output.outputs[0].content == f"No.{CALL}"
        parts = [o.outputs[0] for o in llm.stream_chat(MESSAGES, params, tools=[now], timeout=60)]
        assert "".join(part.content or "" for part in parts) == "Wait."
        assert parts[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_fork_of_a_chat_has_its_tools(folder, choice):
    params = SamplingParams(temperature=0.0, max_tokens=99)
    with LLM(config=scripted_config(folder, {"tools": {"parser": "hermes"}})) as llm:
        source = llm.stream_chat(MESSAGES, params, tools=[now], tool_choice=choice)
        parts = [output.outputs[0] for output in source]
        tokens = [token for part in parts for token in part.token_ids]
        for count in (0, 3):
            fork = [output.outputs[0] for output in source.fork(tokens[:count])]
            assert [token for part in fork for token in part.token_ids] == tokens[count:]
            assert call_of(fork) == call_of(parts) == ("now", "{}")
            assert fork[-1].finish_reason == parts[-1].finish_reason


async def test_a_fork_on_an_event_loop_has_the_tools(folder):
    params = SamplingParams(max_tokens=99, output_kind=RequestOutputKind.FINAL_ONLY)
    async with AsyncLLM(config=scripted_config(folder, {"tools": {"parser": "hermes"}})) as llm:
        source = llm.chat(MESSAGES, params, "r", tools=[now])
        expected = (await anext(source)).outputs
        (fork,) = [output async for output in llm.fork("r", [])]
        assert call_of(fork.outputs) == call_of(expected) == ("now", "{}")
        await source.aclose()


def call_of(completions):
    """Return the name and the arguments of the one call in the parts of an output."""
    calls = [call for part in completions for call in part.tool_calls or ()]
    return calls[0].name, "".join(call.arguments for call in calls)


def test_tools_without_a_parser_are_refused(folder):
    words = r"tools: no parser finds .* set tools\.parser"
    with LLM(config=scripted_config(folder)) as llm, pytest.raises(RequestError, match=words):
        llm.chat(MESSAGES, tools=[now])


PREFILLED = [*MESSAGES, {"role": "assistant", "content": "It is "}]


def test_the_last_message_may_be_continued(folder):
    with LLM(config=scripted_config(folder)) as llm:
        prompt = llm.model.apply_chat_template(PREFILLED, continue_final_message=True)["prompt"]
        assert prompt.endswith("assistant: It is ")
        assert "final message" not in prompt
        whole = llm.model.apply_chat_template(PREFILLED, add_generation_prompt=False)["prompt"]
        assert whole == f"{prompt}\n"
        (output,) = llm.chat(PREFILLED, SamplingParams(max_tokens=2), continue_final_message=True)
        assert output.prompt == prompt


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (MESSAGES, {}, "needs a last message of the role \"assistant\", got 'user'"),
        ([], {}, 'needs a last message of the role "assistant", got None'),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            {},
            r"messages\[0\].content: expected a string to continue, got None",
        ),
        (PREFILLED, {"add_generation_prompt": True}, "expected false where add_generation_prompt"),
        (PREFILLED, {"add_generation_prompt": 1}, "add_generation_prompt: expected true or false"),
    ],
)
def test_what_cannot_be_continued(folder, messages, options, words):
    with LLM(config=scripted_config(folder)) as llm, pytest.raises(RequestError, match=words):
        llm.model.apply_chat_template(messages, continue_final_message=True, **options)


def test_variables_of_the_operators_template(folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ enable_thinking }}: {{ messages[0].content }}")
    chosen = {"plugin": {"transformers": {"chat_template": str(template)}}}
    with LLM(config=scripted_config(folder, chosen)) as llm:
        text = llm.model.apply_chat_template(
            MESSAGES, chat_template_kwargs={"enable_thinking": False}
        )
        assert text["prompt"] == "False: What time is it?"
        with pytest.raises(
            RequestError, match=r"chat_template_kwargs\.messages: expected a variable that is all"
        ):
            llm.model.apply_chat_template(MESSAGES, chat_template_kwargs={"messages": []})
        with pytest.raises(RequestError, match=r"tools: the chat template of .* does not show"):
            llm.model.apply_chat_template(MESSAGES, tools=[now])
        with pytest.raises(RequestError, match="chat_template_kwargs: expected a table"):
            llm.model.apply_chat_template(MESSAGES, chat_template_kwargs=5)
        with pytest.raises(RequestError, match="does not show the last message as it is"):
            llm.model.apply_chat_template(PREFILLED, continue_final_message=True)


def test_an_operators_template_that_is_not_there(folder):
    chosen = {"plugin": {"transformers": {"chat_template": "no/such.jinja"}}}
    with pytest.raises(ConfigError, match=r"plugin\.transformers\.chat_template: .*such\.jinja"):
        LLM(config=scripted_config(folder, chosen))


def test_null_is_absent_in_tools():
    schema = {
        "type": "object",
        "required": None,
        "additionalProperties": None,
        "properties": {
            "city": {"type": "string", "enum": None, "description": None, "default": None},
            "unit": {"enum": ["C", None]},
            "days": {"anyOf": [{"type": "array", "items": {"minimum": None}}, {"const": None}]},
        },
    }
    tools = [
        {"type": "function", "function": {"name": "a", "description": None, "parameters": schema}},
        {"type": "function", "function": {"name": "b", "parameters": None, "strict": None}},
    ]
    chat = Chat(tools)
    assert chat.schemas == {
        "a": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "default": None},
                "unit": {"enum": ["C", None]},
                "days": {"anyOf": [{"type": "array", "items": {}}, {"const": None}]},
            },
        },
        "b": {},
    }
    assert "description" not in chat.tools[0]["function"]
    with pytest.raises(RequestError, match=r"function\.name: expected a string, got None"):
        Chat([{"type": "function", "function": {"name": None}}])


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", None, {}])
def test_earlier_calls_without_arguments_have_an_empty_object(arguments):
    function = {"name": "now", "arguments": arguments}
    for given in (function, {"name": "now"}):
        calls = [{"id": "1", "type": "function", "function": given}]
        (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
