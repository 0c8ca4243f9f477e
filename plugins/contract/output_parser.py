"""Output parsers: find reasoning, content and tool calls in the text of a model."""

from .text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    OutputParserContext,
    ToolCallArguments,
)
from .text.output_parser import MalformedText as MalformedText
from .text.output_parser import OutputState as OutputState
from .text.output_parser import ParserRequest as ParserRequest
from .text.output_parser import ReasoningText as ReasoningText
from .text.output_parser import Role as Role
from .text.output_parser import ToolCallBegin as ToolCallBegin
from .text.output_parser import ToolCallEnd as ToolCallEnd
from .text.output_parser import join_events as join_events

__all__ = [
    "ContentText",
    "OutputEvent",
    "OutputParser",
    "OutputParserContext",
    "ToolCallArguments",
]
