"""The format of parsed outputs, and the reader of one completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.errors import PluginFaultError, RequestError
from hardpoint.plugins import (
    CompletionOutput,
    EngineCoreRequest,
    Finish,
    ReasoningMarkers,
    RequestOutputKind,
)
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.plugins.text import OutputFormat, OutputReader, ToolCalls
from hardpoint.toolkit.parsing.completion_parser import CompletionParser
from hardpoint.toolkit.parsing.output_parsers import OutputParsers, SoughtCalls

if TYPE_CHECKING:
    from hardpoint.plugins.text.output_parser import RequestedCalls


class ParsedFormat(OutputFormat):
    """The format of outputs that parsers read."""

    def __init__(
        self,
        parsers: OutputParsers,
        requested: RequestedCalls | None,
        answer: StructuredOutputs | None,
    ) -> None:
        """Use parsers, which are closed with the format.

        Args:
            requested: the tools of the request; None without any.
            answer: form of an answer that is not a call; None if the request states none.
        """
        self._parsers, self._requested = parsers, requested
        tools = parsers.tools
        if requested is None or tools is None:
            return
        if requested.required is None:
            self.answer = answer
        by_reasoning = parsers.reasoning or tools
        self.calls = ToolCalls(
            parser=tools,
            tools=requested.tools,
            required=requested.required,
            strict=requested.strict,
            parallel=requested.parallel,
            prefix=lambda: parsers.content_prefix,
            markers=by_reasoning.markers,
        )

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The tokens that enclose reasoning; with tools, also tokens around calls.

        Raises:
            RequestError: the parser failed.
        """
        return self._parsers.markers

    def open(self, request: EngineCoreRequest) -> OutputReader | None:
        """Return the reader of one completion.

        Raises:
            PluginFaultError: a parser failed.
        """
        form, requested = request.params.structured, self._requested
        sought: SoughtCalls | None = None
        if requested is not None and (form is None or form.structural_tag is not None):
            sought = SoughtCalls(requested.tools, self.answer)
        try:
            state = self._parsers.open(request.known_prompt_ids, sought)
        except RequestError as refusal:  # for the markers of a parser, which it names
            raise PluginFaultError(str(refusal)) from refusal
        if state is None:
            return None
        return ParsedReader(
            CompletionParser(
                state,
                self._parsers.special,
                delta=request.params.output_kind is RequestOutputKind.DELTA,
                parallel=requested is None or requested.parallel,
            ),
            may_end=self._parsers.end_requests,
        )

    def close(self) -> None:
        """Close the parsers that are of one request alone."""
        self._parsers.close()


class ParsedReader(OutputReader):
    """Reads a completion by a parser."""

    def __init__(self, parser: CompletionParser, *, may_end: bool = False) -> None:
        self._parser = parser
        self.special, self.may_end = parser.special, may_end

    @property
    def has_calls(self) -> bool:  # type: ignore[override]
        """Whether there is a complete call."""
        return self._parser.parts.has_calls

    def read(self, text: str) -> Finish | None:
        """Parse new text.

        Raises:
            PluginFaultError: the parser failed.
        """
        return self._parser.read(text)

    def mark(self, token_id: int, piece: str, end: int) -> None:
        """Mark a special token."""
        self._parser.mark(token_id, piece, end)

    def complete(self, completion: CompletionOutput, *, finished: bool) -> None:
        """Set reasoning, content and calls.

        Raises:
            PluginFaultError: the parser failed.
        """
        self._parser.parse(completion.text, finished=finished)
        parts = self._parser.parts
        completion.reasoning, completion.content, completion.tool_calls = parts.pop()
        completion.void_calls = tuple(parts.void_calls)
        if finished:
            completion.warning = parts.warning
