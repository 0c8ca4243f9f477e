"""Descriptions of structured output for the suite of grammar backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins.structured import StructuredFormat, StructuredOutputs

__all__ = ["HOSTILE", "KEYWORDS", "REFUSED", "STANDARD", "GrammarSample", "described"]


@dataclass(frozen=True)
class GrammarSample:
    """A description of structured output, and texts that it allows or not.

    Special tokens in the texts of a structural tag are tokens; those of other formats are text.

    Attributes:
        structured: the description; a mapping with its fields, too.
        language: all texts that it allows; empty if they are too many.
        valid: some that it allows.
        invalid: some that it does not allow.
        special_tokens: whether special tokens in the texts are tokens; None is only those of a
            structural tag.
    """

    structured: StructuredOutputs | Mapping[str, Any]
    language: Sequence[str] = ()
    valid: Sequence[str] = ()
    invalid: Sequence[str] = ()
    special_tokens: bool | None = None

    @property
    def checked(self) -> StructuredOutputs:
        """The description as a backend gets it."""
        return StructuredOutputs.checked(self.structured)

    @property
    def has_special(self) -> bool:
        """Whether special tokens in the texts are tokens."""
        stated = self.special_tokens
        return self.checked.format == "structural_tag" if stated is None else stated

    @property
    def texts(self) -> list[str]:
        """All the texts that are known to be allowed."""
        return [*self.language, *self.valid]


def described(structured: StructuredOutputs) -> str:
    """Return a description in few characters, for messages."""
    text = repr(getattr(structured, structured.format))
    return f"{structured.format} {text if len(text) < 200 else text[:150] + ' ...'}"


_TAG = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[01]"}}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

STANDARD: Mapping[StructuredFormat, Sequence[GrammarSample]] = {
    "json": (
        GrammarSample(
            {"json": {"enum": ["red", "reddish", True, None, 12]}},
            language=('"red"', '"reddish"', "true", "null", "12"),
        ),
        GrammarSample(
            {"json": _PERSON},
            valid=('{"name": "Ann é", "age": 3}', '{"name": "\\"", "age": -10}'),
            invalid=(
                *("", "[]", "{}", '{"name": "Ann"}', '{"name": "Ann", "age": 3'),
                *('{"name": 1, "age": 3}', '{"name": "Ann", "age": 3.5}'),
                '{"name": "Ann", "age": 3, "x": 1}',
            ),
        ),
    ),
    "json_object": (
        GrammarSample(
            {"json_object": True},
            valid=("{}", '{"a": [1, {"b": null}], "é": "🙂"}'),
            invalid=("", "[]", "1", "null", '"a"', "{", '{"a"}', '{"a": 1,}', "x", "{} x"),
        ),
    ),
    "regex": (
        GrammarSample(
            {"regex": "(ab|a)c?|é[01]{2}"},
            language=("a", "ab", "abc", "ac", "é00", "é01", "é10", "é11"),
        ),
        GrammarSample(
            {"regex": r"[a-z]+@[a-z]+\.(com|org)"},
            valid=("ann@home.org", "a@b.com"),
            invalid=("", "ann", "ann@home", "ann@home.de", "@b.com", "a@b.com "),
        ),
    ),
    "grammar": (
        GrammarSample(
            {"grammar": 'start: "yes" | "no" MORE\nMORE: "!" | "?"\n'},
            language=("yes", "no!", "no?"),
        ),
        GrammarSample(
            {"grammar": 'start: "(" start ")" | "x"\n'},
            valid=("x", "(x)", "((((x))))"),
            invalid=("", "(x", "x)", "()", "xx"),
        ),
        GrammarSample({"grammar": 'root ::= "yes" | "no" [!?]\n'}, language=("yes", "no!", "no?")),
    ),
    "choice": (
        GrammarSample(
            {"choice": ["yes", "yes, sure", "no", "né", "🙂"]},
            language=("yes", "yes, sure", "no", "né", "🙂"),
        ),
        GrammarSample({"choice": ["a<eos>b", "a"]}, language=("a<eos>b", "a")),
    ),
    "structural_tag": (
        GrammarSample(
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": "go "},
                            {
                                "type": "or",
                                "elements": [
                                    {**_TAG, "end": "</f>"},
                                    {"type": "token", "token": "<|call|>"},
                                ],
                            },
                        ],
                    },
                }
            },
            language=("go <f>0</f>", "go <f>1</f>", "go <|call|>"),
        ),
        GrammarSample(
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<f>"],
                        "tags": [{**_TAG, "end": "</f>"}],
                    },
                }
            },
            valid=("", "any text", "so <f>0</f> and <f>1</f>.", "a < b"),
            invalid=("<f>", "<f>2</f>", "<f>0</f", "<f></f>"),
        ),
    ),
}
"""By format; an author's sample of a format replaces those here."""


def _in_tag(format: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


_BAD_SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {"type": "strnig"},
    {"type": 3},
    {"type": "object", "properties": []},
    {"type": "string", "pattern": "("},
    {"$ref": "#/$defs/nowhere"},
    {"enum": "red"},
    {"anyOf": []},
    {"type": "string", "minLength": "2"},
)

