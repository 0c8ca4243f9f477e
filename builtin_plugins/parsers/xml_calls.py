"""Tool calls whose arguments are tags: one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hardpoint.plugins.output_parser import (
    ContentText,
    OutputEvent,
    ToolCallArguments,
)
from hardpoint.plugins.structured import (
    ConstStringFormat,
    Format,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    SequenceFormat,
)
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    Between,
    Body,
    Content,
    FormatParser,
    Ignored,
    OpenOutput,
    Reasoning,
    State,
    ToolName,
    Whole,
    any_tag,
    choice_of_calls,
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


class Qwen3Coder(FormatParser):
    """Qwen3-Coder: calls with a tag for each parameter.

    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. A value is
    text where the tool's schema asks for it, else JSON if it is. It ends at `</parameter>`; if the
    model forgets that, at a line that begins with `<parameter=` or `</function>`. A call that
    lacks `<tool_call>` begins at `<function=`: the model is known to leave the tag out.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<tool_call>", "<function=", "<parameter=")

    def states(self) -> Mapping[str, State]:
        """Return content and the parts of a call."""
        content = {"<tool_call>": "call", "<function=": "name"}
        return {"content": State(Content, content), **_call_states("</tool_call>", content)}

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Parameters are in the order of the schema.
        """
        calls = self.tagged(
            "<tool_call>",
            choice_of_calls(tools, lambda tool, schema: _call(tool, schema, "\n")),
            "</tool_call>",
            required=required,
            parallel=parallel,
            separator="\n",
        )
        if required:
            return calls
        alone = self.tagged(
            "<function=",
            choice_of_calls(tools, lambda tool, schema: _call(tool, schema, "\n", is_alone=True)),
            required=False,
            parallel=parallel,
        )
        return any_tag(calls, alone, parallel=parallel)


class SeedOss(FormatParser):
    """Seed-OSS: reasoning in `<seed:think>`, calls in `<seed:tool_call>` as in `qwen3_coder`."""

    contract = 2
    roles = ("reasoning", "tools")
    template_marks = ("<seed:tool_call>",)
    reasoning = "thinking"

    def states(self) -> Mapping[str, State]:
        """Return content, thinking, and the parts of a call."""
        content = {"<seed:think>": "thinking", "<seed:tool_call>": "call"}
        return {
            "content": State(Content, content),
            "thinking": State(Reasoning, {"</seed:think>": "content"}),
            **_call_states("</seed:tool_call>", content),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Parameters are in the order of the schema.
        """
        return self.tagged(
            "<seed:tool_call>",
            choice_of_calls(tools, lambda tool, schema: _call(tool, schema, "")),
            "</seed:tool_call>",
            required=required,
            parallel=parallel,
            separator="\n",
        )


_VALUE_ENDS = ("</parameter>", "\n</function>", "\n<parameter=")


def _call(tool: str, schema: Mapping[str, Any], around: str, *, is_alone: bool = False) -> Format:
    """Return the grammar of a call.

    Args:
        tool: its name.
        schema: schema of its arguments.
        around: the text before and behind each value.
        is_alone: whether the call's first tag, of which the name is left, stands for itself.
    """
    head = f"{tool}>\n" if is_alone else f"\n<function={tool}>\n"
    elements: list[Format] = [ConstStringFormat(value=head)]
    for parameter in parameters_of(tool, schema):
        name = parameter.name
        if set(name) & set("<>\n") or name != name.strip() or not name:
            raise ValueError(
                f"the tool {tool!r}: expected parameters whose names have no angle brackets and "
                f"line ends, got {name!r}"
            )
        begin = ConstStringFormat(value=f"<parameter={name}>")
        values = _values(tool, parameter, schema, around)
        one = SequenceFormat(elements=[begin, values, ConstStringFormat(value="\n")])
        elements.append(one if parameter.is_required else OptionalFormat(content=one))
    return SequenceFormat(elements=[*elements, ConstStringFormat(value="</function>\n")])


