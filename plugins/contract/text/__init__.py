"""Interfaces of text: tokenizers, request arguments, grammars, output parsers, IO processors."""

from .arguments import ComponentWithArguments as ComponentWithArguments
from .arguments import (
    PrepareContext,
)
from .grammars import (
    GrammarBackend,
    GrammarContext,
)
from .grammars import GrammarState as GrammarState
from .io_processor import (
    IOProcessor,
    IOProcessorContext,
)
from .output_parser import (
    ContentText,
    OutputEvent,
    OutputFormat,
    OutputParser,
    OutputParserContext,
    OutputReader,
    ToolCallArguments,
    ToolCalls,
)
from .output_parser import MalformedText as MalformedText
from .output_parser import OutputState as OutputState
from .output_parser import ParserRequest as ParserRequest
from .output_parser import ReasoningText as ReasoningText
from .output_parser import RequestedCalls as RequestedCalls
from .output_parser import Role as Role
from .output_parser import ToolCallBegin as ToolCallBegin
from .output_parser import ToolCallEnd as ToolCallEnd
from .tokenizer import DecodeStream as DecodeStream
from .tokenizer import (
    EncodedPair,
    Tokenizer,
    TokenizerContext,
)
from .vocabulary import Vocabulary

__all__ = [
    "ContentText",
    "EncodedPair",
    "GrammarBackend",
    "GrammarContext",
    "IOProcessor",
    "IOProcessorContext",
    "OutputEvent",
    "OutputFormat",
    "OutputParser",
    "OutputParserContext",
    "OutputReader",
    "PrepareContext",
    "Tokenizer",
    "TokenizerContext",
    "ToolCallArguments",
    "ToolCalls",
    "Vocabulary",
]
