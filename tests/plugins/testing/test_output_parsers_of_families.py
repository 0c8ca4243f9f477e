"""Output parsers of more families of models pass the public conformance kit, with their forms.

The outputs have the form that the chat templates of the models show for the assistant's messages.
"""

# ruff: noqa: RUF001 - the markers of DeepSeek and Step are written so

from __future__ import annotations

import re

import pytest
from support.searching import kit_examples, searches_long

from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.json_sections import (
    Cohere,
    Ernie45,
    Hunyuan,
    Jamba,
    Longcat,
    MiniMax,
    Nemotron,
    Phi4Mini,
)
from hardpoint.builtin_plugins.parsers.python_calls import Lfm2, Olmo3Parser
from hardpoint.builtin_plugins.parsers.xml_calls import DeepSeekV32, Glm45, MiniMaxM2, Step3
from hardpoint.testing import OutputParserSuite, OutputSample
from hardpoint.testing.text import output_parser_suite

pytest_plugins = ["hardpoint.testing"]


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    # What copies all its text for a token is seen in a shorter text, too.
    if not searches_long():
        monkeypatch.setattr(output_parser_suite, "_LENGTH", 1 << 15)


ARGUMENTS = '{"city": "Paris, <b>", "days": [1, 2.5], "unit": null}'
WEATHER = ("get_weather", {"city": "Paris, <b>", "days": [1, 2.5], "unit": None})
EMPTY = ("now", {})
CALLS = (
    f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
)
NOW = '{"name": "now", "arguments": {}}'
SCHEMAS = {
    "now": {},
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "unit": {"type": ["string", "null"]},
            "code": {"type": "string"},
        }
    },
}
CODE = 'if a < b:\n    print("</p>", [1])'


