"""Interfaces of text: tokenizers, request arguments, grammars, output parsers, IO processors."""

from .arguments import (
    ComponentWithArguments,
    PrepareContext,
)
from .grammars import (
    GrammarBackend,
    GrammarContext,
    GrammarState,
)
from .io_processor import (
    IOProcessor,
    IOProcessorContext,
)
from .output_parser import (
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
from .tokenizer import (
    DecodeStream,
    EncodedPair,
    Tokenizer,
    TokenizerContext,
)
from .vocabulary import Vocabulary

__all__ = [
    "ComponentWithArguments",
    "ContentText",
    "DecodeStream",
    "EncodedPair",
    "GrammarBackend",
    "GrammarContext",
    "GrammarState",
    "IOProcessor",
    "IOProcessorContext",
    "MalformedText",
    "OutputEvent",
    "OutputParser",
    "OutputParserContext",
    "OutputState",
    "ParserRequest",
    "PrepareContext",
    "ReasoningText",
    "Role",
    "Tokenizer",
    "TokenizerContext",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "Vocabulary",
]
