"""Every built-in output parser passes the public conformance kit."""

# ruff: noqa: RUF001 - the markers of DeepSeek are written so

from __future__ import annotations

import pytest
from support.searching import kit_examples, searches_long

from hardpoint.builtin_plugins.parsers.gemma import Gemma
from hardpoint.builtin_plugins.parsers.harmony import Harmony
from hardpoint.builtin_plugins.parsers.headed_calls import (
    DeepSeekV3,
    DeepSeekV31,
    Granite32,
    GraniteParser,
    KimiK2,
    MistralParser,
)
from hardpoint.builtin_plugins.parsers.json_calls import Json, Llama3Json
from hardpoint.builtin_plugins.parsers.json_sections import Hermes
from hardpoint.builtin_plugins.parsers.python_calls import Llama4Pythonic, Pythonic
from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.builtin_plugins.parsers.xml_calls import Qwen3Coder, SeedOss
from hardpoint.testing import OutputParserSuite, OutputSample
from hardpoint.testing.text import output_parser_suite

pytest_plugins = ["hardpoint.testing"]


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    # What copies all its text for a token is seen in a shorter text, too.
    if not searches_long():
        monkeypatch.setattr(output_parser_suite, "_LENGTH", 1 << 16)


WEATHER = ("get_weather", {"city": "Paris, <b>", "days": [1, 2.5], "unit": None})
ARGUMENTS = '{"city": "Paris, <b>", "days": [1, 2.5], "unit": null}'
EMPTY = ("now", {})
CUT = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": tr'
BAD = '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>!'
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NAMELESS = '<tool_call>{"arguments": {}}</tool_call>'
DEEP = "[" * 60 + "'a'" + "]" * 60
NOW = {"now": {}}
SCHEMAS = {
    "now": {},
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "unit": {"type": ["string", "null"]},
        }
    },
}
OPTIONAL = {
    "$defs": {"Size": {"enum": ["5", "10"]}, "Point": {"type": "object"}},
    "properties": {
        "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
        "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
    },
}


