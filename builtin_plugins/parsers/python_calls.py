"""Tool calls that are a list of Python calls."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from typing import Any, ClassVar
from unicodedata import normalize

from hardpoint import plugins
from hardpoint.plugins.output_parser import (
    ContentText,
    OutputEvent,
    ToolCallArguments,
)
from hardpoint.plugins.structured import Format, OrFormat, RegexFormat
from hardpoint.toolkit.parsing.format_parser import (
    AfterCall,
    Body,
    Content,
    FormatParser,
    OpenOutput,
    ParserState,
    choice_of_calls,
    repeated,
)
from hardpoint.toolkit.parsing.python_literals import call_keywords

from .text_calls import TextWithCalls, head_of_call, head_pattern
from .values import LiteralGrammar, in_lark, length_pattern, parameters_of, text_without


class Pythonic(FormatParser):
    """`[f(a=1, b="x"), g()]`: Llama 3.2, ToolACE and others.

    Arguments are keywords with literal values.

    Nothing is evaluated. A call is returned when it is complete. After other text, `[NAME(`
    begins a call if the request has a tool of that name.
    """

    class Options(plugins.Options):
        """Where calls are found.

        Attributes:
            after_text: whether to find calls of the request's tools after other text too.
        """

        after_text: bool = True

    contract = 2
    roles = ("tools",)
    template_marks = ("[func_name1(",)
    options: Options

    def states(self) -> Mapping[str, ParserState]:
        """Return calls and content."""
        return self._states_of({})

    def _states_of(self, markers: Mapping[str, str]) -> Mapping[str, ParserState]:
        content = _TextWithPythonCalls if self.options.after_text else Content
        return {
            "call": ParserState(_PythonCalls, markers, then="content"),
            "content": ParserState(content, markers),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of a list of calls, or of it and text that does not begin so.

        Keywords are in the order of the schema.
        """
        calls = self._calls(repeated(choice_of_calls(tools, _call), ", ", parallel=parallel))
        if required:
            return calls
        others = [text for state in self.states().values() for text in state.moves]
        special = self.context.tokenizer.special_tokens
        heads = [head_pattern(rf"\[{_SPACE}*", tools, rf"{_SPACE}*\(")]
        text = text_without(
            _OTHER_TEXT,
            [text for text in others if text not in special],
            patterns=heads if self.options.after_text else (),
        )
        return OrFormat(elements=[self.sequence(RegexFormat(pattern=r"\s*"), calls), text])

    def _calls(self, calls: Format) -> Format:
        return self.sequence("[", calls, "]")


class Llama4Pythonic(Pythonic):
    """Llama 4: calls as in `pythonic`, also in `<|python_start|>...<|python_end|>`."""

    class Options(Pythonic.Options):
        """Where calls are found; they have markers behind other text.

        Attributes:
            after_text: whether to find calls of the request's tools without the markers, after
                other text too.
        """

        after_text: bool = False

    contract = 2
    roles = ("tools",)
    template_marks = ("<|python_start|>",)
    marks: ClassVar[tuple[str, str]] = ("<|python_start|>", "<|python_end|>")
    options: Options

    def states(self) -> Mapping[str, ParserState]:
        """Return calls and content."""
        begin, end = self.marks
        return self._states_of({begin: "call", end: "content"})

    def _calls(self, calls: Format) -> Format:
        formats = super()._calls(calls)
        begin, end = self.marks
        return OrFormat(elements=[self.sequence(begin, formats, end), formats])


class Lfm2(Llama4Pythonic):
    """LFM2: calls as in `pythonic`, in `<|tool_call_start|>...<|tool_call_end|>`."""

    contract = 2
    roles = ("tools",)
    template_marks = ("<|tool_list_start|>",)
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")


