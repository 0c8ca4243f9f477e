"""think_tags."""

from __future__ import annotations

import re

import pytest
from support.builtins.model_calls import PARSERS, make

from hardpoint.builtin_plugins.parsers.think_tags import ThinkTags
from hardpoint.plugins import (
    ConfigError,
    OutputParserContext,
    ParserRequest,
    ReasoningMarkers,
)
from hardpoint.plugins.output_parser import (
    ContentText,
    ReasoningText,
)

OPEN = ParserRequest(reasoning_open=True)


class Spelling:
    """A tokenizer of one id per character that refuses to add special tokens."""

    special_tokens = {}
    chat_templates = {"default": "<|im_end|>{{ messages }}<tool_call>"}
    eos_token_ids = (99,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [1] if text == "<think>" else [ord(character) for character in text]


def think_tags(**options) -> ThinkTags:
    options = ThinkTags.Options(**options)
    context = OutputParserContext(name="think_tags", options=options, tokenizer=Spelling())
    return ThinkTags(context)


def test_special_tokens_of_the_template_are_between_messages(monkeypatch):
    """A tag in the text of a user opens no reasoning."""
    special = {"<think>": 1, "</think>": 2, "<|im_end|>": 5, "<unused>": 6}
    monkeypatch.setattr(Spelling, "special_tokens", special)
    markers = think_tags().markers()
    assert markers.boundaries == (5, 99)
    assert not markers.is_open([7, 1, 8, 5, 7])
    assert markers.is_open([7, 5, 1, 8])


def split(text, request=None, **options):
    """Return reasoning and content of a whole output."""
    events = think_tags(**options).split(text, request)
    return tuple(
        "".join(event.text for event in events if isinstance(event, type_))
        for type_ in (ReasoningText, ContentText)
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>why</think>because", ("why", "because")),
        ("\n<think>\nwhy\n</think>\n\nbecause", ("\nwhy\n", "\n\n\nbecause")),
        ("<think>why, and", ("why, and", "")),
        ("Well. <think>why", ("", "Well. <think>why")),
        ('<think>a</think>{"b": "<think>c</think>"}', ("a", '{"b": "<think>c</think>"}')),
        ("<think>a</think>\n<think>b</think>c", ("a", "\n<think>b</think>c")),
        ("because", ("", "because")),
        ("", ("", "")),
        ("<think></think>because", ("", "because")),
        ("</think>because", ("", "</think>because")),
        ("<think>", ("", "")),
        ("<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d")),
        ("<think>a<think>b</think>c", ("a<think>b", "c")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("a < b </ think> <thin", ("", "a < b </ think> <thin")),
    ],
)
def test_split(text, parts):
    assert split(text) == parts


def test_an_output_begins_in_the_reasoning_that_the_prompt_left_open():
    assert split("why, and", OPEN) == ("why, and", "")
    assert split("why</think>because", OPEN) == ("why", "because")
    assert split("a</think>b<think>c</think>d", OPEN) == ("a", "b<think>c</think>d")


def test_every_output_may_begin_inside():
    assert not think_tags().markers().is_open([])
    assert think_tags(starts_inside=True).markers().is_open([])


def test_markers_are_token_ids_of_any_number():
    assert think_tags().markers() == ReasoningMarkers(
        start=((1,),),
        end=(tuple(ord(character) for character in "</think>"),),
        boundaries=(99,),
        blanks=(9, 10, 13, 32),
    )


def test_an_operator_may_name_other_tags():
    tags = {"start": "[THINK]", "end": "[/THINK]"}
    assert split("[THINK]why[/THINK]<think>", **tags) == ("why", "<think>")
    assert think_tags(**tags).markers().end == (tuple(map(ord, "[/THINK]")),)


def test_equal_tags_are_refused():
    with pytest.raises(ConfigError, match=r"plugin\.think_tags\.end: .* than start, got '\|'"):
        think_tags(start="|", end="|")


ANSWER = '{"note": "a <think> b </think> [THINK] c <seed:think> d"}'
OF_FAMILIES = [
    ("granite", "<think>So</think><response>{}"),
    ("granite_3_2", "Here is my thought process:SoHere is my response:{}"),
    ("hunyuan_a13b", "<think>So</think>{}"),
    ("ernie45", "<think>So</think><response>{}"),
    ("seed_oss", "<seed:think>So</seed:think>{}"),
    ("mistral", "[THINK]So[/THINK]{}"),
    ("cohere", "<|START_THINKING|>So<|END_THINKING|>{}"),
]


@pytest.mark.parametrize(("parser", "text"), OF_FAMILIES)
def test_start_tags_inside_an_answer_are_text_in_every_format(parser, text):
    subject, tokenizer = make(PARSERS[parser][0], PARSERS[parser][0].required_tokens)
    special = tokenizer.special_tokens
    tokens = "|".join(f"({re.escape(token)})" for token in special) or "$^"
    for start in (text.format(ANSWER), f"\n{ANSWER}", f"\n{ANSWER}{text.format('')}"):
        state, events = subject.open(ParserRequest()), []
        for piece in filter(None, re.split(tokens, start)):
            token = special.get(piece)
            events += state.feed(piece) if token is None else state.feed_token(token, piece)
        events += state.finish()
        content = "".join(event.text for event in events if isinstance(event, ContentText))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
        assert ANSWER in content
        assert reasoning == ("So" if start.startswith(text[:4]) else "")
    assert subject.markers().blanks is not None
