"""Output parsers and formats: reasoning, content, calls of tools, and results of other types."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from hardpoint import typed
from hardpoint.errors import ConfigError
from hardpoint.plugins.component.base import Context
from hardpoint.plugins.component.behaviour import (
    LONG,
    TOKEN_IDS,
    Returned,
    UnusableError,
    returns,
    unusable,
)
from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.requests.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.plan import Finish
from hardpoint.plugins.requests.structured import Format, StructuralTag, StructuredOutputs
from hardpoint.typed import prepared_type

from .arguments import ComponentWithArguments
from .tokenizer import Tokenizer

__all__ = [
    "ContentText",
    "OutputEvent",
    "OutputFormat",
    "OutputParser",
    "OutputParserContext",
    "OutputReader",
    "ToolCallArguments",
    "ToolCalls",
]


Role = Literal["reasoning", "tools"]
"""Role of a parser: it finds reasoning, or tool calls."""


class ReasoningText(NamedTuple):
    """A part of the model's reasoning."""

    text: str


class ContentText(NamedTuple):
    """A part of the answer."""

    text: str


class ToolCallBegin(NamedTuple):
    """The beginning of a call.

    Attributes:
        name: name of the tool.
        id: id of the call, where the format has one; else the engine makes it.
    """

    name: str
    id: str | None = None


class ToolCallArguments(NamedTuple):
    """A part of the JSON text of a call's arguments."""

    text: str


class ToolCallEnd(NamedTuple):
    """The end of a call."""


class MalformedText(NamedTuple):
    """Text of a call that cannot go on: it is content, and the reason is the output's warning.

    Text that follows and belongs to it is malformed, too. A call that has begun is void: its
    text is here, from its beginning on.
    """

    text: str
    reason: str


OutputEvent = (
    ReasoningText
    | ContentText
    | ToolCallBegin
    | ToolCallArguments
    | ToolCallEnd
    | MalformedText
    | Finish
)
"""The parts of an output, in order. A `Finish` ends the request; see `ends_requests`."""


