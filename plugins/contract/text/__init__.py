"""Interfaces of text: tokenizers, request arguments, grammars, output parsers, IO processors."""

from .arguments import ComponentWithArguments as ComponentWithArguments
from .arguments import (
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
    ParserRequest,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from .output_parser import OutputState as OutputState
from .output_parser import Role as Role
from .tokenizer import (
    DecodeStream,
    EncodedPair,
    Tokenizer,
    TokenizerContext,
)
from .vocabulary import Vocabulary

__all__ = [
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
    "ParserRequest",
    "PrepareContext",
    "ReasoningText",
    "Tokenizer",
    "TokenizerContext",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "Vocabulary",
]