class TestThinkTags(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = ThinkTags
    samples = (
        OutputSample(
            "<think>\nSo <b and </thin.\n</think>\n\nHello", "\nSo <b and </thin.\n", "\n\nHello"
        ),
        OutputSample("So.</think>Hello", "So.", "Hello", reasoning_open=True),
        OutputSample("Hello </think", content="Hello </think"),
        OutputSample("<think>cut </thi", "cut </thi"),
        OutputSample(" \n", content=" \n"),
    )


class TestSpecialThinkTags(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = ThinkTags
    special_tokens = ("<think>", "</think>", "<tool_call>")
    samples = (
        OutputSample("<think>So</think> yes", "So", " yes"),
        OutputSample("<think>So<tool_call>{}", "So", "{}", tools=NOW),
        OutputSample("<think>So<tool_call>{}</think>!", "So{}", "!"),
        OutputSample("So<tool_call>a", "So", "a", reasoning_open=True, tools=NOW),
    )


class TestHermes(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Hermes
    samples = (
        OutputSample(
            f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
            '\n<tool_call>{"arguments": {}, "name": "now"}</tool_call> done',
            content="Sure.\n done",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(f"{CALL}\n\n{CALL}\n ", calls=(EMPTY, EMPTY)),
        OutputSample(f"{CALL}\n\nso\n{CALL}", content="\n\nso\n", calls=(EMPTY, EMPTY)),
        OutputSample(f"{BAD}\n{CALL}", content=f"{BAD}\n", calls=(EMPTY,), malformed=True),
        OutputSample(
            f"{NAMELESS}\n{CALL}", content=f"{NAMELESS}\n", calls=(EMPTY,), malformed=True
        ),
        OutputSample(
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\"<tool_call>"}}'
            "</tool_call>",
            calls=(("f", {"a": '</tool_call>"<tool_call>'}),),
        ),
        OutputSample(CUT, content=CUT, malformed=True),
        OutputSample(BAD, content=BAD, malformed=True),
        OutputSample(
            "<tool_call>no JSON</tool_call>",
            content="<tool_call>no JSON</tool_call>",
            malformed=True,
        ),
        OutputSample(NAMELESS, content=NAMELESS, malformed=True),
        OutputSample("<tool_call></tool_call>", content="<tool_call></tool_call>", malformed=True),
        OutputSample(f"{BAD}{CALL}!", content=f"{BAD}!", calls=(EMPTY,), malformed=True),
        OutputSample("1 <tool_call and 2", content="1 <tool_call and 2"),
    )


class TestLlama3Json(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Llama3Json
    special_tokens = ("<|python_tag|>",)
    samples = (
        OutputSample(f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', calls=(WEATHER,)),
        OutputSample(
            f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
            '{"name": "now", "parameters": {}}',
            calls=(WEATHER, EMPTY),
        ),
        OutputSample('{"name":"f","parameters":"{\\"x\\":1}"}', calls=(("f", {"x": 1}),)),
        OutputSample(' Hello {"name"', content=' Hello {"name"'),
        OutputSample(
            'Sure [1], {"a": 1}: [{"name": "now"},\n{"name": "f", "parameters": {"a": "}"}}] done',
            content='Sure [1], {"a": 1}: done',
            calls=(EMPTY, ("f", {"a": "}"})),
        ),
        OutputSample(
            'So:\n```json\n{"type": "function", "name": "now", "parameters": {}}\n``` and '
            '{"name": "Bob", "age": 3}, {"name": "now", "parameters": {}}, and',
            content='So:\n```json\n``` and {"name": "Bob", "age": 3}, , and',
            calls=(EMPTY, EMPTY),
            tools=NOW,
        ),
        OutputSample(
            'So: {"name": "now", "parameters": {"a": tru}}',
            content='So: {"name": "now", "parameters": {"a": tru}}',
            malformed=True,
            tools=NOW,
        ),
        OutputSample('So [{{ "na', content='So [{{ "na', tools=NOW),
        OutputSample(
            '{"name": "\\ud800", "parameters"',
            content='{"name": "\\ud800", "parameters"',
            malformed=True,
        ),
    )


class TestLlama3JsonAtTheBeginning(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Llama3Json
    options = {"after_text": False}
    samples = (
        OutputSample('{"name": "now", "parameters": {}}', calls=(EMPTY,)),
        OutputSample(
            'So: {"name": "now", "parameters": {}}', content='So: {"name": "now", "parameters": {}}'
        ),
    )


class TestJson(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Json
    samples = (
        OutputSample(
            f'[{{"name":"get_weather","arguments":{ARGUMENTS}}}, {{"name":"now"}}]',
            calls=(WEATHER, EMPTY),
        ),
        OutputSample('\n{"id": "{", "name": "now"} so', content="so", calls=(EMPTY,)),
        OutputSample(
            '\n{"id": [{"name": 1}], "name": "now"} so',
            content="so",
            calls=(EMPTY,),
            malformed=True,
        ),
        OutputSample('{"name": "now", "args": {}}', calls=(EMPTY,), malformed=True),
        OutputSample('{"name": "now", "arguments": " "}; ,', content="; ,", calls=(EMPTY,)),
        OutputSample('{"name": "now"}; , so', content="; , so", calls=(EMPTY,)),
        OutputSample("Hello", content="Hello"),
        OutputSample('Call {"name": "now"}', content='Call {"name": "now"}', tools=NOW),
    )


class TestJsonAfterText(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Json
    options = {"after_text": True}
    samples = (
        OutputSample(
            'Call {"name": "now"} or {"name":\n"f", "arguments": {"a": "[{"}}.',
            content="Call or .",
            calls=(EMPTY, ("f", {"a": "[{"})),
            tools={**NOW, "f": {}},
        ),
        OutputSample(
            'Hi {"name": "' + "n" * 400 + '"}', content='Hi {"name": "' + "n" * 400 + '"}'
        ),
    )


class TestKimiK2(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = KimiK2
    special_tokens = KimiK2.required_tokens
    samples = (
        OutputSample(
            "Hi<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>\n<|tool_call_begin|>"
            "functions.now:1<|tool_call_argument_begin|> {} <|tool_call_end|>"
            "<|tool_calls_section_end|>.",
            content="Hi.",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            "<|tool_calls_section_begin|>so <|tool_call_begin|><|tool_call_argument_begin|>{}"
            "<|tool_call_end|>",
            content="so {}",
            malformed=True,
        ),
        OutputSample(
            "Hi<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>\n"
            "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|> Bye.",
            content="Hi Bye.",
            calls=(EMPTY, EMPTY),
        ),
        OutputSample(
            "Hi<|tool_call_section_begin|>\n<|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|>\n<|tool_call_section_end|>\n",
            content="Hi",
            calls=(EMPTY,),
        ),
        OutputSample(
            "<|tool_call_section_begin|> is a marker",
            content="<|tool_call_section_begin|> is a marker",
            malformed=True,
        ),
    )


class TestKimiK2WithTheSingularAsToken(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = KimiK2
    special_tokens = (
        *KimiK2.required_tokens,
        "<|tool_call_section_begin|>",
        "<|tool_call_section_end|>",
    )
    samples = (
        OutputSample(
            "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>",
            calls=(EMPTY,),
        ),
    )


class TestDeepSeekV3(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = DeepSeekV3
    special_tokens = DeepSeekV3.required_tokens
    samples = (
        OutputSample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
            "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample("a\n```json\n{}\n```", content="a\n```json\n{}\n```"),
    )


class TestDeepSeekV31(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = DeepSeekV31
    special_tokens = DeepSeekV31.required_tokens
    samples = (
        OutputSample(
            f"x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            content="x",
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{",
            content="now{",
            malformed=True,
        ),
    )


class TestMistral(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = MistralParser
    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    samples = (
        OutputSample(
            f"[THINK]hm [ARGS[/THINK]ok[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
            "[TOOL_CALLS]now[CALL_ID]abc123xyz[ARGS]{}",
            "hm [ARGS",
            "ok",
            (WEATHER, EMPTY),
        ),
        OutputSample(
            "[TOOL_CALLS]now[CALL_ID]a{}[TOOL_CALLS]{}",
            content="{}",
            calls=(EMPTY,),
            malformed=True,
        ),
    )

    def test_ids(self):
        state = self._subject.open(self.samples[0].request)
        pieces = self._pieces(self.samples[0].text)
        events = [
            e
            for p in pieces
            for e in (state.feed_token(p, "") if isinstance(p, int) else state.feed(p))
        ]
        assert [e.id for e in events if hasattr(e, "id")] == [None, "abc123xyz"]


class TestOldMistral(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = MistralParser
    special_tokens = ("[TOOL_CALLS]",)
    samples = (
        OutputSample(
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', calls=(WEATHER,)
        ),
        OutputSample("[TOOL_CALLS]now{}", calls=(EMPTY,)),
    )


class TestGranite(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = GraniteParser
    samples = (
        OutputSample("<think>So</think><response>Yes</response>", "So", "Yes"),
        OutputSample("No <response> here", content="No <response> here"),
        OutputSample(
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
            '{"name": "now"}]',
            calls=(WEATHER, EMPTY),
        ),
        OutputSample('<tool_call>{"name": "now", "arguments": {}}</tool_call>', calls=(EMPTY,)),
    )


class TestGranite32(OutputParserSuite):
    examples = kit_examples(0.5)
    parser = Granite32
    samples = (
        OutputSample("Here is my thought process: So. Here is my response: Yes", " So. ", " Yes"),
        OutputSample("Here is my thought: no", content="Here is my thought: no"),
    )


class TestHarmony(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Harmony
    special_tokens = (*Harmony.required_tokens, "<|return|>", "<|constrain|>")
    samples = (
        OutputSample(
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            "So.",
            calls=(WEATHER,),
        ),
        OutputSample(
            " to=functions.now<|channel|>commentary<|message|>{}<|call|>\n<|start|>assistant"
            "<|channel|>commentary to=browser.search<|message|>{1}<|call|><|channel|>final"
            "<|message|>Hello<|return|>",
            content="{1}Hello",
            calls=(EMPTY,),
            malformed=True,
        ),
        OutputSample("Hello", content="Hello"),
        OutputSample(
            "I will look. <|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
            "So.",
            "I will look. ",
            calls=(EMPTY,),
        ),
        OutputSample(
            "I set to=functions.now<|start|>assistant<|channel|>commentary to=functions.now"
            "<|message|>{1<|call|>",
            content="I set to=functions.nowassistantcommentary to=functions.now{1",
            malformed=True,
        ),
        OutputSample("No.<|message|>Yes.<|end|>", content="No.Yes."),
        OutputSample("final<|message|>Yes.<|end|>", content="Yes."),
        OutputSample("So<|end|>no<|start|>a", "So", "noa", reasoning_open=True, malformed=True),
        OutputSample("<|channel|>final It is 42.", content="It is 42.", malformed=True),
        OutputSample(
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant It is 42.<|return|>",
            "So.",
            "It is 42.",
            malformed=True,
        ),
        OutputSample(
            '<|channel|>final <|constrain|>json {"a": 42}<|end|><|start|>assistant<|channel|>final'
            "<|message|>Yes.",
            content='{"a": 42}Yes.',
            malformed=True,
        ),
        OutputSample("<|channel|>analysis So<|start|>assistant", "So", malformed=True),
        OutputSample("<|channel|>final one<|message|>Yes.", content="Yes.", malformed=True),
        OutputSample("<|channel|>commentary to=functions.now <|constrain|>json", malformed=True),
        OutputSample(
            "<|channel|>commentary to=functions.now<|message|><|call|>", calls=(EMPTY,), tools=NOW
        ),
    )


class TestQwen3Coder(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Qwen3Coder
    samples = (
        OutputSample(
            "Ok.<tool_call>\n<function=get_weather>\n<parameter=city>\nParis, <b>\n</parameter>\n"
            "<parameter=days>\n[1, 2.5]\n</parameter>\n<parameter=unit>null</parameter>\n"
            "</function>\n<function=now>\n</function>\n</tool_call>",
            content="Ok.",
            calls=(WEATHER, EMPTY),
            tools=SCHEMAS,
        ),
        OutputSample(
            "<tool_call><function=f>\n<parameter=a>\nx </function> <parameter=\n<parameter=b>\nTrue"
            "\n</function></tool_call>z",
            content="z",
            calls=(("f", {"a": "x </function> <parameter=", "b": True}),),
            malformed=True,  # values without end tags
        ),
        OutputSample(  # a value with the end of a call
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</parameter>\n</function>\n"
            "</tool_call>",
            content="\n</parameter>\n</function>\n</tool_call>",
            calls=(("f", {"a": "x"}),),
            malformed=True,
        ),
        OutputSample(
            "<tool_call><function=f><parameter=size>10</parameter><parameter=at>{'x': 1}"
            "</parameter></function></tool_call>",
            calls=(("f", {"size": "10", "at": {"x": 1}}),),
            tools={"f": OPTIONAL},
        ),
        OutputSample("<tool_call><function=now></tool_call>z", content="z", calls=(EMPTY,)),
        OutputSample(
            "<tool_call><function=now></function",
            content="<tool_call><function=now></function",
            malformed=True,
        ),
        OutputSample(
            "<tool_call>hm</tool_call>", content="<tool_call>hm</tool_call>", malformed=True
        ),
        OutputSample(
            "<tool_call>hm<function=now></function></tool_call>",
            content="<tool_call>hm",
            calls=(EMPTY,),
            malformed=True,
        ),
        OutputSample(
            "Ok.\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>"
            "\n</function>\n</tool_call>\n",
            content="Ok.\n",
            calls=(EMPTY, EMPTY),
        ),
        OutputSample(
            "<function=get_weather>\n<parameter=city>\nParis, <b>\n</parameter>\n<parameter=days>"
            "\n[1, 2.5]\n</parameter>\n<parameter=unit>null</parameter>\n</function>\nSo be it.",
            content="\nSo be it.",
            calls=(WEATHER,),
            tools=SCHEMAS,
        ),
        OutputSample(
            "A <function and <function=", content="A <function and <function=", malformed=True
        ),
        OutputSample(
            "<tool_call><function=f><parameter=a>{'x': 'it\\'s', 'y': (None, -1.5, True)}"
            "</parameter><parameter=b>['}', {1, 2}]</parameter><parameter=c>[{'x': \"<b>\"}]"
            "</parameter><parameter=d>{'x': 1}</parameter><parameter=e>{'x': 1}</parameter>"
            "</function></tool_call>",
            calls=(
                (
                    "f",
                    {
                        "a": {"x": "it's", "y": [None, -1.5, True]},
                        "b": "['}', {1, 2}]",
                        "c": [{"x": "<b>"}],
                        "d": "{'x': 1}",
                        "e": "{'x': 1}",
                    },
                ),
            ),
            tools={
                "f": {
                    "properties": {
                        "a": {"type": "object"},
                        "b": {"type": "array"},
                        "c": {"anyOf": [{"type": "array"}, {"type": "null"}]},
                        "d": {"type": ["string", "object"]},
                        "e": {"type": "integer"},
                    }
                }
            },
        ),
        OutputSample(
            f"<function=f><parameter=a>{DEEP}</parameter></function>",
            calls=(("f", {"a": DEEP}),),
            tools={"f": {"properties": {"a": {"type": "array"}}}},
        ),
    )


class TestSeedOss(OutputParserSuite):
    examples = kit_examples(0.5)
    parser = SeedOss
    samples = (
        OutputSample(
            "<seed:think>So</seed:think>\n<seed:tool_call>\n<function=f>\n<parameter=a>5</parameter>"
            "\n</function>\n</seed:tool_call>",
            "So",
            "\n",
            (("f", {"a": "5"}),),
            tools={"f": {"properties": {"a": {"anyOf": [{"type": "string"}]}}}},
        ),
        OutputSample(
            "<seed:tool_call><function=f><parameter=a>5</parameter></seed:tool_call>.",
            content=".",
            calls=(("f", {"a": 5}),),
        ),
    )


class TestCallsInReasoning(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = SeedOss
    samples = (
        OutputSample(
            "<seed:think>I write <seed:tool_call> soon.</seed:think>Hi",
            "I write <seed:tool_call> soon.",
            "Hi",
        ),
    )


class TestPythonic(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Pythonic
    samples = (
        OutputSample(
            '[get_weather(city="Paris, <b>", days=[1, 2.5], unit=None), now()]',
            calls=(WEATHER, EMPTY),
        ),
        OutputSample(
            " [f(a='])\\'\\d', b={'x': (-1, true)})] so",
            content=" so",
            calls=(("f", {"a": "])'\\d", "b": {"x": [-1, True]}}),),
        ),
        OutputSample(" [1] says so", content=" [1] says so"),
        OutputSample(
            "See [now](there), [[now()] and [f(a=[1], b=']')]. Or [other()]",
            content="See [now](there), [ and . Or [other()]",
            calls=(EMPTY, ("f", {"a": [1], "b": "]"})),
            tools={**NOW, "f": {}},
        ),
        OutputSample("See [now(1)]", content="See [now(1)]", malformed=True),
        OutputSample("See [no", content="See [no", tools=NOW),
        OutputSample("See [now (", content="See [now (", tools=NOW),
        OutputSample("[f(1), now()]", content="[f(1), now()]", malformed=True),
        OutputSample("[f(a=g())]", content="[f(a=g())]", malformed=True),
        OutputSample('[now(), f(a="x', content=', f(a="x', calls=(EMPTY,), malformed=True),
        OutputSample("[f(a=[" + "[" * 60, content="[f(a=[" + "[" * 60, malformed=True),
    )


class TestPythonicAtTheBeginning(OutputParserSuite):
    examples = kit_examples(0.2)
    parser = Pythonic
    options = {"after_text": False}
    samples = (
        OutputSample("[now()]", calls=(EMPTY,)),
        OutputSample("See [now()]", content="See [now()]", tools=NOW),
    )


class TestLlama4Pythonic(OutputParserSuite):
    examples = kit_examples(0.5)
    parser = Llama4Pythonic
    samples = (
        OutputSample(
            '<|python_start|>[f(a="<|python_end|>")]<|python_end|>x',
            content="x",
            calls=(("f", {"a": "<|python_end|>"}),),
        ),
        OutputSample("[now()]", calls=(EMPTY,)),
        OutputSample("See [now()]", content="See [now()]", tools=NOW),
    )


class TestGemma(OutputParserSuite):
    examples = kit_examples(0.3)
    parser = Gemma
    special_tokens = Gemma.required_tokens
    samples = (
        OutputSample(
            "<|channel>thought\nSo<channel|>ok<|tool_call>call:get_weather{"
            'city:<|"|>Paris, <b><|"|>,days:[1,2.5],unit:None}<tool_call|><|tool_call>call:now{}'
            "<tool_call|>",
            "So",
            "ok",
            (WEATHER, EMPTY),
        ),
        OutputSample(
            '<|tool_call>call:f{a:<|"|>"{\\\n<|"|>,b:{c:true}}<tool_call|>',
            calls=(("f", {"a": '"{\\\n', "b": {"c": True}}),),
        ),
        OutputSample("<|channel>thought\n<channel|>Hello", content="Hello"),
        OutputSample(
            '<|tool_call>call:f{a:<|"|>x<tool_call|>y', content="call:f{a:xy", malformed=True
        ),
        OutputSample('<|tool_call>"{\\}:x', content='"{\\}:x', malformed=True),
        OutputSample("thought\nSo<channel|>Yes", "So", "Yes", reasoning_open=True),
        OutputSample("Yes<channel|>, no<tool_call|>.", content="Yes, no."),
        OutputSample("<|tool_call>call:now{}<tool_call|><tool_call|>\n", calls=(EMPTY,)),
    )