def _events(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Sequence[OutputEvent]:  # noqa: ARG001
    if not isinstance(value, list | tuple):
        raise unusable(value, ", expected a list of events", LONG)
    return value


def _flag(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> bool:  # noqa: ARG001
    return bool(value)


EVENTS = Returned("a list of events, in an order in which they may come", _events)
FLAG = Returned("whether it is so", _flag)


class OutputState(Protocol):
    """The parser of one request's output, fed piece by piece.

    However the text is cut into pieces, the events joined are the same.
    """

    @property
    @returns(FLAG)
    def in_reasoning(self) -> bool:
        """Whether the output is inside reasoning."""

    @returns(EVENTS)
    def feed(self, text: str) -> Sequence[OutputEvent]:
        """Take a piece of text of any length."""

    @returns(EVENTS)
    def feed_token(self, token_id: int, text: str) -> Sequence[OutputEvent]:
        """Take a special token: one of the parser's `token_ids`, or one of another parser.

        Args:
            token_id: id of the token.
            text: text of the token, as far as outputs show it. A token that is not a marker is text
                as any other.
        """

    @returns(EVENTS)
    def finish(self) -> Sequence[OutputEvent]:
        """End the output, and return the events of its pending text."""


@dataclass(frozen=True, kw_only=True)
class ParserRequest:
    """A request for a parsed output.

    Attributes:
        roles: parts to find; the text of anything else is content.
        reasoning_open: whether the output begins inside reasoning, by the markers and the prompt.
        tools: JSON schemas of arguments, by the name of the tool; a parser of reasoning gets them,
            too: without any, no call ends the reasoning.
    """

    roles: tuple[Role, ...] = ("reasoning", "tools")
    reasoning_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutputParserContext(Context["OutputParser"]):
    """Context of an output parser.

    Attributes:
        arguments: arguments of the request that the parser is for; None, for the parser that
            serves all requests without arguments, is the defaults.
    """

    tokenizer: Tokenizer
    arguments: Any = None


def _markers(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> ReasoningMarkers:
    if not isinstance(value, ReasoningMarkers):
        raise unusable(value, ", expected ReasoningMarkers", LONG)

    def ids(of: Any) -> tuple[int, ...]:
        return tuple(TOKEN_IDS.check(of, args, originals))

    def sequences(of: Any) -> tuple[tuple[int, ...], ...]:
        try:
            items = list(of)
        except TypeError:
            raise unusable(of, ", expected sequences of token ids", LONG) from None
        return tuple(map(ids, items))

    return ReasoningMarkers(
        start=sequences(value.start),
        end=sequences(value.end),
        begins_open=bool(value.begins_open),
        message_prefix=ids(value.message_prefix),
        content_prefix=ids(value.content_prefix),
        calls=ids(value.calls),
        boundaries=ids(value.boundaries),
        blanks=None if value.blanks is None else ids(value.blanks),
    )


def _token_ids(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> frozenset[int]:
    return frozenset(TOKEN_IDS.check(value, args, originals))


def _format(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> Format:  # noqa: ARG001
    try:
        return typed.convert(
            StructuralTag(format=value), StructuralTag, path="StructuralTag"
        ).format
    except ConfigError as wrong:
        raise UnusableError(f"returned no Format: {wrong}") from None


def _state(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> OutputState:  # noqa: ARG001
    _ = value.feed, value.feed_token, value.finish
    return value  # type: ignore[no-any-return]


_NOUN = "output parser"
MARKERS = Returned("`ReasoningMarkers` of token ids", _markers)
MARKED_IDS = Returned("token ids of the model", _token_ids)
FORMAT = Returned("a `Format`", _format)
STATE = Returned("an `OutputState`", _state)


class OutputParser(ComponentWithArguments):
    """Finds reasoning, tool calls or both in outputs, in the frontend.

    One parser serves all requests that give it no arguments; each output has a state of its own.
    `FormatParser` makes one of a table of the format's markers.

    Attributes:
        roles: parts that it finds. It can be enabled under the kind of each: `reasoning_parsers`,
            `tool_parsers`. Where two parsers are enabled, the content that the reasoning parser
            finds is parsed for tools.
        template_marks: texts that the chat templates of its models have, all of them: where the
            configuration is "auto", the parser with the most of them is chosen. Without any, it
            never is.
        other_names: names that it has elsewhere, which the configuration and requests may use for
            it where no parser of that kind has them.
        any_model: whether a grammar makes any model write its calls. Where the chat template shows
            no other format, requests that require a call use the first such parser.
        ends_requests: whether its states may give a `Finish`, which ends the request after the text
            that they have got. Such a parser is fed token by token; others are fed when an output
            is shown. Where a stop string may begin, text waits.
    """

    roles: ClassVar[tuple[Role, ...]]
    template_marks: ClassVar[tuple[str, ...]] = ()
    other_names: ClassVar[tuple[str, ...]] = ()
    any_model: ClassVar[bool] = False
    ends_requests: ClassVar[bool] = False
    context: OutputParserContext

    def __init__(self, context: OutputParserContext) -> None:
        """Store the context; `self.arguments` is its field, too, or the defaults."""
        super().__init__(context)
        arguments = context.arguments
        self.arguments: Any = prepared_type(type(self))() if arguments is None else arguments

    @returns(MARKERS, refuses=_NOUN, once=True)
    def markers(self) -> ReasoningMarkers:
        """Return the token ids that enclose reasoning; none in a parser of tools only.

        The engine asks once for each parser. Grammars and thinking budgets go by them: they mark
        where the answer begins.
        """
        return ReasoningMarkers()

    @property
    @returns(MARKED_IDS, refuses=_NOUN, once=True)
    def token_ids(self) -> frozenset[int]:
        """Special tokens that states take as ids, so that no text can pass for them."""
        return frozenset()

    @returns(FORMAT, raises=(NotImplementedError, ValueError), refuses=_NOUN)
    def call_format(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        required: bool,
        parallel: bool = True,
    ) -> Format:
        """Return the format of an answer with calls of tools, for a grammar.

        It begins where the answer does, after `markers().message_prefix`. Every text of it is
        parsed to calls with arguments that fit their schemas, and to content.

        Args:
            tools: JSON schemas of arguments, by the name of the tool; at least one.
            required: whether the answer is one call or more, and nothing else. Otherwise it is
                free text in which only calls are constrained.
            parallel: whether there may be several calls.

        Raises:
            NotImplementedError: the parser gives no grammar.
            ValueError: it gives none of these tools.
        """
        raise NotImplementedError(f"the tool parser {self.name!r} gives no grammar of its calls")

    @returns(STATE)
    @abstractmethod
    def open(self, request: ParserRequest) -> OutputState:
        """Return the state of a new output."""

    def split(self, text: str, request: ParserRequest | None = None) -> list[OutputEvent]:
        """Return the events of a whole output, parts of the same kind joined."""
        state = self.open(request or ParserRequest())
        return join_events([*state.feed(text), *state.finish()])


def join_events(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return events with neighboring texts of the same kind joined, and empty ones left out."""
    joined: list[OutputEvent] = []
    for event in events:
        if isinstance(event, ReasoningText | ContentText | ToolCallArguments):
            if not event.text:
                continue
            if joined and type(joined[-1]) is type(event):
                joined[-1] = type(event)(joined[-1].text + event.text)
                continue
        elif isinstance(event, MalformedText) and joined:
            last = joined[-1]
            if isinstance(last, MalformedText) and last.reason == event.reason:
                joined[-1] = MalformedText(last.text + event.text, event.reason)
                continue
        joined.append(event)
    return joined


@dataclass(frozen=True, kw_only=True)
class RequestedCalls:
    """The tools of a request, and the calls of them that its caller wants.

    Attributes:
        tools: JSON schemas of arguments, by the name of the tool.
        required: names of tools; at least one has to be called. None requires no call.
        strict: names of the tools with arguments that have to fit their schemas.
        parallel: whether there may be several calls.
    """

    tools: Mapping[str, Mapping[str, Any]]
    required: Sequence[str] | None = None
    strict: Collection[str] = ()
    parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class ToolCalls:
    """The calls of tools that a request may have.

    Attributes:
        parser: finds the calls in the output, and has the format that they are written in.
        tools: JSON schemas of arguments, by the name of the tool.
        required: names of tools; at least one has to be called. None requires no call.
        strict: names of the tools with arguments that have to fit their schemas.
        parallel: whether there may be several calls.
        prefix: returns the text between the end of the reasoning and the answer.
        markers: returns the markers of the reasoning; a parser is asked, which may fail.
    """

    parser: OutputParser
    tools: Mapping[str, Mapping[str, Any]]
    required: Sequence[str] | None
    strict: Collection[str]
    parallel: bool
    prefix: Callable[[], str]
    markers: Callable[[], ReasoningMarkers]


class OutputReader:
    """Reads one completion and completes its outputs.

    A fault ends the request; its outputs then have the text alone.

    Attributes:
        special: ids of the tokens that `mark` gets.
        may_end: whether `read` is called, because it may end the request.
        has_calls: whether the completion has a complete call of a tool: its finish reason is then
            "tool_calls" instead of "stop", and it has no answer to validate.
    """

    special: Collection[int] = ()
    has_calls: bool = False
    may_end: bool = False

    def read(self, text: str) -> Finish | None:  # noqa: ARG002
        """Read text before the `complete` that has it; return a `Finish` to end the request.

        Called for each token with text, once no stop string can begin in it any more.
        """
        return None

    def update(self, output: EngineCoreOutput) -> None:
        """Observe an output of the engine, before `complete`."""

    def mark(self, token_id: int, piece: str, end: int) -> None:
        """Observe a token of `special`, before the `complete` with the text that has it.

        Args:
            token_id: the token.
            piece: text that the token has added.
            end: position in the whole text after it.
        """

    def complete(self, completion: CompletionOutput, *, finished: bool) -> None:
        """Set fields of an output, such as `reasoning`, `content` and `tool_calls`.

        Args:
            completion: has the text so far, or the new text of a delta.
            finished: whether its text is complete. May be called again with it.
        """

    def result(self, output: RequestOutput) -> RequestOutput | PoolingRequestOutput | None:
        """Return the replacement of an output; None shows nothing to the caller."""
        return output


class OutputFormat:
    """The format of the outputs of one request, shared by its completions.

    Attributes:
        calls: the calls of tools that are looked for; None without any.
        answer: form of an answer that is not one of `calls`; None if the request states none.
    """

    calls: ToolCalls | None = None
    answer: StructuredOutputs | None = None

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The tokens that enclose reasoning; None if outputs have no reasoning.

        Raises:
            RequestError: they cannot be found; the request is rejected.
        """
        return None

    def open(self, request: EngineCoreRequest) -> OutputReader | None:  # noqa: ARG002
        """Return the reader of one completion; None if there is nothing to read in it.

        Args:
            request: request of the completion, as the engine has it.
        """
        return None

    def end(self, outcome: Literal["finished", "aborted", "failed"]) -> None:
        """Observe the end of the request; called once for each format, before `close`.

        Args:
            outcome: "aborted" by the caller or by a timeout; "failed" by an error or because the
                request is rejected after `output_format`. Of several completions, "failed" comes
                before "aborted", and both before "finished".
        """

    def close(self) -> None:
        """Release resources; called once, when the last completion has ended."""