class Olmo3Parser(FormatParser):
    """OLMo 3: calls as in `pythonic`, a line each, in `<function_calls>...</function_calls>`.

    Literals may be of Python or of JSON. Its reasoning parser is `think_tags`.
    """

    contract = 2
    roles = ("tools",)
    template_marks = ("<function_calls>",)

    def states(self) -> Mapping[str, ParserState]:
        """Return content, calls, and content behind them."""
        begin, end = {"<function_calls>": "calls"}, {"</function_calls>": "behind"}
        return {
            "content": ParserState(Content, begin),
            "calls": ParserState(_LinesOfCalls, end),
            "behind": ParserState(AfterCall, {**begin, **end}),
        }

    def call_format(
        self, tools: Mapping[str, Mapping[str, Any]], *, required: bool, parallel: bool = True
    ) -> Format:
        """Return the grammar of calls, or of text with calls in it.

        Keywords are in the order of the schema.
        """
        calls = repeated(choice_of_calls(tools, _call), "\n", parallel=parallel)
        return self.tagged(
            "<function_calls>",
            self.sequence("\n", calls, "\n"),
            "</function_calls>",
            required=required,
            parallel=False,
        )


Olmo3 = Olmo3Parser
"""Name in the entry points, which journals record."""


_SPACE = r"[\s\x1c-\x1f]"
"""White space: Python has more than regular expressions of Rust."""

_OTHER_TEXT = rf"{_SPACE}*([^\s\x1c-\x1f\[](?s:.*))?"
"""Text that begins no list."""


def _call(tool: str, schema: Mapping[str, Any]) -> Format:
    """Return the grammar of a call.

    Raises:
        ValueError: the tool, or a parameter, has no name of Python's.
    """
    if not _NAME.fullmatch(tool):
        raise ValueError(f"expected a tool named by a Python identifier, got {tool!r}")
    parameters = parameters_of(tool, schema)
    for name, _, _ in parameters:
        usual = name.isidentifier() and normalize("NFKC", name) == name
        if not usual or keyword.iskeyword(name) or name == "__debug__":
            raise ValueError(
                f"the tool {tool!r}: expected parameters named by Python identifiers, got {name!r}"
            )
    writer = _PythonLiterals(tool, schema)
    members = writer.members(parameters, [in_lark(f"{name}=") for name, _, _ in parameters])
    return writer.grammar(f'{in_lark(f"{tool}(")} {members} ")"')


class _PythonLiterals(LiteralGrammar):
    comma = "/, ?/"
    literals = {"true": '"True"', "false": '"False"', "null": '"None"'}

    def string(self, schema: Mapping[str, Any]) -> str:
        wanted = {key: schema[key] for key in schema if key in _STRING_KEYWORDS}
        rule = self.json({"type": "string", **wanted})
        if {"pattern", "format"} & wanted.keys():
            return rule
        count = length_pattern(schema).removeprefix("(?s:.").removesuffix(")")
        quoted = r"'([^'\\\x00-\x1f\x7f]|\\[\\'nrt])"
        return f"{rule} | /{quoted}{count}'/"

    def constant(self, text: str) -> str:
        texts = dict.fromkeys([json.dumps(text, ensure_ascii=False), repr(text)])
        return f"({' | '.join(map(in_lark, texts))})"

    def key(self, name: str) -> str:
        return f"{self.constant(name)} /: ?/"

    def any_key(self) -> str:
        return f"{self.json({'type': 'string'})} /: ?/"


_STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
_LONGEST = 1 << 18  # of a call, in characters
_LONGEST_CODE = 1 << 15  # of these, outside of strings: parsing them takes up to 5 us each
_DEEPEST = 50
_LONGEST_HEAD = 300
_HEAD = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\s*\(")
_HEAD_BEGINS = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]*\s*)?)?\Z")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_CODE = re.compile(r"[^()\[\]{}\"'\\]+")
_TEXT = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _TextWithPythonCalls(TextWithCalls):
    bracket = re.compile(r"\[")
    head = re.compile(r"\[\s*(?P<tool>[A-Za-z_][\w.-]*)\s*\(")

    def begins(self, text: str, tools: Mapping[str, object]) -> bool:
        name = text[1:].strip()
        if text.endswith("("):  # all of a head, which the call's text has to follow
            return self.head.fullmatch(text) is not None and (
                not tools or name[:-1].strip() in tools
            )
        if not _HEAD_BEGINS.match(text):
            return False
        return not tools or any(tool.startswith(name) for tool in tools)


