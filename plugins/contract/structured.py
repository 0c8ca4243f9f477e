"""Structured output: constraints on the text of a completion."""

from .requests.structured import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JsonSchemaFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    SequenceFormat,
    StarFormat,
    StructuralTag,
    StructuredOutputs,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
    walk_formats,
)
from .requests.structured import StructuredFormat as StructuredFormat

__all__ = [
    "AnyTextFormat",
    "ConstStringFormat",
    "Format",
    "GrammarFormat",
    "JsonSchemaFormat",
    "OptionalFormat",
    "OrFormat",
    "PlusFormat",
    "RegexFormat",
    "SequenceFormat",
    "StarFormat",
    "StructuralTag",
    "StructuredOutputs",
    "TagFormat",
    "TagsWithSeparatorFormat",
    "TokenFormat",
    "TriggeredTagsFormat",
    "walk_formats",
]
