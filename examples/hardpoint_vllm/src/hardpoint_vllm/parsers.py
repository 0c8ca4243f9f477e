"""vLLM's reasoning parsers and tool parsers as output parsers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from hardpoint import typed
from hardpoint.errors import PluginContractError
from hardpoint.plugins import OutputParser, OutputParserContext, ReasoningMarkers
from hardpoint.plugins.component import AdaptedComponent, Source
from hardpoint.toolkit.parsing.events import (
    ContentText,
    MalformedText,
    OutputEvent,
    ParserRequest,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

from .origin import vllm_base
from .protocol import ChatCompletionRequest, tool_of
from .tokenizers import TokenizerLike

FORMS = {"ReasoningParser": "extract_reasoning", "ToolParser": "extract_tool_calls"}
"""vLLM's base classes, and the method that parses a whole output."""


class ParserOptions(typed.Options):
    """Options of an adapted parser.

    Attributes:
        streaming: whether the parser gets each piece of text as it comes, by its `..._streaming`
            method, whose results may depend on how the text is cut. Otherwise it gets the whole
            output at its end, and streams have nothing before.
    """

    streaming: bool = False


def form_of(target: Any) -> str:
    """Return the name of vLLM's base class of a parser; empty for other objects."""
    return vllm_base(target, FORMS)


def adapt_parser(target: type, source: Source) -> type[AdaptedParser]:
    """Return the component of a class for which `form_of` is not empty.

    Raises:
        PluginContractError: the class lacks the method that parses a whole output, or its
            constructor takes no tokenizer.
    """
    form = form_of(target)
    method = FORMS[form]
    if not callable(getattr(target, method, None)) or _owner(target, method).__name__ == form:
        raise PluginContractError(f"{source}: it lacks {method}(model_output, request)")
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{source}: it lacks {', '.join(unfinished)}")
    base = AdaptedReasoning if form == "ReasoningParser" else AdaptedTools
    return base.of(target)


def _owner(target: type, method: str) -> type:
    return next((base for base in target.__mro__ if method in vars(base)), object)


