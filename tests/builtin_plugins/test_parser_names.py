"""Output parsers by their names in vLLM, and by the markers of chat templates."""

# ruff: noqa: RUF001 - the markers of Step are written so

from __future__ import annotations

import pytest

from hardpoint import LLM, RequestError, SamplingParams
from hardpoint.errors import PluginNotFoundError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins.config import EngineConfig
from hardpoint.testing import scripted_config, write_scripted_model

PLUGINS = resolve_plugins(EngineConfig())
OF_VLLM = {
    "reasoning_parsers": {
        "deepseek_r1": "think_tags",
        "qwen3": "think_tags",
        "glm45": "think_tags",
        "minimax_m2": "think_tags",
        "olmo3": "think_tags",
        "step3": "think_tags",
        "openai_gptoss": "harmony",
        "cohere_command3": "cohere",
        "gemma4": "gemma",
        "ernie45": "ernie45",
        "hunyuan_a13b": "hunyuan_a13b",
        "seed_oss": "seed_oss",
        "mistral": "mistral",
        "granite": "granite",
    },
    "tool_parsers": {
        "deepseek_v31": "deepseek_v3_1",
        "deepseek_v32": "deepseek_v3_2",
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
        "glm47": "glm45",
        "openai": "harmony",
        "phi4_mini_json": "phi4_mini",
        "llama4_json": "llama3_json",
        "granite4": "granite",
        "cohere_command3": "cohere",
        "minimax": "minimax",
        "minimax_m2": "minimax_m2",
        "step3": "step3",
        "olmo3": "olmo3",
        "kimi_k2": "kimi_k2",
    },
}


@pytest.mark.parametrize("kind", OF_VLLM)
def test_parsers_are_known_by_the_names_of_vllm(kind):
    for name, expected in OF_VLLM[kind].items():
        assert PLUGINS.get(kind, name).name == expected, name


def test_an_own_name_comes_first_and_an_unknown_one_is_refused():
    for kind in OF_VLLM:
        names = {entry.name for entry in PLUGINS.entries(kind)}
        assert all(PLUGINS.get(kind, name).name == name for name in names)
    with pytest.raises(PluginNotFoundError, match="tool_parsers: no component 'deepseek_r1' is"):
        PLUGINS.get("tool_parsers", "deepseek_r1")
    assert PLUGINS.find("nothing", "openai") is None


# What the chat templates of the models have, as far as it shows the format.
SHOWN = [
    ("hermes", "think_tags", '<tool_call>{"name": x, "arguments": y}</tool_call> <think></think>'),
    ("qwen3_coder", None, '<tool_call><function=f><parameter=a>"arguments"'),
    ("glm45", "think_tags", "<think></think><tool_call>f<arg_key>a</arg_key><arg_value>"),
    ("minimax_m2", "think_tags", '<minimax:tool_call><invoke name="f"> <think></think>'),
    ("step3", None, '<｜tool_calls_begin｜><steptml:invoke name="f">'),
    ("ernie45", "ernie45", '<think></think><response></response><tool_call>"arguments"'),
    ("hunyuan_a13b", "hunyuan_a13b", '<tool_calls>[{"arguments"}]</tool_calls><think>\n</think>'),
    ("jamba", None, '<tool_calls>[{"name"}]</tool_calls>'),
    (
        "minimax",
        None,
        'system tool_setting=tools\n<tool_calls>\n{"name", "arguments"}</tool_calls>',
    ),
    ("nemotron", "think_tags", "<think></think><TOOLCALL>[]</TOOLCALL>"),
    ("cohere", "cohere", "<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>"),
    ("phi4_mini", None, "<|tool|>{{ tools }}<|/tool|>"),
    ("olmo3", None, "<functions></functions><function_calls>"),
    ("lfm2", None, "<|tool_list_start|>[<|tool_list_end|>"),
    ("longcat", None, '<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>'),
]


@pytest.mark.parametrize(("tools", "reasoning", "template"), SHOWN, ids=[case[0] for case in SHOWN])
def test_a_template_shows_its_parsers(tools, reasoning, template):
    for kind, name in (("tool_parsers", tools), ("reasoning_parsers", reasoning)):
        fitting = {
            entry.name: sum(map(len, marks))
            for entry in PLUGINS.entries(kind)
            if (marks := PLUGINS.target(entry).template_marks)
            if all(mark in template for mark in marks)
        }
        best = [parser for parser in fitting if fitting[parser] == max(fitting.values())]
        assert best == ([name] if name else []), kind


REPLY = "<think>So</think><tool_call>now</tool_call>"


def test_the_configuration_and_requests_use_these_names(tmp_path):
    folder = write_scripted_model(tmp_path)
    chosen = {"reasoning": {"parser": "qwen3"}, "tools": {"parser": "glm47"}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "now?"}]
    with LLM(config=scripted_config(folder, chosen)) as llm:
        prompt = llm.model.apply_chat_template(messages, tools=tools)["prompt"]
    write_scripted_model(folder, {prompt: REPLY})
    with LLM(config=scripted_config(folder, chosen)) as llm:
        for params in (
            SamplingParams(max_tokens=99),
            SamplingParams(max_tokens=99, reasoning_parser="deepseek_r1", tool_parser="glm45"),
        ):
            (output,) = llm.chat(messages, params, tools=tools)
            completion = output.outputs[0]
            assert completion.reasoning == "So"
            assert [call.name for call in completion.tool_calls] == ["now"]
        with pytest.raises(RequestError, match="tool_parser: expected .*got 'glm48'"):
            llm.chat(messages, SamplingParams(tool_parser="glm48"), tools=tools)
