"""The output parsers of a request: one for reasoning, one for tool calls, or one for both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hardpoint.plugins import (
    OutputParser,
    ParserRequest,
    ReasoningMarkers,
    Tokenizer,
)
from hardpoint.plugins.output_parser import OutputState
from hardpoint.plugins.structured import StructuredOutputs

from .completion_parser import ChainedState
from .json_scanner import CallOrJson

__all__ = ["OutputParsers", "SoughtCalls"]


class SoughtCalls(NamedTuple):
    """The calls that are looked for in the outputs of a request.

    Attributes:
        tools: JSON schemas of arguments, by the name of the tool.
        answer: form of an answer that is not a call, where a grammar makes outputs one of the two.
    """

    tools: Mapping[str, Mapping[str, Any]]
    answer: StructuredOutputs | None = None

    @property
    def answer_is_json(self) -> bool:
        """Whether an output is a call or JSON."""
        return self.answer is not None and self.answer.format in ("json", "json_object")


class OutputParsers:
    """The parsers of a request's outputs, for as long as somebody holds them.

    Attributes:
        special: texts of the special tokens that they take, by id.
        reasoning: finds reasoning; None without one.
        tools: finds tool calls in requests that have tools; None without one.
        by_kind: the same parsers, by the kind that they are on under.
        fallback: opens a parser of calls that a grammar makes any model write; None where the
            format of its calls is known, or none are to be found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        by_kind: Mapping[str, OutputParser],
        to_close: Collection[OutputParser | OutputParsers] = (),
        fallback: Callable[[], OutputParser | None] | None = None,
    ) -> None:
        """Use a parser for each kind; one of both roles may be given twice.

        Args:
            to_close: parsers of one request, closed with it.
            fallback: see the attribute.

        Raises:
            RequestError: a parser failed.
        """
        self._tokenizer, self.by_kind, self._to_close = tokenizer, by_kind, list(to_close)
        self._holders = 1
        self.fallback = fallback
        self.reasoning = by_kind.get("reasoning_parsers")
        self.tools = by_kind.get("tool_parsers")
        ids = frozenset[int]().union(*(parser.token_ids for parser in by_kind.values()))
        texts = {token: text for text, token in tokenizer.special_tokens.items()} if ids else {}
        self.special: Mapping[int, str] = {token: texts.get(token, "") for token in ids}

    def with_own(self, parsers: Mapping[str, OutputParser]) -> OutputParsers:
        """Return the parsers of a request that has some of its own, by kind."""
        by_kind = {**self.by_kind, **parsers}
        if self.reasoning is self.tools and self.reasoning is not None:
            by_kind = dict.fromkeys(by_kind, next(iter(parsers.values())))
        return OutputParsers(self._tokenizer, by_kind, parsers.values(), self.fallback)

    def of_any_model(self) -> OutputParsers:
        """Return the parsers of a request that a grammar makes call tools.

        Without a parser of the model's own format, there is another one, unless there may be none.
        They are held in place of these.
        """
        parser = None if self.fallback is None else self.fallback()
        if parser is None:
            return self
        by_kind = {**self.by_kind, "tool_parsers": parser}
        return OutputParsers(self._tokenizer, by_kind, [self, parser])

    def __bool__(self) -> bool:
        return bool(self.by_kind)

    @property
    def end_requests(self) -> bool:
        """Whether a parser may end requests."""
        return any(parser.ends_requests for parser in self.by_kind.values())

    @property
    def components(self) -> list[OutputParser]:
        """Each parser once."""
        return list(dict.fromkeys(self.by_kind.values()))

    def hold(self) -> OutputParsers:
        """Return them to another holder, who closes them too: a completion, for example."""
        self._holders += 1
        return self

    def close(self) -> None:
        """Close the parsers that are of one request alone, once the last holder has closed them."""
        self._holders -= 1
        while self._to_close and not self._holders:
            self._to_close.pop().close()

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The token ids that enclose reasoning; None without a reasoning parser.

        Raises:
            RequestError: the parser failed.
        """
        return None if self.reasoning is None else self.reasoning.markers()

    @property
    def content_prefix(self) -> str:
        """The text between the end of the reasoning and the content, with its markers."""
        parser = self.reasoning or self.tools
        ids = () if parser is None else parser.markers().content_prefix
        return self._tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""

    def open(
        self, prompt_token_ids: Sequence[int], sought: SoughtCalls | None
    ) -> OutputState | None:
        """Return the state of a new output; None if nothing is to be found in it.

        Args:
            prompt_token_ids: before the output.
            sought: calls that are looked for; None without tools.

        Raises:
            PluginFaultError: a parser failed.
            RequestError: it failed to give its markers.
        """
        markers = self.markers
        is_open = markers is not None and markers.is_open(prompt_token_ids)
        with_tools = None if sought is None else self.tools
        tools = {} if sought is None else sought.tools
        if self.reasoning is not None and self.reasoning is with_tools:
            both = ParserRequest(reasoning_open=is_open, tools=tools)
            return with_tools.open(both)
        state = reasoning = tool_calls = None
        if self.reasoning is not None:
            request = ParserRequest(roles=("reasoning",), reasoning_open=is_open, tools=tools)
            state = reasoning = self.reasoning.open(request)
        if with_tools is not None:
            inside = reasoning is None and with_tools.markers().is_open(prompt_token_ids)
            request = ParserRequest(roles=("tools",), reasoning_open=inside, tools=tools)
            tool_calls = with_tools.open(request)
            if sought is not None and sought.answer_is_json:
                tool_calls = CallOrJson(tool_calls)
            state = tool_calls
        if self.reasoning is None or reasoning is None or tool_calls is None:
            return state
        return ChainedState(self.reasoning, reasoning, tool_calls)
