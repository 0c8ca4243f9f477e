"""Structured output: compiled grammars, followed token by token."""

from .grammars import StructuredOutput

__all__ = ["StructuredOutput"]