class AdaptedParser(AdaptedComponent, OutputParser):
    """Runs a parser of vLLM, a new one for each output."""

    target: ClassVar[type]

    class Options(ParserOptions):
        """Options of every adapted parser."""

    @classmethod
    def of(cls, target: type) -> type[AdaptedParser]:
        """Return the component that runs a class."""
        attributes = {"contract": 2, "target": target, "__doc__": inspect.getdoc(target)}
        return type(target.__name__, (cls,), {**attributes, "__module__": cls.__module__})

    def __init__(self, context: OutputParserContext) -> None:
        """Build a parser, so that a parser that cannot be built stops the start."""
        super().__init__(context)
        self.open_target({})

    @cached_property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer with the methods of transformers'."""
        return TokenizerLike(self.context.tokenizer, "")

    @property
    def token_ids(self) -> frozenset[int]:
        """All special tokens that do not end a text: the parser's markers are among them."""
        special = self.context.tokenizer.special_tokens.values()
        return frozenset(special) - frozenset(self.context.tokenizer.eos_token_ids)

    def open_target(self, tools: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return a new parser of vLLM."""
        listed = [tool_of(name, schema) for name, schema in tools.items()]
        try:
            inspect.signature(self.target).bind(self.tokenizer, listed)
        except TypeError:
            return self.target(self.tokenizer)
        return self.target(self.tokenizer, listed)


class AdaptedReasoning(AdaptedParser):
    """Runs a reasoning parser."""

    contract = 2
    adapter = "vLLM reasoning parser"
    roles = ("reasoning",)

    def open_target(self, tools: Mapping[str, Mapping[str, Any]]) -> Any:  # noqa: ARG002
        """Return a new parser of vLLM."""
        return self.target(self.tokenizer)

    @cached_property
    def marker_texts(self) -> tuple[str, str]:
        """Texts of the markers of reasoning; empty if the parser does not name them."""
        parser = self.open_target({})
        start, end = (
            getattr(parser, f"reasoning_{name}_str", None) or getattr(parser, f"{name}_token", None)
            for name in ("start", "end")
        )
        return str(start or ""), str(end or "")

    def markers(self) -> ReasoningMarkers:
        """Return the token ids of both markers."""
        start, end = (self._ids(text) for text in self.marker_texts)
        return ReasoningMarkers(start=start, end=end)

    def _ids(self, text: str) -> tuple[tuple[int, ...], ...]:
        if not text:
            return ()
        token = self.context.tokenizer.special_tokens.get(text)
        ids = self.tokenizer.encode(text, add_special_tokens=False) if token is None else [token]
        return (tuple(ids),)

    def open(self, request: ParserRequest) -> _State:
        """Return the state of a new output."""
        return _ReasoningState(self, request)


class AdaptedTools(AdaptedParser):
    """Runs a tool parser."""

    contract = 2
    adapter = "vLLM tool parser"
    roles = ("tools",)

    def open(self, request: ParserRequest) -> _State:
        """Return the state of a new output."""
        return _ToolState(self, request)


class _State:
    """One output: pieces go to vLLM's parser as they come, or all at the end.

    With pieces, vLLM's interface gets the whole text each time: its cost is quadratic.
    """

    def __init__(self, parser: AdaptedParser, request: ParserRequest) -> None:
        self.parser, self.request = parser, request
        self.target = parser.open_target(request.tools)
        self._pieces: list[str] = []  # for the parser, with the texts of special tokens
        self._visible: list[str] = []  # the same, as outputs show them
        self._streamed, self._ids = "", list[int]()
        tools = [tool_of(name, schema) for name, schema in request.tools.items()]
        chat = ChatCompletionRequest(tools=tools or None, tool_choice="auto" if tools else None)
        self.chat = self.target.adjust_request(chat) or chat

    @property
    def text(self) -> str:
        """The text for the parser, special tokens included."""
        return "".join(self._pieces)

    @property
    def shown(self) -> str:
        """The text as outputs show it."""
        return "".join(self._visible)

    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside reasoning."""
        return False

    @property
    def is_streaming(self) -> bool:
        """Whether the parser gets pieces."""
        return bool(self.parser.context.options.streaming)

    def begin(self, text: str, ids: Sequence[int]) -> None:
        """Set text that comes before the output."""
        self._pieces, self._streamed, self._ids = [text], text, list(ids)

    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text."""
        return self._process(text, text)

    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token; the parser sees its text always."""
        decoded = self.parser.tokenizer.decode([token_id], skip_special_tokens=False)
        return self._process(decoded, text, [token_id])

    def finish(self) -> Sequence[OutputEvent]:
        """End the output."""
        return () if self.is_streaming else list(self.whole())

    def _process(self, text: str, shown: str, ids: Sequence[int] = ()) -> Sequence[OutputEvent]:
        if not text:
            return ()
        self._pieces.append(text)
        self._visible.append(shown)
        if not self.is_streaming:
            return ()
        new = ids or self.parser.tokenizer.encode(text, add_special_tokens=False)
        before, ids_before = self._streamed, list(self._ids)
        self._streamed, self._ids = before + text, [*ids_before, *new]
        delta = self.delta(before, self._streamed, text, ids_before, self._ids, new)
        return [] if delta is None else list(self.events(delta))

    def whole(self) -> Iterator[OutputEvent]:
        """Yield the events of the whole output."""
        raise NotImplementedError

    def delta(self, *arguments: Any) -> Any:
        """Return vLLM's message for a piece of text."""
        raise NotImplementedError

    def events(self, delta: Any) -> Iterator[OutputEvent]:
        """Yield the events of vLLM's message."""
        reasoning = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
        if reasoning:
            yield ReasoningText(reasoning)
        if delta.content:
            yield ContentText(delta.content)


class _ReasoningState(_State):
    """An output with reasoning."""

    parser: AdaptedReasoning

    def __init__(self, parser: AdaptedReasoning, request: ParserRequest) -> None:
        super().__init__(parser, request)
        self._is_open, self._tail = request.reasoning_open, ""
        if request.reasoning_open:  # vLLM's parsers see what the prompt has begun
            start = [token for ids in parser.markers().start for token in ids]
            self.begin(parser.marker_texts[0], start)

    @property
    def in_reasoning(self) -> bool:
        """Whether a start marker is the last marker."""
        return self._is_open

    def _process(self, text: str, shown: str, ids: Sequence[int] = ()) -> Sequence[OutputEvent]:
        start, end = self.parser.marker_texts
        window = self._tail + text
        opened, closed = (window.rfind(mark) if mark else -1 for mark in (start, end))
        if opened != closed:
            self._is_open = opened > closed
        self._tail = window[1 - max(len(start), len(end), 2) :]
        return super()._process(text, shown, ids)

    def whole(self) -> Iterator[OutputEvent]:
        if not self.text:
            return
        reasoning, content = self.target.extract_reasoning(self.text, self.chat)
        if not reasoning:
            yield ContentText(self.shown if content is None else content)
            return
        yield ReasoningText(reasoning)
        if content:
            yield ContentText(content)

    def delta(self, *arguments: Any) -> Any:
        return self.target.extract_reasoning_streaming(*arguments)


class _ToolState(_State):
    """An output with calls of tools."""

    def __init__(self, parser: AdaptedParser, request: ParserRequest) -> None:
        super().__init__(parser, request)
        self._open = -1  # index of the call that has begun in a stream

    def whole(self) -> Iterator[OutputEvent]:
        result = self.target.extract_tool_calls(self.text, self.chat)
        if not result.tools_called:
            yield ContentText(self.shown)
            return
        if reason := self._problem(result.tool_calls):
            yield MalformedText(self.shown, reason)
            return
        if result.content:
            yield ContentText(result.content)
        for call in result.tool_calls:
            yield ToolCallBegin(call.function.name, call.id)
            yield ToolCallArguments(call.function.arguments)
            yield ToolCallEnd()

    def _problem(self, calls: Sequence[Any]) -> str:
        """Return why calls are no calls of the request's tools; empty if they are."""
        for call in calls:
            name, arguments = call.function.name, call.function.arguments
            if name not in self.request.tools:
                return f"there is no tool {name!r}"
            try:
                fields = json.loads(arguments)
            except (TypeError, ValueError) as error:
                return f"the arguments of {name!r} are no JSON: {error}"
            if not isinstance(fields, dict):
                return f"the arguments of {name!r} are no JSON object"
        return ""

    def delta(self, *arguments: Any) -> Any:
        return self.target.extract_tool_calls_streaming(*arguments, self.chat)

    def events(self, delta: Any) -> Iterator[OutputEvent]:
        yield from super().events(delta)
        for part in delta.tool_calls or ():
            function = part.function
            if part.index != self._open and function is not None and function.name:
                if self._open >= 0:
                    yield ToolCallEnd()
                self._open = part.index
                yield ToolCallBegin(function.name, part.id)
            if function is not None and function.arguments:
                yield ToolCallArguments(function.arguments)

    def finish(self) -> Sequence[OutputEvent]:
        """End the output, and with it a streamed call."""
        if not self.is_streaming:
            return super().finish()
        rest = self.target.get_remaining_unstreamed_args() if self._open >= 0 else ""
        events: list[OutputEvent] = [ToolCallArguments(rest)] if rest else []
        return [*events, ToolCallEnd()] if self._open >= 0 else events
