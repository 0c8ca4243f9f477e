"""Events and requests of output parsers, for parsers that make their states themselves."""

from hardpoint.plugins.text.output_parser import (
    ContentText,
    MalformedText,
    OutputEvent,
    ParserRequest,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = [
    "ContentText",
    "MalformedText",
    "OutputEvent",
    "ParserRequest",
    "ReasoningText",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
]
