"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from hardpoint import plugins
from hardpoint.plugins.output_parser import ContentText, OutputEvent
from hardpoint.plugins.structured import Format, OptionalFormat, OrFormat, RegexFormat
from hardpoint.toolkit.parsing.format_parser import (
    Beginning,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    ParserState,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.json_text import JsonCalls, call_as_json

from .text_calls import TextWithCalls, head_of_call, head_pattern
from .values import text_without


class Json(FormatParser):
    """Any model: an answer that is a JSON object with a name and arguments, or a list of them.

    With `after_text`, calls after other text are found: objects that begin with the `name` of a
    tool of the request, or with `"type": "function"` before it.
    """

    class Options(plugins.Options):
        """Where calls are found.

        Attributes:
            after_text: whether to find calls of the request's tools after other text too. Such
                calls begin with the tool's name. Otherwise, other text first means no calls.
        """

        after_text: bool = False

    contract = 2
    roles = ("tools",)
    any_model = True
    options: Options
    _arguments: ClassVar = "arguments"

    def states(self) -> Mapping[str, ParserState]:
        """Return the first character's state, call and content."""
        content = _TextWithCalls if self.options.after_text else Content
        return {
            "start": ParserState(_FirstText, {}),
            "content": ParserState(content, {}),
            "call": ParserState(_Call, {}, then="after"),
            "after": ParserState(_BetweenCalls, {}),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of them and text that does not begin so."""
        call = choice_of_calls(tools, partial(call_as_json, arguments=self._arguments))
        calls = self._calls(call, parallel=parallel)
        if required:
            return calls
        others = [text for state in self.states().values() for text in state.moves]
        special = self.context.tokenizer.special_tokens
        text = text_without(
            _TEXT,
            [text for text in others if text not in special],
            patterns=[head_pattern(_HEAD, tools, '"')] if self.options.after_text else (),
        )
        return OrFormat(elements=[self.sequence(RegexFormat(pattern=r"\s*"), calls), text])

    def _calls(self, call: Format, *, parallel: bool) -> Format:
        if not parallel:
            return call
        return OrFormat(elements=[call, self.sequence("[", repeated(call, ", "), "]")])


class Llama3Json(Json):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several separated by `;`.

    Arguments may be JSON text in a string. Small models write text before their calls, so
    `after_text` is true by default.
    """

    class Options(Json.Options):
        """Where calls are found.

        Attributes:
            after_text: see `json`; small models of the family write text before their calls.
        """

        after_text: bool = True

    contract = 2
    other_names = ("llama4_json",)
    template_marks = ('"parameters": dictionary',)
    any_model = False
    options: Options
    _arguments = "parameters"

    def states(self) -> Mapping[str, ParserState]:
        """Return the states of `json`, and the marker that may come first."""
        states, marker = super().states(), {"<|python_tag|>": "call"}
        return {
            **states,
            "start": ParserState(_FirstText, marker),
            "content": ParserState(states["content"].body, marker),
        }

    def _calls(self, call: Format, *, parallel: bool) -> Format:
        marker = OptionalFormat(content=self.sequence("<|python_tag|>"))
        return self.sequence(marker, repeated(call, "; ", parallel=parallel))


_TEXT = r"[\s\x1c-\x1f]*([^\s\x1c-\x1f{\[](?s:.*))?"
"""Text that begins no call. Python has more white space than regular expressions of Rust."""


_WS = r"[ \t\r\n]*"
_HEAD = rf'\{{{_WS}("type"{_WS}:{_WS}"function"{_WS},{_WS})?"name"{_WS}:{_WS}"'
"""A call up to the name of its tool."""

_STARTS = tuple(
    f'{bracket}{{{kind}"name":"' for bracket in ("", "[") for kind in ("", '"type":"function",')
)


class _FirstText(Beginning):
    begins = {"{": "call", "[": "call"}


class _TextWithCalls(TextWithCalls):
    bracket = re.compile(r"[\[{]")
    head = re.compile(rf'(?:\[{_WS})?{_HEAD}(?P<tool>[^"\\\s]+)"')

    def begins(self, text: str, tools: Mapping[str, object]) -> bool:
        compact = "".join(text.split())
        for start in _STARTS:
            if compact.startswith(start):
                name = compact.removeprefix(start)
                if name.endswith('"'):
                    return self.head.fullmatch(text) is not None and (
                        not tools or name[:-1] in tools
                    )
                return not tools or any(tool.startswith(name) for tool in tools)
        return any(start.startswith(compact) for start in _STARTS)


class _Call(JsonCalls):
    def open(self, events: list[OutputEvent]) -> None:
        if head := head_of_call(self.output):
            self.output.feed_call(self, head, events)


class _BetweenCalls(Body):
    """Text between calls: white space and separators; else it and the rest are content."""

    is_start = True

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._waiting: list[str] = []

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        rest = text.lstrip(" \t\r\n;,")
        taken = len(text) - len(rest)
        self._waiting.append(text[:taken])
        if rest:
            self.next = "call" if rest[0] in "{[" else "content"
            if self.next == "content":
                events.append(ContentText("".join(self._waiting)))
        return taken

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        waiting = "".join(self._waiting)
        if cut and not waiting.isspace():
            events.append(ContentText(waiting))
