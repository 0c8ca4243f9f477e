"""Calls as models write them, made the same in all formats."""

# ruff: noqa: RUF001 - the markers of DeepSeek and Step are written so

from __future__ import annotations

import json
import re

import pytest
from support.builtins.model_calls import PARSERS, make

from hardpoint.plugins import ParserRequest
from hardpoint.plugins.output_parser import (
    MalformedText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from hardpoint.plugins.text.output_parser import join_events

TOOLS = {
    "now": {"type": "object", "properties": {}},
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
}


def parsed(parser, text):
    """Return the calls of an output, its content and its warnings."""
    subject, tokenizer = make(*PARSERS[parser])
    state = subject.open(ParserRequest(tools=TOOLS))
    special, events = tokenizer.special_tokens, []
    for piece in re.split("|".join(f"({re.escape(token)})" for token in special) or "$^", text):
        if piece and special.get(piece) in subject.token_ids:
            events += state.feed_token(special[piece], piece)
        elif piece:
            events += state.feed(piece)
    calls, content, warnings = [], "", []
    for event in join_events([*events, *state.finish()]):
        match event:
            case ToolCallBegin(name, _):
                open_call = [name, ""]
            case ToolCallArguments(part):
                open_call[1] += part
            case ToolCallEnd():
                calls.append((open_call[0], json.loads(open_call[1])))
            case MalformedText(part, reason):
                content += part
                warnings.append(reason)
            case _:
                content += getattr(event, "text", "")
    return calls, content, warnings


def kimi(head, arguments="{}"):
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    "head",
    ["functions.now:0", "functions_now_0", "functions.now", "now:12", "now", "functions-now-3"],
)
def test_kimi_ids_that_clients_have_changed_name_the_tool(head):
    assert parsed("kimi_k2", kimi(head)) == ([("now", {})], "", [])


@pytest.mark.parametrize("head", ["call00003", "3", "functions.later:0"])
def test_kimi_ids_without_a_tool_of_the_request_are_malformed(head):
    calls, content, (reason,) = parsed("kimi_k2", kimi(head))
    assert (calls, content) == ([], kimi(head))
    assert reason.startswith("a call is malformed: the request has no tool '")


UNKNOWN = [
    ("hermes", '<tool_call>{"name": "later", "arguments": {}}</tool_call>'),
    ("pythonic", "[later()]"),
    ("qwen3_coder", "<tool_call>\n<function=later>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>later</tool_call>"),
    ("gemma", "<|tool_call>call:later{}<tool_call|>"),
    ("mistral", "[TOOL_CALLS]later[ARGS]{}"),
    ("deepseek_v3_1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>later<｜tool▁sep｜>{}"),
    ("json", '{"name": "later", "arguments": {}}'),
    ("harmony", "<|channel|>commentary to=functions.later<|message|>{}"),
]


@pytest.mark.parametrize(("parser", "text"), UNKNOWN)
def test_a_call_of_another_tool_is_malformed(parser, text):
    calls, content, warnings = parsed(parser, text)
    assert calls == []
    assert "later" in content
    assert warnings == ["a call is malformed: the request has no tool 'later'"]


def test_a_name_may_have_the_prefix_of_functions():
    text = '<tool_call>{"name": "functions.now", "arguments": {}}</tool_call>'
    assert parsed("hermes", text) == ([("now", {})], "", [])


@pytest.mark.parametrize("arguments", ["{}", '"{}"', '""', '" "', "null"])
@pytest.mark.parametrize(
    ("parser", "before", "behind"),
    [
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]", ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": ', "}</tool_call>"),
        ("json", '{"arguments": ', ', "name": "now"}'),
    ],
)
def test_arguments_may_be_a_string_or_null(parser, before, behind, arguments):
    assert parsed(parser, before + arguments + behind) == ([("now", {})], "", [])


def test_a_string_of_arguments_is_an_object():
    written = kimi("write", json.dumps(json.dumps({"text": 'a "b"\n'})))
    assert parsed("kimi_k2", written) == ([("write", {"text": 'a "b"\n'})], "", [])
    for wrong in ('"[1]"', '"{"', '"x" y', "nul", "[1]"):
        calls, content, warnings = parsed("kimi_k2", kimi("write", wrong))
        assert warnings
        assert content == kimi("write", wrong), calls


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("gemma", "<|tool_call>call:now<tool_call|>"),
        ("kimi_k2", kimi("now", "")),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(parser, text):
    assert parsed(parser, text) == ([("now", {})], "", [])


FORMATS = {
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": ("<tool_call>write<arg_key>text</arg_key><arg_value>", "</arg_value></tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="write"><parameter name="text">',
        "</parameter></invoke></minimax:tool_call>",
    ),
    "deepseek_v3_2": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="write">'
        '<｜DSML｜parameter name="text" string="true">',
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
    ),
    "seed_oss": (
        "<seed:tool_call><function=write><parameter=text>",
        "</parameter></function></seed:tool_call>",
    ),
    "step3": (
        '<｜tool_calls_begin｜><steptml:invoke name="write"><steptml:parameter name="text">',
        "</steptml:parameter></steptml:invoke><｜tool_calls_end｜>",
    ),
}


@pytest.mark.parametrize("text", ["", "\n", "\n\n", "\n\tx = 1", "x\n", " x ", "\r\nx\r\n", "5"])
@pytest.mark.parametrize("parser", FORMATS)
def test_texts_of_tags_are_kept_exactly(parser, text):
    before, behind = FORMATS[parser]
    assert parsed(parser, before + text + behind) == ([("write", {"text": text})], "", [])


@pytest.mark.parametrize("parser", FORMATS)
def test_text_behind_the_end_tag_of_a_value_is_a_warning(parser):
    before, behind = FORMATS[parser]
    end = behind.lstrip("\n").partition(">")[0] + ">"
    calls, content, warnings = parsed(parser, f"{before}a {end} b{behind}")
    assert warnings == ["a call is malformed: there is text outside of its parameters"]
    assert f"a {end} b" in content, calls


def test_two_values_of_a_parameter_are_malformed():
    value = "<arg_key>text</arg_key><arg_value>x</arg_value>"
    _, _, warnings = parsed("glm45", f"<tool_call>write{value}{value}</tool_call>")
    assert warnings == ["a call is malformed: it has two values of the parameter 'text'"]
