"""Structured output: constraints on the text of a completion."""

from __future__ import annotations

import json
from bisect import bisect, bisect_left
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.errors import RequestError, reason_of, shown
from hardpoint.typed import Strict, convert, schema_check

__all__ = [
    "AnyTextFormat",
    "ConstStringFormat",
    "Format",
    "GrammarFormat",
    "JsonSchemaFormat",
    "OptionalFormat",
    "OrFormat",
    "PlusFormat",
    "RegexFormat",
    "SequenceFormat",
    "StarFormat",
    "StructuralTag",
    "StructuredOutputs",
    "TagFormat",
    "TagsWithSeparatorFormat",
    "TokenFormat",
    "TriggeredTagsFormat",
    "walk_formats",
]


StructuredFormat = Literal["json", "json_object", "regex", "grammar", "choice", "structural_tag"]
"""Formats of structured output: the fields of `StructuredOutputs`; exactly one is set."""

FORMATS: tuple[StructuredFormat, ...] = (
    "json",
    "json_object",
    "regex",
    "grammar",
    "choice",
    "structural_tag",
)

MAX_PARTS = 10_000
"""Of a structural tag."""

NonEmpty = Annotated[str, Meta(min_length=1)]


class ConstStringFormat(Strict, tag_field="type", tag="const_string"):
    """A text. Special tokens in it are matched by id."""

    value: str


class TokenFormat(Strict, tag_field="type", tag="token"):
    """A special token, by its text or id."""

    token: str | int


class JsonSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: dict[str, Any] | bool


class RegexFormat(Strict, tag_field="type", tag="regex"):
    """Text that a regular expression matches, whole, up to the first end if a text follows."""

    pattern: NonEmpty


class GrammarFormat(Strict, tag_field="type", tag="grammar"):
    """Text of a grammar, as for `StructuredOutputs.grammar`."""

    grammar: NonEmpty


class AnyTextFormat(Strict, tag_field="type", tag="any_text"):
    """Any text, up to the begin of the next element; it has no special tokens."""


class SequenceFormat(Strict, tag_field="type", tag="sequence"):
    """One after the other."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class OrFormat(Strict, tag_field="type", tag="or"):
    """One of several."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class OptionalFormat(Strict, tag_field="type", tag="optional"):
    """Once, or not at all."""

    content: Format


class StarFormat(Strict, tag_field="type", tag="star"):
    """Any number of times."""

    content: Format


class PlusFormat(Strict, tag_field="type", tag="plus"):
    """Once or more."""

    content: Format


class TagFormat(Strict, tag_field="type", tag="tag"):
    """Content between two texts; either may be empty or a special token."""

    begin: str | TokenFormat
    content: Format
    end: str | TokenFormat = ""


class TriggeredTagsFormat(Strict, tag_field="type", tag="triggered_tags"):
    """Any text, in which each trigger begins a tag.

    Attributes:
        triggers: texts; each tag's `begin` begins with one of them.
        at_least_one: whether the text begins with a tag.
        stop_after_first: whether nothing follows the first tag.
    """

    triggers: Annotated[list[NonEmpty], Meta(min_length=1, max_length=1000)]
    tags: Annotated[list[TagFormat], Meta(min_length=1, max_length=1000)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparatorFormat(Strict, tag_field="type", tag="tags_with_separator"):
    """Tags, with a text between them."""

    tags: Annotated[list[TagFormat], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstStringFormat
    | TokenFormat
    | JsonSchemaFormat
    | RegexFormat
    | GrammarFormat
    | AnyTextFormat
    | SequenceFormat
    | OrFormat
    | OptionalFormat
    | StarFormat
    | PlusFormat
    | TagFormat
    | TriggeredTagsFormat
    | TagsWithSeparatorFormat
)
"""A part of a structural tag; its `type` selects which."""


class StructuralTag(Strict, tag_field="type", tag="structural_tag"):
    """A text made of parts, in the JSON form that vLLM and xgrammar have for it.

    It has at most 10 000 of them.
    """

    format: Format


class StructuredOutputs(Strict, omit_defaults=True):
    """The form of the answer. One of the first six fields is given.

    The answer follows the reasoning. It ends where it is complete, with a token that ends
    the request.

    Attributes:
        json: a JSON schema: a mapping, its JSON text, or a msgspec or pydantic type.
        json_object: any JSON object.
        regex: a regular expression that matches the whole answer.
        grammar: a context-free grammar in the syntax of Lark or GBNF.
        choice: alternative texts of the answer.
        structural_tag: a text made of parts, such as tool calls among free text.
        backend: name of the grammar backend; None is `grammar.use`.
        lenient: take a JSON schema with keywords that the backend cannot enforce. They are left
            out of the grammar. With `json`, the finished answer is validated against the whole
            schema, and `CompletionOutput.validation_error` describes the mistake.
    """

    json: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: NonEmpty | None = None
    grammar: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Meta(min_length=1)] | None = None
    structural_tag: StructuralTag | None = None
    backend: NonEmpty | None = None
    lenient: bool = False

    @property
    def format(self) -> StructuredFormat:
        """Which of the fields is given."""
        return next(name for name in FORMATS if getattr(self, name) not in (None, False))

    @classmethod
    def checked(cls, given: Any, path: str = "structured") -> StructuredOutputs:
        """Return the structured outputs that a request gives, checked.

        Args:
            given: a StructuredOutputs, or a mapping with its fields; `json` may be a text or a
                type.
            path: path of it, for errors.

        Raises:
            RequestError: naming the field.
        """
        if isinstance(given, StructuredOutputs):
            given = {name: getattr(given, name) for name in given.__struct_fields__}
        if not isinstance(given, Mapping):
            raise RequestError(
                f"{path}: expected a mapping with one of {', '.join(FORMATS)}, got {shown(given)}"
            )
        try:
            fields = dict(given)
        except Exception as cause:  # of the caller's own mapping
            raise RequestError(f"{path}: reading it failed: {reason_of(cause)}") from cause
        if fields.get("json") is not None:
            fields["json"] = _schema(fields["json"], f"{path}.json")
            if fields["json"] is False:  # which `format` would take for a field that is not given
                raise RequestError(f"{path}.json: no JSON fits the schema false")
            schema_check.check_schema(fields["json"], f"{path}.json")
        tag = fields.get("structural_tag")
        if tag is not None:
            fields["structural_tag"] = _structural_tag(tag, f"{path}.structural_tag")
        schema_check.check_depth(tag, f"{path}.structural_tag")
        checked = convert(fields, cls, path=path, error=RequestError)
        formats = [name for name in FORMATS if getattr(checked, name) not in (None, False)]
        if len(formats) != 1:
            got = " and ".join(formats) or "none of them"
            raise RequestError(f"{path}: expected one of {', '.join(FORMATS)}, got {got}")
        if checked.lenient and formats[0] not in ("json", "structural_tag"):
            raise RequestError(f"{path}.lenient: it is for JSON schemas, got {formats[0]}")
        if checked.structural_tag is not None:
            _check_tags(checked.structural_tag.format, f"{path}.structural_tag")
        return checked