class _PythonCalls(Body):
    """A list of calls: each is scanned for its end, and parsed once when it is complete.

    Nothing of it is ever evaluated.
    """

    next = "content"
    is_start = True
    closing = "]"

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._before = 0  # the length of the text that was fed before
        self._head: str | None = ""  # the beginning, until it is known to be a call
        self._parts: list[str] = []  # of the call that comes
        self._length = self._code_length = 0
        self._missing: list[str] = []  # closing brackets
        self._quote = ""
        self._is_escaped = False
        self._has_ended = False

    def open(self, events: list[OutputEvent]) -> None:
        if head := head_of_call(self.output):
            self.output.feed_call(self, head, events)

    @property
    def quotes(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str, events: list[OutputEvent]) -> int:
        if self._head is not None:
            return self._begin(text, events)
        return self._feed(text, 0, events)

    def _begin(self, text: str, events: list[OutputEvent]) -> int:
        """Take the bracket and the name of the first call; anything else is content."""
        assert self._head is not None
        head, known = self._head + text, len(self._head)
        match = _HEAD.match(head[:_LONGEST_HEAD])
        if match:
            self._head = None
            self._before = known
            taken = self._feed(head, head.index("[") + 1, events) - known
            self._before = 0
            return taken
        if len(head) < _LONGEST_HEAD and _HEAD_BEGINS.match(head):
            self._head = head
            return len(text)
        events.append(ContentText(self._head))
        self._head = ""
        return 0

    def _feed(self, text: str, at: int, events: list[OutputEvent]) -> int:
        while at < len(text) and not (self._has_ended or self.output.failed):
            at = self._scan(text, at, events)
        return at

    def _scan(self, text: str, at: int, events: list[OutputEvent]) -> int:
        """Take text up to the next quote or bracket, and that; return where the rest begins."""
        if self._is_escaped:
            self._is_escaped = False
            self._append(text[at])
            return at + 1
        plain = (_TEXT[self._quote] if self._quote else _CODE).match(text, at)
        if plain:
            self._append(plain.group())
            at = plain.end()
        is_long = self._length > _LONGEST or self._code_length > _LONGEST_CODE
        reason = "it is too long" if is_long else ""
        if not reason and at < len(text):
            character, at = text[at], at + 1
            reason = self._in_text(character) if self._quote else self._in_code(character)
            if not self._has_ended:
                self._append(character)
            if not reason and character == ")" and not self._missing and not self._quote:
                reason = self._call_ended(events, at - self._before)
        if reason:
            self.output.fail_call(reason, events)
        return at

    def _append(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)
        if not self._quote:
            self._code_length += len(text)

    def _in_text(self, character: str) -> str:
        if character == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return ""

    def _in_code(self, character: str) -> str:
        if not self._missing:
            before = "".join(self._parts).strip()
            if character == self.closing and not before:
                self._has_ended = True
                return ""
            name = before.removeprefix(",").lstrip()
            return self._opened(character, character == "(" and _NAME.fullmatch(name))
        if character in "\"'":
            last = self._parts[-1][-1]
            self._quote = character
            return self._opened("", not (last.isalnum() or last in "_\"'"))
        if character in _CLOSING:
            return self._opened(character, len(self._missing) < _DEEPEST)
        return "" if character == self._missing.pop() else "a bracket or quote is out of place"

    def _opened(self, character: str, is_right: object) -> str:
        if not is_right:
            return "a bracket or quote is out of place"
        if character:
            self._missing.append(_CLOSING[character])
        return ""

    def _call_ended(self, events: list[OutputEvent], at: int) -> str:
        text = "".join(self._parts).strip().removeprefix(",").strip()
        name, _, rest = text.partition("(")
        try:
            arguments = call_keywords(rest)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return "expected keyword arguments with literal values"
        self._parts, self._length, self._code_length = [], 0, 0
        self.output.tool = name.strip()
        self.output.begin_call(events)
        if self.output.in_call:
            events.append(ToolCallArguments(arguments))
            self.output.end_call(events, at)
        return ""

    def close(self, events: list[OutputEvent], *, cut: bool) -> None:
        if self._head:
            if not (cut and self.output.has_begun):  # else the call fails, with its whole text
                events.append(ContentText(self._head))
        elif self._missing or "".join(self._parts).strip():
            reason = "the output ended inside it" if cut else "it is not complete"
            self.output.fail_call(reason, events)


class _LinesOfCalls(_PythonCalls):
    """Calls without brackets around them, which a marker ends."""

    closing = ""

    def __init__(self, output: OpenOutput) -> None:
        super().__init__(output)
        self._head = None
