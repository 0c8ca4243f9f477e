"""Output parsers: find reasoning, content and tool calls in what a model writes."""

from .text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from .text.output_parser import MalformedText as MalformedText
from .text.output_parser import OutputState as OutputState
from .text.output_parser import ParserRequest as ParserRequest
from .text.output_parser import Role as Role
from .text.output_parser import join_events as join_events

__all__ = [
    "ContentText",
    "OutputEvent",
    "OutputParser",
    "OutputParserContext",
    "ReasoningText",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
]
