"""Formats of outputs: reasoning, calls of tools, and results that are not text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.plugins.requests.markers import ReasoningMarkers
from hardpoint.plugins.requests.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from hardpoint.plugins.requests.params import EngineCoreRequest
from hardpoint.plugins.requests.structured import StructuredOutputs
from hardpoint.plugins.text.output_parser import OutputParser


@dataclass(frozen=True, kw_only=True)
class RequestedCalls:
    """The tools of a request, and the calls of them that its caller wants.

    Attributes:
        tools: JSON schemas of arguments, by the name of the tool.
        required: names of the tools, one of which has to be called; None requires no call.
        strict: names of the tools whose arguments have to fit their schemas.
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
        required: names of the tools, one of which has to be called; None requires no call.
        strict: names of the tools whose arguments have to fit their schemas.
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
        has_calls: whether the completion has a complete call of a tool: its finish reason is then
            "tool_calls" instead of "stop", and it has no answer to validate.
    """

    special: Collection[int] = ()
    has_calls: bool = False

    def update(self, output: EngineCoreOutput) -> None:
        """Observe an output of the engine, before `complete`."""

    def mark(self, token_id: int, piece: str, end: int) -> None:
        """Observe a token of `special`, before the `complete` whose text has it.

        Args:
            token_id: the token.
            piece: text that the token has added.
            end: position in the whole text after it.
        """

    def complete(self, completion: CompletionOutput, *, finished: bool) -> None:
        """Set fields of an output, such as `reasoning`, `content` and `tool_calls`.

        Args:
            completion: has the text so far, or of deltas what is new.
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
            RequestError: they cannot be found; the request is refused.
        """
        return None

    def open(self, request: EngineCoreRequest) -> OutputReader | None:  # noqa: ARG002
        """Return the reader of one completion; None if there is nothing to read in it.

        Args:
            request: request of the completion, as the engine has it.
        """
        return None

    def close(self) -> None:
        """Release resources; called once, when the last completion has ended."""