def walk_formats(format: Format) -> Iterator[Format]:
    """Yield a part of a structural tag, and all parts in it."""
    pending: list[Format] = [format]
    while pending:
        part = pending.pop()
        yield part
        match part:
            case SequenceFormat() | OrFormat():
                pending += part.elements
            case OptionalFormat() | StarFormat() | PlusFormat() | TagFormat():
                pending.append(part.content)
            case TriggeredTagsFormat() | TagsWithSeparatorFormat():
                pending += part.tags


def _schema(value: Any, path: str) -> Any:
    """Return a schema as plain data."""
    if isinstance(value, str | bytes):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as cause:
            raise RequestError(f"{path}: expected JSON, got {shown(value)}: {cause}") from None
    if isinstance(value, Mapping | bool):
        return value
    try:
        if isinstance(make := getattr(value, "model_json_schema", None), type(None)):
            return msgspec.json.schema(value)
        return make()
    except Exception as cause:
        raise RequestError(
            f"{path}: expected a JSON schema (a mapping or its text), or a msgspec or pydantic "
            f"type, got {shown(value)}: {reason_of(cause)}"
        ) from None


def _structural_tag(value: Any, path: str) -> Any:
    """Return a structural tag as plain data in its newer form."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as cause:
            raise RequestError(f"{path}: expected JSON, got {shown(value)}: {cause}") from None
    if not isinstance(value, Mapping) or "structures" not in value:
        return value
    try:  # the form before: tags with a schema each
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in value["structures"]
        ]
        triggers = value["triggers"]
    except (KeyError, TypeError) as cause:
        raise RequestError(
            f"{path}: expected structures with begin, schema and end, and triggers; lacks {cause}"
        ) from None
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def _check_tags(format: Format, path: str) -> None:
    """Check the number of parts, that each trigger begins tags, and each tag with a trigger."""
    for number, part in enumerate(walk_formats(format)):
        if number == MAX_PARTS:
            raise RequestError(f"{path}: expected at most {MAX_PARTS} parts, got more")
        if isinstance(part, TriggeredTagsFormat):
            _check_triggers(part, path)


def _check_triggers(part: TriggeredTagsFormat, path: str) -> None:
    # The text of an id is the backend's to compare.
    begins = sorted(
        begin
        for tag in part.tags
        if isinstance(begin := getattr(tag.begin, "token", tag.begin), str)
    )
    # Without triggers that begin with another one: of the rest, only the last one up to a text can
    # begin it.
    triggers: list[str] = []
    for trigger in sorted(part.triggers):
        if not triggers or not trigger.startswith(triggers[-1]):
            triggers.append(trigger)
    for begin in begins:
        at = bisect(triggers, begin)
        if not at or not begin.startswith(triggers[at - 1]):
            raise RequestError(
                f"{path}: expected the begin of each tag to start with one of the triggers "
                f"{shown(part.triggers)}, got {shown(begin)}"
            )
    for trigger in part.triggers if len(begins) == len(part.tags) else ():
        at = bisect_left(begins, trigger)
        if at == len(begins) or not begins[at].startswith(trigger):
            raise RequestError(f"{path}: expected triggers that begin a tag, got {shown(trigger)}")
