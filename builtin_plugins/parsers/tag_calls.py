"""The reader of calls with a tag for each parameter; `xml_calls` has the formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from hardpoint.plugins.output_parser import ContentText, OutputEvent, ToolCallArguments
from hardpoint.plugins.structured import (
    Format,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
)
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    BeforeAnswer,
    Between,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    ParserState,
    Reasoning,
    ToolName,
    Whole,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.json_text import JsonText, json_value, named_types, quoted, resolved

from .values import (
    Parameter,
    check_keywords,
    length_pattern,
    parameters_of,
    text_without,
    unsupported,
)


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a model writes a call: a row of the table of formats.

    `NAME` stands between `name` and `>`, `KEY` between `key` and `>`, between `quote`s.

    Attributes:
        name: the text before a tool's name.
        end: the tag that ends a call.
        key: the text before a parameter's name; empty where name and value have tags of their own.
        value_end: the tag that ends a value.
        quote: text around names.
        marks: text behind the name in the tag of a text, and of other values.
        around: the text before and behind a value.
        before_calls: text before the calls of a section.
        before: text before each call.
        after: text after each call.
    """

    name: str = "<function="
    end: str = "</function>"
    key: str = "<parameter="
    value_end: str = "</parameter>"
    quote: str = ""
    marks: tuple[str, str] = ("", "")
    around: str = ""
    before_calls: str = "\n"
    before: str = ""
    after: str = "\n"

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The ends of a value: its tag; if the model forgets that, the next one in its own line."""
        if not self.key:
            return (self.value_end,)
        return self.value_end, f"\n{self.end}", f"\n{self.key}"


class TagCalls(FormatParser):
    """Calls with a tag for each parameter. A format is a subclass that fills in the attributes.

    A value is text where the tool's schema asks for it, else JSON if it is.

    Attributes:
        sections: the markers around a call, or around several: their ends by their beginnings. A
            grammar has the first ones.
        thinking: the markers around reasoning; none in a parser of tools only.
        tags: the row.
        one_each: whether each call has a section of its own.
    """

    sections: ClassVar[Mapping[str, str]]
    thinking: ClassVar[tuple[str, str] | None] = None
    tags: ClassVar[Tags]
    one_each: ClassVar[bool] = False

    def states(self) -> Mapping[str, ParserState]:
        """Return content, thinking, and the parts of a call."""
        content, states = dict.fromkeys(self.sections, "call"), dict[str, ParserState]()
        if self.thinking:
            start, end = self.thinking
            states["start"] = ParserState(BeforeAnswer, {start: "thinking", **content})
            states["thinking"] = ParserState(Reasoning, {end: "content"})
        return {**states, "content": ParserState(Content, content), **self.call_states(content)}

    def call_states(self, content: Mapping[str, str]) -> dict[str, ParserState]:
        """Return the states of a call, and of the content behind it, for the given moves."""
        tags, ends = self.tags, self.sections.values()
        over, cut = dict.fromkeys(ends, "behind"), dict.fromkeys(ends, "after")
        value = dict(zip(tags.value_ends, ("parameters", "end", "key"), strict=True))
        parameters = {tags.key: "key", tags.end: "end", **cut}
        after_call = {**content, tags.value_end: "stray"}
        return {
            "call": ParserState(Between, {tags.name: "name", **over}),
            "name": ParserState(_TagName, {">": "opened"}),
            "opened": ParserState(_OpenedCall, parameters),
            "parameters": ParserState(Parameters, parameters),
            "key": ParserState(Key, {">": "value"}),
            "value": ParserState(partial(Value, around=tags.around), value),
            "end": ParserState(_CallEnd, {**content, tags.name: "name", **over}),
            "after": ParserState(After, after_call),
            "behind": ParserState(AfterCall, after_call),
            "stray": ParserState(partial(StrayEnd, tag=tags.value_end), after_call),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Parameters are in the order of the schema.
        """
        call = choice_of_calls(tools, self.call)
        if not self.one_each:
            call = repeated(call, parallel=parallel)
        begin, end = next(iter(self.sections.items()))
        return self.tagged(
            begin,
            self.sequence(self.tags.before_calls, call),
            end,
            required=required,
            parallel=parallel and self.one_each,
            separator="\n",
        )

    def call(self, tool: str, schema: Mapping[str, Any], *, is_alone: bool = False) -> Format:
        """Return the grammar of a call.

        Args:
            tool: its name.
            schema: schema of its arguments.
            is_alone: whether the call's first tag, with the name left out, stands for itself.
        """
        tags = self.tags
        head = f"{tags.quote}{tool}{tags.quote}>\n"
        elements: list[str | Format] = [head if is_alone else f"{tags.before}{tags.name}{head}"]
        for parameter in parameters_of(tool, schema):
            self.check_key(tool, parameter.name)
            elements.append(self._parameter(tool, parameter, schema))
        return self.sequence(*elements, f"{tags.end}{tags.after}")

    def check_key(self, tool: str, name: str) -> None:
        """Check that a tag can have a parameter's name.

        Raises:
            ValueError: it cannot.
        """
        quote = self.tags.quote
        if set(name) & {*"<>\n", *quote} or name != name.strip() or not name:
            marks = "angle brackets, quotes and" if quote else "angle brackets and"
            raise ValueError(
                f"the tool {tool!r}: expected parameter names without {marks} line ends, "
                f"got {name!r}"
            )

    def _parameter(self, tool: str, parameter: Parameter, schema: Mapping[str, Any]) -> Format:
        tags, choices_by_mark = self.tags, list[Format]()
        values = self.values(tool, parameter, schema)
        for mark in dict.fromkeys(tags.marks):
            choices = [value for is_text, value in values if tags.marks[not is_text] == mark]
            if choices:
                head = f"{tags.key}{tags.quote}{parameter.name}{tags.quote}{mark}>"
                choices_by_mark.append(self.sequence(head, either(choices), "\n"))
        return (
            either(choices_by_mark)
            if parameter.is_required
            else OptionalFormat(content=either(choices_by_mark))
        )

    def values(
        self, tool: str, parameter: Parameter, root: Mapping[str, Any]
    ) -> list[tuple[bool, Format]]:
        """Return grammars of a parameter's value and the tag that ends it, and which is of text."""
        tags = self.tags
        whole = resolved(parameter.schema, root)
        types = named_types(whole, root)
        formats: list[tuple[bool, Format]] = []
        for schema in _alternatives(tool, whole, root):
            if "enum" in schema or "const" in schema:
                formats += self._constants(tool, schema, whole, root)
            elif not types or schema.get("type") == "string":
                check_keywords(
                    tool, schema, {"type", "minLength", "maxLength", "format"} if types else ()
                )
                length = length_pattern(schema)
                ends = tags.around.replace("\n", r"\n")
                formats.append((True, self._text(f"{ends}{length}{ends}")))
            else:
                if "string" in types:  # a text may be one of these values
                    allowed = set() if schema.get("type") in {"array", "object"} else {"type"}
                    check_keywords(tool, schema, allowed)
                with_root = {key: root[key] for key in ("$defs", "definitions") if key in root}
                value = JsonSchemaFormat(json_schema={**with_root, **schema})
                formats.append(
                    (False, self.sequence(tags.around, value, tags.around + tags.value_end))
                )
        return formats

    def _text(self, pattern: str) -> Format:
        end, *others = self.tags.value_ends
        if end in self.context.tokenizer.special_tokens:  # which is in no text
            return self.sequence(text_without(pattern, others), end)
        return text_without(pattern, (end, *others), end)

    def _constants(
        self, tool: str, schema: Mapping[str, Any], whole: object, root: Mapping[str, Any]
    ) -> Iterator[tuple[bool, Format]]:
        check_keywords(tool, schema, ("enum", "const", "type"))
        for value in schema["enum"] if "enum" in schema else [schema["const"]]:
            texts = [value] if isinstance(value, str) else []
            for text in (*texts, json.dumps(value, ensure_ascii=False)):
                is_text = text is value
                around = self.tags.around
                written = f"{around}{text}{around}"
                is_whole = not any(end in written for end in self.tags.value_ends)
                marked = is_text if any(self.tags.marks) else None
                if is_whole and json.loads(value_of(text, whole, root, marked)) == value:
                    yield is_text, self.sequence(written, self.tags.value_end)
                    break
            else:
                raise ValueError(f"the tool {tool!r}: its calls cannot have the value {value!r}")