class TestGlm45(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Glm45
    samples = (
        OutputSample(
            "\nI look it up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
            "Paris, <b></arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2.5]</arg_value>\n"
            "<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            content="\nI look it up.\n",
            calls=(WEATHER, EMPTY),
            tools=SCHEMAS,
        ),
        OutputSample(
            "<tool_call>get_weather<arg_key>days</arg_key><arg_value>['a', 1, True]"
            f"</arg_value><arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>"
            "<tool_call>now</tool_call>.",
            content=".",
            calls=(("get_weather", {"days": ["a", 1, True], "code": CODE}), EMPTY),
            tools=SCHEMAS,
        ),
        OutputSample(  # text behind an end tag that a value contains
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> y</arg_value></tool_call>!",
            content="<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value> y</arg_value>"
            "</tool_call>!",
            malformed=True,
        ),
        OutputSample(  # a value with the end of a call
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call> y</arg_value>"
            "</tool_call>",
            content=" y</arg_value></tool_call>",
            calls=(("f", {"a": "x"}),),
            malformed=True,
        ),
        OutputSample(
            "<tool_call>f<arg_key>a<</arg_key><arg_value>x</arg_value></tool_call>",
            content="<tool_call>f<arg_key>a<</arg_key><arg_value>x</arg_value></tool_call>",
            malformed=True,
        ),
        OutputSample(
            "<tool_call>f<arg_key>a</arg_key><arg_value>\n\tx\n\n</arg_value></tool_call>",
            calls=(("f", {"a": "\n\tx\n\n"}),),
        ),
        OutputSample(
            '<tool_call>f<arg_key>a</arg_key><arg_value>{"b": "</arg_value>"}</arg_value><arg_key>'
            '"c"</arg_key><arg_value>\n5\n</arg_value></tool_call>',
            calls=(("f", {"a": {"b": "</arg_value>"}, '"c"': 5}),),
            tools={"f": {"properties": {"a": {"type": "object"}}}},
        ),
        OutputSample(
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>",
            content="<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>",
            malformed=True,
        ),
        OutputSample(
            "<tool_call>\n</tool_call>", content="<tool_call>\n</tool_call>", malformed=True
        ),
        OutputSample("The <tool_call tag", content="The <tool_call tag"),
    )


class TestGlm45WithTokens(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Glm45
    special_tokens = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    )
    samples = (
        OutputSample(
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>\n",
            calls=(("f", {"a": "x"}),),
        ),
    )


class TestMiniMaxM2(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = MiniMaxM2
    samples = (
        OutputSample(
            'Ok.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
            'Paris, <b></parameter>\n<parameter name="days">[1, 2.5]</parameter>\n'
            '<parameter name="unit">null</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
            "</minimax:tool_call>",
            content="Ok.\n",
            calls=(WEATHER, EMPTY),
            tools=SCHEMAS,
        ),
        OutputSample(
            "<minimax:tool_call><invoke name='f'><parameter name=a>1</parameter>\n"
            f'<parameter name="code">{CODE}</parameter></minimax:tool_call> So.',
            content=" So.",
            calls=(("f", {"a": 1, "code": CODE}),),
        ),
        OutputSample(
            '<minimax:tool_call>\n<invoke name="">',
            content='<minimax:tool_call>\n<invoke name="">',
            malformed=True,
        ),
        OutputSample(
            '<minimax:tool_call><minimax:tool_call><invoke name="now"></invoke>',
            content="<minimax:tool_call><minimax:tool_call>",
            calls=(EMPTY,),
            malformed=True,
        ),
    )


def dsml(text: str) -> str:
    """Return a text with the mark of DeepSeek in its tags."""
    return re.sub("<(/?)(?=function_calls|tool_calls|invoke|parameter)", r"<\1｜DSML｜", text)


class TestDeepSeekV32(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = DeepSeekV32
    samples = (
        OutputSample(
            dsml(
                'Ok.\n\n<function_calls>\n<invoke name="get_weather">\n<parameter name="city" '
                'string="true">Paris, <b></parameter>\n<parameter name="days" string="false">'
                '[1, 2.5]</parameter>\n<parameter name="unit" string="false">null</parameter>\n'
                '</invoke>\n<invoke name="now">\n</invoke>\n</function_calls>'
            ),
            content="Ok.\n\n",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            dsml(
                '<tool_calls><invoke name="f"><parameter name="a" string="true">5</parameter>'
                "</invoke></tool_calls>"
            ),
            calls=(("f", {"a": "5"}),),
        ),
        OutputSample(
            dsml('<tool_calls><invoke name="f"><parameter name="a" string="true">5'),
            content=dsml('<tool_calls><invoke name="f"><parameter name="a" string="true">5'),
            malformed=True,
        ),
    )


class TestStep3(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Step3
    special_tokens = (
        *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>"),
        *("<｜tool_call_end｜>", "<｜tool_sep｜>"),
    )
    samples = (
        OutputSample(
            "Ok.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Paris, <b>'
            "</steptml:parameter>\n"
            '<steptml:parameter name="days">[1, 2.5]</steptml:parameter>\n<steptml:parameter name='
            '"unit">null</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
            "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
            content="Ok.",
            calls=(WEATHER, EMPTY),
            tools=SCHEMAS,
        ),
        OutputSample(
            "<｜tool_calls_begin｜>hm<｜tool_calls_end｜>!", content="hm!", malformed=True
        ),
    )


class TestStep3InText(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Step3
    samples = (
        OutputSample(
            '<｜tool_calls_begin｜><steptml:invoke name="f"><steptml:parameter name="code">'
            f"{CODE}</steptml:parameter></steptml:invoke><｜tool_calls_end｜>",
            calls=(("f", {"code": CODE}),),
        ),
    )


class TestHunyuan(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Hunyuan
    samples = (
        OutputSample("<think>\nSo\n</think>\n<answer>\nYes.\n</answer>", "\nSo\n", "Yes."),
        OutputSample(
            f"<think>\nSo\n</think>\n<answer>\nOk. \n<tool_calls>{CALLS}</tool_calls>\n</answer>",
            "\nSo\n",
            "Ok.",
            (WEATHER, EMPTY),
        ),
        OutputSample(f"<tool_calls>{CALLS}</tool_calls>", calls=(WEATHER, EMPTY)),
        OutputSample("\n<answer>\nYes,\n\n1\n</answer>", content="Yes,\n\n1"),
        OutputSample("\n Hello</answer>, <answer>", content="\n Hello</answer>, <answer>"),
        OutputSample("So</think>\n\nYes", "So", "\n\nYes", reasoning_open=True),
        OutputSample(
            "<tool_calls>[{]</tool_calls>", content="<tool_calls>[{]</tool_calls>", malformed=True
        ),
        OutputSample(
            f"<think>So</think><tool_calls>{CALLS[:-1]}",
            "So",
            "",
            (WEATHER, EMPTY),
        ),
    )


class TestErnie45(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Ernie45
    samples = (
        OutputSample("<think>\nSo\n</think>\n\n<response>\nYes.\n</response>\n", "\nSo\n", "Yes."),
        OutputSample(
            f"So\n</think>\n\n\n<tool_call>\n{CALLS[1:-1].split(', {')[0]}\n</tool_call>\n"
            f"<tool_call>\n{NOW}\n</tool_call>\n",
            "So\n",
            calls=(WEATHER, EMPTY),
            reasoning_open=True,
        ),
        OutputSample("Hello <response> there", content="Hello <response> there"),
    )


class TestCohere(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Cohere
    special_tokens = (*Cohere.required_tokens, "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    samples = (
        OutputSample(
            '<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": '
            f'"0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}},\n    {{"tool_call_id": '
            '"1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
            "I will look.",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            "<|START_RESPONSE|>It is <co>3</co: 0:[0]>.<|END_RESPONSE|>",
            content="It is <co>3</co: 0:[0]>.",
        ),
        OutputSample(
            "So.<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", "So.", "Yes", reasoning_open=True
        ),
        OutputSample(
            '<|START_ACTION|>[{"name": "now", "parameters": {}}]<|END_ACTION|>',
            content='[{"name": "now", "parameters": {}}]',
            malformed=True,
        ),
    )


class TestNemotron(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Nemotron
    samples = (
        OutputSample(
            f"Ok.\n\n<TOOLCALL>{CALLS}</TOOLCALL>\n", content="Ok.\n\n", calls=(WEATHER, EMPTY)
        ),
        OutputSample(f"<TOOLCALL>{NOW} So", content="So", calls=(EMPTY,)),
        OutputSample(
            "<TOOLCALL>[1]</TOOLCALL>", content="<TOOLCALL>[1]</TOOLCALL>", malformed=True
        ),
    )


class TestJamba(OutputParserSuite):
    examples = kit_examples(0.1)
    parser = Jamba
    samples = (OutputSample(f"<tool_calls>{CALLS}</tool_calls>", calls=(WEATHER, EMPTY)),)


class TestMiniMax(OutputParserSuite):
    examples = kit_examples(0.1)
    parser = MiniMax
    samples = (
        OutputSample(
            f'Ok.\n<tool_calls>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n{NOW}\n'
            "</tool_calls> So.",
            content="Ok.\n So.",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(f"<tool_calls>{NOW}", calls=(EMPTY,)),
        OutputSample(
            "<tool_calls>\n</tool_calls>", content="<tool_calls>\n</tool_calls>", malformed=True
        ),
        OutputSample(
            f"<tool_calls>\n{NOW}\nand</tool_calls>",
            content="\nand</tool_calls>",
            calls=(EMPTY,),
            malformed=True,
        ),
    )


class TestLongcat(OutputParserSuite):
    examples = kit_examples(0.1)
    parser = Longcat
    samples = (
        OutputSample(
            f"Hi<longcat_tool_call>\n{NOW}\n</longcat_tool_call>\n<longcat_tool_call>{NOW}"
            "</longcat_tool_call>",
            content="Hi",
            calls=(EMPTY, EMPTY),
        ),
    )


class TestPhi4Mini(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Phi4Mini
    samples = (
        OutputSample(f"functools{CALLS}", calls=(WEATHER, EMPTY)),
        OutputSample(f"<|tool_call|>{CALLS}<|/tool_call|>", calls=(WEATHER, EMPTY)),
        OutputSample(
            f"<|tool_call|>{NOW}<|/tool_call|><|tool_call|>{NOW}<|/tool_call|>.",
            content=".",
            calls=(EMPTY, EMPTY),
        ),
        OutputSample("from functools import wraps", content="from functools import wraps"),
        OutputSample("functools[0] is", content="functools[0] is", malformed=True),
    )


class TestOlmo3(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Olmo3Parser
    samples = (
        OutputSample(
            "Ok.<function_calls>\nget_weather(city='Paris, <b>', days=[1, 2.5], unit=null)\nnow()\n"
            "</function_calls>\n",
            content="Ok.",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            "<function_calls>f(a='</function_calls>', b={'x': true})</function_calls> so",
            content=" so",
            calls=(("f", {"a": "</function_calls>", "b": {"x": True}}),),
        ),
        OutputSample(
            "<function_calls>\nno call\n</function_calls>",
            content="<function_calls>\nno call\n</function_calls>",
            malformed=True,
        ),
        OutputSample(
            "<function_calls>\nnow()\nf(a=g())\n</function_calls>",
            content="\nf(a=g())\n</function_calls>",
            calls=(EMPTY,),
            malformed=True,
        ),
        OutputSample("<function_calls>]", content="<function_calls>]", malformed=True),
    )


class TestLfm2(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Lfm2
    special_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    samples = (
        OutputSample(
            '<|tool_call_start|>[get_weather(city="Paris, <b>", days=[1, 2.5], unit=None), now()]'
            "<|tool_call_end|>I look.",
            content="I look.",
            calls=(WEATHER, EMPTY),
        ),
    )


class TestHarmonyChannels(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Harmony
    special_tokens = (*Harmony.required_tokens, "<|return|>", "<|constrain|>")
    samples = (
        OutputSample(  # the recipient in the role's part of the header, as the template writes it
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.now"
            "<|channel|>commentary json<|message|>{}<|call|>",
            "So.",
            calls=(EMPTY,),
        ),
        OutputSample(  # what goes to built-in tools is text of its channel
            '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|><|start|>'
            "assistant<|channel|>analysis to=python code<|message|>1 + 1<|call|><|start|>assistant"
            "<|channel|>final<|message|>Two.<|return|>",
            '{"query": "x"}1 + 1',
            "Two.",
            malformed=True,
        ),
        OutputSample(  # a preamble before a call
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.get_weather<|constrain|>json<|message|>"
            f"{ARGUMENTS}<|call|>",
            content="I will look.",
            calls=(WEATHER,),
        ),
        OutputSample("<|channel|>final <|constrain|>json<|message|>{1}<|return|>", content="{1}"),
    )
