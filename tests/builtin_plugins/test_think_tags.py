"""think_tags."""

from __future__ import annotations

import pytest

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
