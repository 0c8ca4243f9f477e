"""vLLM's reasoning parsers and tool parsers as output parsers of an engine."""

import importlib.util
import json

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import PluginContractError
from hardpoint.testing import scripted_config, write_scripted_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed"
)

NOW = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
HERE = "vllm_parsing"


def llm_with(folder, reply, reasoning=None, tools=None, **options):
    """Return an engine that answers "Hi" with `reply`."""
    prompt = "user: Hi\nassistant: "
    with_tools = f"tools: {json.dumps([NOW])}\n{prompt}"
    replies = {prompt: reply, with_tools: reply}
    write_scripted_model(folder, replies, max_position_embeddings=900)
    settings = {"plugins": {"enable": ["vllm"]}, "plugin": options}
    if reasoning:
        settings["reasoning"] = {"parser": f"{HERE}:{reasoning}"}
    if tools:
        settings["tools"] = {"parser": f"{HERE}:{tools}"}
    return LLM(config=scripted_config(folder, settings))


def answer(llm, *tools):
    """Return the completion of a chat with tools."""
    params = SamplingParams(temperature=0.0, max_tokens=200)
    messages = [{"role": "user", "content": "Hi"}]
    return llm.chat(messages, params, tools=list(tools))[0].outputs[0]


@pytest.mark.parametrize(
    ("reply", "reasoning", "content"),
    [
        ("I think.||Yes.", "I think.", "Yes."),
        ("Yes.", None, "Yes."),
        ("I think.||", "I think.", None),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_reasoning(tmp_path, reply, reasoning, content, streaming):
    with llm_with(tmp_path, reply, "Pipes", pipes={"streaming": streaming}) as llm:
        completion = answer(llm)
    if streaming and "||" not in reply:
        reasoning, content = content, None  # vLLM's parser decides piece by piece
    assert (completion.reasoning, completion.content or None) == (reasoning, content)


@pytest.mark.parametrize("streaming", [False, True])
def test_calls(tmp_path, streaming):
    reply = 'One moment.->now{"zone": "UTC"}'
    with llm_with(tmp_path, reply, tools="Arrows", arrows={"streaming": streaming}) as llm:
        completion = answer(llm, NOW)
    (call,) = completion.tool_calls
    assert (call.name, call.arguments) == ("now", '{"zone": "UTC"}')
    assert completion.content == "One moment."
    assert completion.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ('->later{"zone": 1}', "there is no tool 'later'"),
        ('->now{"zone": }', "the arguments of 'now' are no JSON"),
    ],
)
def test_wrong_calls_are_content_with_a_warning(tmp_path, reply, reason):
    with llm_with(tmp_path, reply, tools="Arrows") as llm:
        completion = answer(llm, NOW)
    assert not completion.tool_calls
    assert completion.content == reply
    assert reason in completion.warning


def test_reasoning_and_calls_together(tmp_path):
    reply = 'I need it.||Wait.->now{"zone": "UTC"}'
    with llm_with(tmp_path, reply, "Pipes", "Arrows") as llm:
        completion = answer(llm, NOW)
    assert (completion.reasoning, completion.content) == ("I need it.", "Wait.")
    assert [call.name for call in completion.tool_calls] == ["now"]


def test_a_parser_that_fails_ends_its_request_alone(tmp_path):
    with llm_with(tmp_path, "Yes.", tools="Raises") as llm:
        failed = answer(llm, NOW)
        assert failed.finish_reason == "error"
        assert "raises" in failed.error
        assert llm.generate("Hi", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_markers_of_the_prompt_open_the_reasoning(tmp_path):
    with llm_with(tmp_path, "So.</t>Yes.", "Tags") as llm:
        completion = answer(llm)
    assert (completion.reasoning, completion.content) == ("So.", "Yes.")


def test_a_class_without_the_method_is_refused_before_the_model_loads(tmp_path):
    with pytest.raises(PluginContractError, match=r"it lacks extract_tool_calls\(model_output"):
        llm_with(tmp_path, "Yes.", tools="WithoutMethod")
