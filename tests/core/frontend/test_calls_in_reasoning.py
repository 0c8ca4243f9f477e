"""Calls that begin inside reasoning which the model does not end."""

from __future__ import annotations

import pytest

from hardpoint import RequestOutputKind, SamplingParams
from hardpoint.builtin_plugins.parsers.headed_calls import KimiK2
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.plugin_arguments import CallRules
from hardpoint.testing import scripted_engine, write_scripted_model

SPECIAL = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *KimiK2.required_tokens,
    *("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
)
ARGUMENTS = '{"a": 1}'
HERMES = f'<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
REPLIES = {
    "hermes": f"<think>I add.{HERMES}",
    "open<think>": f"I add.{HERMES}",
    "kimi": f"<think>I add.{KIMI}",
    "singular": f"<think>I add.{KIMI.replace('calls_section', 'call_section')}",
    "other": "<think>I add.</tool_call>So.</think>Yes",
}
TOOLS = {"add": {"type": "object"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("m"), REPLIES, special_tokens=SPECIAL)


@pytest.fixture
def completed(folder):
    """Return the last output of a request, and its reasoning, content and calls joined."""
    opened = []

    def run(prompt, parser="hermes", *, tools=TOOLS, required=None, **fields):
        extra = {"reasoning": {"parser": "think_tags"}, "tools": {"parser": parser}}
        opened.append(scripted_engine(folder, extra))
        rules = None if required is None else CallRules(required=required)
        params = SamplingParams(**{"max_tokens": 200, "temperature": 0.0} | fields)
        opened[-1].add_request("r", prompt, params, RequestExtras(tools=tools, calls=rules))
        parts = {"reasoning": "", "content": "", "arguments": ""}
        while opened[-1].has_unfinished_requests():
            for output in opened[-1].step():
                (last,) = output.outputs
                calls = "".join(call.arguments for call in last.tool_calls or ())
                found = {"reasoning": last.reasoning, "content": last.content, "arguments": calls}
                if params.output_kind is RequestOutputKind.DELTA:
                    found = {name: parts[name] + (text or "") for name, text in found.items()}
                parts = {name: text or "" for name, text in found.items()}
        return last, tuple(parts.values())

    yield run
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY], ids=str)
@pytest.mark.parametrize(
    ("prompt", "parser"),
    [
        ("hermes", "hermes"),
        ("open<think>", "hermes"),
        ("kimi", "kimi_k2"),
        ("singular", "kimi_k2"),
    ],
)
def test_a_call_ends_the_reasoning(completed, prompt, parser, kind, skip):
    last, parts = completed(prompt, parser, output_kind=kind, skip_special_tokens=skip)
    assert parts == ("I add.", "", ARGUMENTS)
    assert (last.finish_reason, last.warning) == ("tool_calls", None)


def test_a_call_that_breaks_is_content_with_its_marker(completed):
    last, parts = completed("hermes", max_tokens=21, skip_special_tokens=False)
    assert parts == ("I add.", '<tool_call>{"name": "add', "")
    assert last.warning == "a call is malformed: the output ended inside it"


def test_without_tools_the_text_is_reasoning(completed):
    _, parts = completed("hermes", tools=None, skip_special_tokens=False)
    assert parts == (f"I add.{HERMES}", "", "")


def test_other_tokens_do_not_end_it(completed):
    _, parts = completed("other", skip_special_tokens=False)
    assert parts == ("I add.</tool_call>So.", "Yes", "")


def test_a_budget_ends_with_the_reasoning(completed):
    _, parts = completed("hermes", thinking_token_budget=9)
    assert parts == ("I add.", "", ARGUMENTS)


def test_a_call_that_a_grammar_requires_is_behind_the_end_tag(completed):
    fields = {"thinking_token_budget": 40, "skip_special_tokens": False, "max_tokens": 99}
    last, parts = completed("hermes", required=["add"], **fields)
    thought, _, answer = last.text.partition("</think>")
    assert (thought, answer[:11]) == (f"<think>{parts[0]}", "<tool_call>")
    assert "<tool_call>" not in thought
