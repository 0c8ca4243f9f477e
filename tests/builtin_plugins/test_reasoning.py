"""think_tags."""

from __future__ import annotations

import pytest

from hardpoint.builtin_plugins.reasoning import ThinkTags
from hardpoint.plugins import ConfigError, ReasoningContext


class Spelling:
    """A tokenizer of one id per character that refuses to add special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [1] if text == "<think>" else [ord(character) for character in text]


def think_tags(**options) -> ThinkTags:
    options = ThinkTags.Options(**options)
    return ThinkTags(ReasoningContext(name="think_tags", options=options, tokenizer=Spelling()))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>why</think>because", ("why", "because")),
        ("\n<think>\nwhy\n</think>\n\nbecause", ("\nwhy\n", "\n\n\nbecause")),
        ("why</think>because", ("why", "because")),
        ("<think>why, and", ("why, and", "")),
        ("Well. <think>why", ("why", "Well. ")),
        ("because", (None, "because")),
        ("", (None, "")),
        ("<think></think>because", (None, "because")),
        ("<think>\n\n</think>\n\nbecause", (None, "\n\nbecause")),
        ("</think>because", (None, "because")),
        ("<think>", (None, "")),
        ("<think>a</think>b<think>c</think>d", ("ac", "bd")),
        ("a</think>b<think>c</think>d", ("ac", "bd")),
        ("<think>a</think>b<think>c", ("ac", "b")),
        ("<think>a<think>b</think>c", ("a<think>b", "c")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("a < b </ think> <thin", (None, "a < b </ think> <thin")),
    ],
)
def test_split(text, parts):
    assert think_tags().split(text) == parts


def test_split_loses_nothing_but_the_tags():
    text = " x <think> why </think> y <think> how </think> z"
    reasoning, content = think_tags().split(text)
    assert len(reasoning) + len(content) == len(text) - 2 * len("<think></think>")


def test_an_output_without_tags_is_thinking_where_the_template_began_it():
    parser = think_tags(starts_inside=True)
    assert parser.split("why, and") == ("why, and", "")
    assert parser.split("why</think>because") == ("why", "because")
    assert parser.split("<think>why</think>because") == ("why", "because")
    assert parser.split("because <think>why") == ("why", "because ")


def test_markers_are_token_ids_of_any_number():
    markers = think_tags().markers()
    assert list(markers.start) == [1]
    assert list(markers.end) == [ord(character) for character in "</think>"]


def test_an_operator_may_name_other_tags():
    parser = think_tags(start="[THINK]", end="[/THINK]")
    assert parser.split("[THINK]why[/THINK]<think>") == ("why", "<think>")
    assert list(parser.markers().end) == [ord(character) for character in "[/THINK]"]


def test_equal_tags_are_refused():
    with pytest.raises(ConfigError, match=r"plugin\.think_tags\.end: .* than start, got '\|'"):
        think_tags(start="|", end="|")