def _values(tool: str, parameter: Parameter, root: Mapping[str, Any], around: str) -> Format:
    """Return the grammar of a parameter's value and the tag that ends it."""
    whole = resolved(parameter.schema, root)
    types = named_types(whole)
    found: list[Format] = []
    for schema in _alternatives(tool, whole, root):
        if "enum" in schema or "const" in schema:
            found += _constants(tool, schema, whole, around)
        elif not types or schema.get("type") == "string":
            check_keywords(
                tool, schema, {"type", "minLength", "maxLength", "format"} if types else ()
            )
            length = length_pattern(schema)
            # A line's end around the text is no part of it, so one that counts has another.
            ends = r"\n" if around or length != length_pattern({}) else ""
            pattern = f"{ends}{length}{ends}"
            found.append(text_without(pattern, _VALUE_ENDS, "</parameter>"))
        else:
            if "string" in types:  # a text may be one of these values
                allowed = set() if schema["type"] in {"array", "object"} else {"type"}
                check_keywords(tool, schema, allowed)
            with_root = {key: root[key] for key in ("$defs", "definitions") if key in root}
            found.append(
                SequenceFormat(
                    elements=[
                        *([ConstStringFormat(value=around)] if around else []),
                        JsonSchemaFormat(json_schema={**with_root, **schema}),
                        ConstStringFormat(value=f"{around}</parameter>"),
                    ]
                )
            )
    return found[0] if len(found) == 1 else OrFormat(elements=found)


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


def _constants(
    tool: str, schema: Mapping[str, Any], whole: object, around: str
) -> Iterator[Format]:
    """Yield the values that a schema lists, each as a text that is parsed to it."""
    check_keywords(tool, schema, ("enum", "const", "type"))
    for value in schema["enum"] if "enum" in schema else [schema["const"]]:
        texts = [value] if isinstance(value, str) else []
        for text in (*texts, json.dumps(value, ensure_ascii=False)):
            # A line's end at either end of the value is kept where another one is around it.
            outside = around or "\n" * (text != text.strip("\n"))
            written = f"{outside}{text}{outside}"
            stripped = written.removeprefix("\n").removesuffix("\n")
            is_whole = not any(end in written for end in _VALUE_ENDS)
            if is_whole and json.loads(json_value(stripped, whole)) == value:
                yield ConstStringFormat(value=f"{written}</parameter>")
                break
        else:
            raise ValueError(f"the tool {tool!r}: its calls cannot have the value {value!r}")


def _call_states(end: str, content: Mapping[str, str]) -> dict[str, State]:
    """Return the states of a call that the marker `end` ends, and of the content behind it."""
    value = dict(zip(_VALUE_ENDS, ("parameters", "end", "key"), strict=True))
    return {
        "call": State(Between, {"<function=": "name", end: "behind"}),
        "name": State(ToolName, {">": "opened"}),
        "opened": State(_Opened, {"<parameter=": "key", "</function>": "end", end: "after"}),
        "parameters": State(Ignored, {"<parameter=": "key", "</function>": "end", end: "after"}),
        "key": State(_Key, {">": "value"}),
        "value": State(_Value, value),
        "end": State(_End, {**content, "<function=": "name", end: "behind"}),
        "after": State(_After, content),
        "behind": State(AfterCall, content),
    }


class _Opened(Ignored):
    """Behind the name of a call."""

    def open(self, events: list[OutputEvent]) -> None:
        self.output.begin_call(events)
        self.output.notes["separator"] = "{"


class _Key(Whole):
    """The name of a parameter."""

    def finish(self, text: str, events: list[OutputEvent]) -> None:  # noqa: ARG002
        self.output.notes["key"] = text.strip()


class _Value(Whole):
    """The value of a parameter, which is passed on when it is complete."""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        root = output.schema
        properties, key = root.get("properties"), output.notes.get("key")  # none: the call failed
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._schema = resolved(schema, root)
        types = named_types(self._schema)
        self._json = JsonText() if types and "string" not in types else None

    @property
    def quotes(self) -> bool:
        return self._json is not None and self._json.in_string

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        if self._json is not None and self._json.feed(text)[1] is not None:
            self._json = None  # complete, or no JSON
        return super().feed(text, events)

    def finish(self, text: str, events: list[OutputEvent]) -> None:
        notes, key = self.output.notes, self.output.notes["key"]
        value = json_value(text.removeprefix("\n").removesuffix("\n"), self._schema)
        events.append(ToolCallArguments(f"{notes['separator']}{quoted(key)}: {value}"))
        notes["separator"] = ", "


class _End(Body):
    """White space behind the last parameter of a call; other text is content."""

    next = "behind"

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._space: list[str] = []

    def open(self, events: list[OutputEvent]) -> None:
        _end_call(self.output, events)

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        space = len(text) - len(text.lstrip())
        self._space.append(text[:space])
        if space < len(text):
            events.append(ContentText("".join(self._space)))
        return space


class _After(AfterCall):
    """Content behind a call whose end tag is missing."""

    def open(self, events: list[OutputEvent]) -> None:
        _end_call(self.output, events)


def _end_call(output: OpenOutput, events: list[OutputEvent]) -> None:
    if output.in_call:  # not of a call that failed
        separator = output.notes["separator"]
        events.append(ToolCallArguments("{}" if separator == "{" else "}"))
        output.end_call(events)
