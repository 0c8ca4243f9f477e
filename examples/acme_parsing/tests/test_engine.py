"""A request's reasoning, answer and calls come apart, in an engine."""

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model

PROMPT = "user: time?\nassistant: "
REPLY = '<pad>I need it.</pad>One moment.>> now{"zone": "UTC"}\n'
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", ["scratchpad", "acme_parsing:Scratchpad"])
def test_an_output_comes_apart(tmp_path, name):
    config = {"reasoning": {"parser": name}, "tools": {"parser": name}}
    if ":" not in name:  # an FQCN enables the class that it names
        config["plugins"] = {"enable": ["scratchpad"]}
    tools = '[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]'
    folder = write_scripted_model(tmp_path, {f"tools: {tools}\n{PROMPT}": REPLY})
    greedy = SamplingParams(temperature=0.0, max_tokens=90)
    with LLM(config=scripted_config(folder, config)) as llm:
        messages = [[{"role": "user", "content": "time?"}]]
        (answer,) = llm.chat(messages, greedy, tools=[TOOL])[0].outputs
    assert (answer.reasoning, answer.content) == ("I need it.", "One moment.")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("now", '{"zone": "UTC"}')
    ]