REFUSED: Mapping[StructuredFormat, Sequence[Mapping[str, Any]]] = {
    "json": tuple({"json": schema} for schema in _BAD_SCHEMAS),
    "regex": tuple({"regex": pattern} for pattern in ("(", "[a", "a{2,1}", "*a", "a)")),
    "grammar": tuple(
        {"grammar": text}
        for text in (
            "no grammar at all",
            'start: "a',
            "start: missing",
            "start: (",
            'other: "a"\n',
            "root ::= missing",
            'root ::= "a',
        )
    ),
    "structural_tag": tuple(
        {"structural_tag": _in_tag(part)}
        for part in (
            {"type": "regex", "pattern": "("},
            {"type": "json_schema", "json_schema": {"type": "strnig"}},
            {"type": "grammar", "grammar": "start: missing"},
            {"type": "token", "token": "<no such token>"},
            {"type": "token", "token": 1 << 30},
        )
    ),
}
"""Descriptions that mean nothing, by format."""


def _nested(depth: int, inner: Any, wrap: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def _hostile_schemas() -> Iterator[dict[str, Any]]:
    yield {"$ref": "#"}
    yield {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    yield {"allOf": [{"$ref": "#"}]}
    yield {"type": "string", "minLength": 5, "maxLength": 2}
    yield {"allOf": [{"type": "string"}, {"type": "integer"}]}
    yield {"type": "integer", "minimum": 3, "maximum": 2}
    yield {"type": "object", "required": ["a"], "properties": {"a": False}}
    yield {"enum": [f"value {number}" for number in range(20_000)]}
    yield {"type": "string", "maxLength": 1 << 40}
    yield {"type": "array", "minItems": 1 << 30, "items": {"type": "integer"}}
    yield {"type": "string", "pattern": "^(.{5000}x|.{4999}y)$"}
    yield {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
    yield _nested(150, {"type": "string"}, lambda s: {"type": "array", "items": s})
    yield _nested(60, {"type": "string"}, lambda s: {"anyOf": [{"type": "null"}, {"items": s}]})


def _hostile() -> Iterator[tuple[StructuredFormat, dict[str, Any]]]:
    for schema in _hostile_schemas():
        yield "json", {"json": schema}
    patterns = (
        *("^(.{5000}x|.{4999}y)$", "(a|aa){1,1000}", "(((a{100}){100}){100}){100}", "(a*)*b"),
        *("(" * 150 + "a" + ")" * 150, "a{1000000000}", "(?=a)b", r"(a)\1", "[^\\s\\S]"),
    )
    for pattern in patterns:
        yield "regex", {"regex": pattern}
    grammars = (
        "start: start",
        'start: start "a"',
        "start: " + "(" * 150 + '"a"' + ")" * 150,
        'start: a a\na: start | ""',
        "start: " + " | ".join(f'"value {number}"' for number in range(5000)),
        "root ::= root",
    )
    for grammar in grammars:
        yield "grammar", {"grammar": grammar}
    yield "choice", {"choice": [f"value {number}" for number in range(20_000)]}
    yield "choice", {"choice": ["a" * 100_000]}
    tags = (
        _nested(60, {"type": "any_text"}, lambda f: {"type": "optional", "content": f}),
        _nested(
            60, {"type": "const_string", "value": "a"}, lambda f: {"type": "star", "content": f}
        ),
        {"type": "regex", "pattern": "^(.{5000}x|.{4999}y)$"},
        {"type": "json_schema", "json_schema": {"$ref": "#"}},
    )
    for tag in tags:
        yield "structural_tag", {"structural_tag": _in_tag(tag)}


HOSTILE: Sequence[tuple[StructuredFormat, Mapping[str, Any]]] = tuple(_hostile())
"""Descriptions that are large, deep, contradictory or endless."""

_INTEGERS = {"type": "array", "items": {"type": "integer"}}

KEYWORDS: Sequence[tuple[Mapping[str, Any], str, str]] = (
    ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    ({"type": "integer", "minimum": 3}, "3", "2"),
    ({"type": "integer", "maximum": 3}, "3", "4"),
    ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    ({"type": "integer", "exclusiveMaximum": 3}, "2", "3"),
    ({"type": "integer", "multipleOf": 3}, "9", "10"),
    ({"type": ["integer", "null"]}, "null", '"a"'),
    ({"const": "a"}, '"a"', '"b"'),
    ({"type": "integer", "not": {"const": 3}}, "4", "3"),
    ({**_INTEGERS, "minItems": 2}, "[1, 2]", "[1]"),
    ({**_INTEGERS, "maxItems": 2}, "[1, 2]", "[1, 2, 3]"),
    ({**_INTEGERS, "uniqueItems": True}, "[1, 2]", "[1, 1]"),
    ({**_INTEGERS, "contains": {"const": 5}}, "[5]", "[1]"),
    ({"type": "array", "prefixItems": [{"const": 1}]}, "[1]", "[2]"),
    ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
    ({"type": "object", "minProperties": 1}, '{"a": 1}', "{}"),
    ({"type": "object", "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"type": "object", "additionalProperties": False}, "{}", '{"a": 1}'),
    ({"type": "object", "patternProperties": {"^a": {"const": 1}}}, '{"a": 1}', '{"a": 2}'),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"a": 1}', '{"ab": 1}'),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "{}", '{"a": 1}'),
    ({"type": "object", "unevaluatedProperties": False}, "{}", '{"a": 1}'),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 3}]}, "3", "4"),
    ({"anyOf": [{"const": 1}, {"const": "a"}]}, '"a"', "2"),
    (
        {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 3}]},
        "1",
        "2",
    ),
    (
        {"type": "integer", "if": {"minimum": 5}, "then": {"const": 7}, "else": {"const": 1}},
        "7",
        "6",
    ),
)
"""A schema, a JSON text that fits it, and one that does not."""
