"""Output parsers: find reasoning, content and tool calls in what a model writes."""

from .text.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    OutputState,
    ParserRequest,
    ReasoningText,
    Role,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from .text.output_parser import join_events as join_events

__all__ = [
    "ContentText",
    "MalformedText",
    "OutputEvent",
    "OutputParser",
    "OutputParserContext",
    "OutputState",
    "ParserRequest",
    "ReasoningText",
    "Role",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
]
