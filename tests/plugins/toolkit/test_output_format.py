"""Tables of output formats that are wrong are refused when the parser is created."""

from __future__ import annotations

import pytest

from hardpoint.plugins import OutputParserContext, ParserRequest
from hardpoint.toolkit.parsing.format_parser import (
    Body,
    Content,
    FormatParser,
    Ignored,
    ParserState,
    Reasoning,
)
from hardpoint.toolkit.parsing.json_text import json_value


class Tokens:
    special_tokens = {}

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())


def parser(states, reasoning=None):
    attributes = {"states": lambda self: states, "reasoning": reasoning, "contract": 1}
    cls = type("Table", (FormatParser,), attributes | {"roles": ("reasoning",)})
    return cls(OutputParserContext(name="t", options=cls.Options(), tokenizer=Tokens()))


class Feedless(Body):
    pass


@pytest.mark.parametrize(
    ("states", "reasoning", "message"),
    [
        ({}, None, r"states\(\) returned none"),
        ({"a": (Content, {})}, None, "the state 'a': expected a State, got"),
        (
            {"a": ParserState(Content, {"x": "b"})},
            None,
            "the state 'a': 'x' leads to 'b', which does not exist",
        ),
        ({"a": ParserState(Ignored, {}, then="b")}, None, "the state 'a': 'then' leads to 'b'"),
        (
            {"a": ParserState(Content, {"": "a"})},
            None,
            "the state 'a': expected markers, got an empty",
        ),
        (
            {"a": ParserState(Reasoning, {})},
            None,
            "the state 'a' is reasoning: add reasoning = 'a'",
        ),
        ({"a": ParserState(Content, {})}, "b", "reasoning: expected the name of a state, got 'b'"),
        ({"a": ParserState(Feedless, {})}, None, "the state 'a': its body Feedless has no feed"),
        (
            {"a": ParserState(Content, {"<a": "a", "<ab": "a"})},
            None,
            "the markers '<a' and '<ab': expected none that begins another one",
        ),
    ],
)
def test_a_wrong_table(states, reasoning, message):
    with pytest.raises(ValueError, match=message):
        parser(states, reasoning)


class Stuck(Body):
    def feed(self, text, events):
        return 0


class Greedy(Body):
    def feed(self, text, events):
        return len(text) + 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Stuck, "the state 'a' takes no text, and leads to itself"),
        (Greedy, "the body of the state 'a' took 5 characters of 4"),
    ],
)
def test_a_body_that_takes_what_it_must_not(body, message):
    state = parser({"a": ParserState(body, {})}).open(ParserRequest())
    with pytest.raises(ValueError, match=message):
        state.feed("text")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", None, "5"),
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": ["string", "integer"]}, "5"),
        ("5.5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"5.5"'),
        ("True", {"type": "boolean"}, "true"),
        ("None", {}, "null"),
        ('a "b"', None, '"a \\"b\\""'),
        ('{"a": [1]}', {"type": "object"}, '{"a": [1]}'),
        ("\ud800", None, '"?"'),
    ],
)
def test_the_json_of_a_value(text, schema, value):
    assert json_value(text, schema) == value


SIZE, POINT = {"$ref": "#/$defs/Size"}, {"$ref": "#/$defs/Point"}
ROOT = {
    "$defs": {
        "Size": {"type": "string", "enum": ["5", "10"]},
        "Point": {"type": "object"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, SIZE], "title": "refers to itself"},
        "Long": {"$ref": "#/$defs/Long", "minLength": 1},
    }
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("10", {"anyOf": [SIZE, {"type": "null"}]}, '"10"'),
        ("null", {"anyOf": [SIZE, {"type": "null"}]}, "null"),
        ("10", {**SIZE, "maxLength": 2}, '"10"'),
        ("10", {"$ref": "#/$defs/Tree"}, '"10"'),
        ("10", {"$ref": "#/$defs/Long"}, "10"),
        ("10", {"anyOf": [{"$ref": "#/$defs/None"}, {"type": "null"}]}, "10"),
        ("{'x': True}", {"anyOf": [POINT, {"type": "null"}]}, '{"x": true}'),
        ("10", {"enum": ["5", "10"]}, '"10"'),
        ("10", {"const": "10"}, '"10"'),
        ("10", {"enum": [5, 10]}, "10"),
        ("10", {"enum": ["auto", 10]}, "10"),
        ("1.5", {"enum": ["auto", 10]}, '"1.5"'),
        ("10", {"allOf": [{"type": "string"}, {"minLength": 1}]}, '"10"'),
        ("10", {"allOf": [{"type": ["string", "number"]}, {"type": "integer"}]}, "10"),
        ("x", {"allOf": [{"type": ["string", "null"]}, SIZE]}, '"x"'),
        ("null", {"allOf": [{"type": ["string", "null"]}, SIZE]}, '"null"'),
        ("TRUE", {"type": "boolean"}, "true"),
        ("NONE", {"type": ["boolean", "null"]}, "null"),
        ("TRUE", {"type": ["string", "boolean"]}, '"TRUE"'),
        ("TRUE", None, '"TRUE"'),
    ],
)
def test_the_types_of_a_value_are_those_of_all_parts_of_its_schema(text, schema, value):
    assert json_value(text, schema, ROOT) == value