def either(formats: Sequence[Format]) -> Format:
    """Return the grammar of any of some formats."""
    return formats[0] if len(formats) == 1 else OrFormat(elements=list(formats))


def _alternatives(tool: str, schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield schemas of one type each; of any type, where the schema names no type."""
    schema = resolved({} if schema is True else schema, root)
    if not isinstance(schema, Mapping):
        raise unsupported(tool, "false")
    types = schema.get("type")
    if "anyOf" in schema:
        check_keywords(tool, schema, ["anyOf"])
        for choice in schema["anyOf"]:
            yield from _alternatives(tool, choice, root)
    elif isinstance(types, list) and not {"enum", "const"} & schema.keys():
        for kind in types:
            yield {**schema, "type": kind}
    else:
        yield schema


def value_of(text: str, schema: object, root: Mapping[str, Any], is_text: bool | None) -> str:
    """Return the JSON of a value: of a text as it is, of another one by its schema."""
    return quoted(text) if is_text else json_value(text, schema, root)


def head_of(text: str) -> tuple[str, bool | None]:
    """Return the name in the head of a tag, and whether it states that the value is text.

    The name is in quotes or alone; `string="true"` or `string="false"` may be behind it. It is
    empty if anything else is.
    """
    name, attributes = text.strip(), ""
    if name[:1] in {'"', "'"} and name[0] in name[1:]:
        name, _, attributes = name[1:].partition(name[0])
    stated = _ATTRIBUTES.fullmatch(attributes)
    if stated is None:
        return "", None
    return name.strip(), None if stated[1] is None else stated[1] == "true"


_ATTRIBUTES = re.compile(r"\s*(?:string=[\"'](true|false)[\"'])?\s*")


class _TagName(ToolName):
    """The name of the tool, in quotes or alone."""

    def parse(self, text: str) -> tuple[str, str | None]:
        return head_of(text)[0], None


class Parameters(Between):
    """White space around the tags of parameters."""

    reason = "there is text outside of its parameters"


class _OpenedCall(Parameters):
    """Behind the name of a call."""

    def open(self, events: list[OutputEvent]) -> None:
        begin_call(self.output, events)


class Key(Whole):
    """The name of a parameter."""

    def parse(self, text: str) -> tuple[str, bool | None]:
        """Return the name, and whether its tag states that the value is text."""
        return head_of(text)

    def finish(self, text: str, events: list[OutputEvent]) -> None:
        """Leave the name for the value."""
        notes = self.output.notes
        key, notes["is_text"] = self.parse(text)
        notes["key"] = key
        if not key or set(key) & {*"<>\n"}:
            self.output.fail_call(f"expected the name of a parameter, got {text[:100]!r}", events)
        elif key in notes["keys"]:
            self.output.fail_call(f"it has two values of the parameter {key[:100]!r}", events)
        notes["keys"].add(key)


class Value(Whole):
    """The value of a parameter, which is passed on when it is complete."""

    def __init__(self, output: OpenOutput, around: str = "") -> None:
        """`around`: the text before and behind the value, which is no part of it."""
        super().__init__(output)
        self._around = around
        root = output.schema
        properties, key = root.get("properties"), output.notes.get("key")  # none: the call failed
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._schema = resolved(schema, root)
        types = named_types(self._schema, root)
        is_json = types and "string" not in types and not output.notes.get("is_text")
        self._json = JsonText() if is_json else None

    @property
    def quotes(self) -> bool:
        """Whether a string of a value in JSON is open."""
        return self._json is not None and self._json.in_string

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        """Take all of it."""
        if self._json is not None and self._json.feed(text)[1] is not None:
            self._json = None  # complete, or no JSON
        return super().feed(text, events)

    def finish(self, text: str, events: list[OutputEvent]) -> None:
        """Give the parameter as a member of the arguments."""
        notes, key = self.output.notes, self.output.notes["key"]
        if self.output.target != "parameters":
            notes["warnings"].append(f"the value of {key[:100]!r} has no end tag")
        text = text.removeprefix(self._around).removesuffix(self._around)
        value = value_of(text, self._schema, self.output.schema, notes["is_text"])
        events.append(ToolCallArguments(f"{notes['separator']}{quoted(key)}: {value}"))
        notes["separator"] = ", "


class _CallEnd(Body):
    """White space behind the last parameter of a call; other text is content."""

    next = "behind"

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._space: list[str] = []

    def open(self, events: list[OutputEvent]) -> None:
        end_call(self.output, events)

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        space = len(text) - len(text.lstrip())
        self._space.append(text[:space])
        if space < len(text):
            events.append(ContentText("".join(self._space)))
        return space


class After(AfterCall):
    """Content behind a call without an end tag."""

    def open(self, events: list[OutputEvent]) -> None:
        """End the call."""
        end_call(self.output, events)


class StrayEnd(Content):
    """Content behind a call, from the end tag of a value on.

    A value may have contained tags that ended it, and its call, too early.
    """

    def __init__(self, output: OpenOutput, tag: str) -> None:
        """`tag`: the end tag of values."""
        super().__init__(output)
        self._tag = tag

    def open(self, events: list[OutputEvent]) -> None:
        """Warn, and keep the tag."""
        reason = f"there is {self._tag} behind a call: a value of it may be cut"
        self.output.warn(reason, events, self._tag)


def begin_call(output: OpenOutput, events: list[OutputEvent]) -> None:
    """Begin a call after its name."""
    output.begin_call(events)
    notes = output.notes
    notes["separator"], notes["keys"], notes["warnings"] = "{", set(), list[str]()


def end_call(output: OpenOutput, events: list[OutputEvent]) -> None:
    """End the call with its last bracket, unless it failed."""
    if output.in_call:
        separator = output.notes["separator"]
        events.append(ToolCallArguments("{}" if separator == "{" else "}"))
        output.end_call(events)
        for reason in output.notes["warnings"]:
            output.warn(reason, events)
